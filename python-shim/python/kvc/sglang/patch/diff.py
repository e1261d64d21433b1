"""Unified diffs, applied at their exact lines with exact context: a file that differs anywhere near is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """Why a series cannot be applied, checked or reverted; one line, with what to do."""


@dataclass(frozen=True)
class Hunk:
    """Lines `old` at line `start` (from 0) of the old text become `new`; `new_start` is the same place afterwards."""

    start: int
    new_start: int
    old: list[str]
    new: list[str]


@dataclass(frozen=True)
class FileDiff:
    """What one patch does to one file."""

    patch: str
    path: str
    hunks: list[Hunk] = field(default_factory=list)

    def apply(self, text: str) -> str:
        """The changed text; raises `PatchError` if a hunk does not stand exactly where it says."""
        lines = text.splitlines(keepends=True)
        out: list[str] = []
        at = 0
        for hunk in self.hunks:
            end = hunk.start + len(hunk.old)
            if hunk.start < at or lines[hunk.start : end] != hunk.old:
                raise PatchError(f"{self.patch}: {self.path}:{hunk.start + 1}: the lines differ from the patch")
            out += lines[at : hunk.start] + hunk.new
            at = end
        return "".join(out + lines[at:])

    def reversed(self) -> FileDiff:
        """The diff that undoes this one."""
        return replace(self, hunks=[Hunk(h.new_start, h.start, h.new, h.old) for h in self.hunks])


def parse(name: str, text: str) -> list[FileDiff]:
    """Reads one patch file. Text before the first `---` is its description."""
    diffs: list[FileDiff] = []
    lines = text.splitlines(keepends=True)
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- a/") and at + 1 < len(lines) and lines[at + 1].startswith("+++ b/"):
            diffs.append(FileDiff(name, lines[at + 1][6:].strip()))
            at += 2
        elif (match := _HUNK.match(line)) and diffs:
            start, old_count, new_start, new_count = (int(n) if n else 1 for n in match.groups())
            hunk, at = _hunk(name, lines, at + 1, start - 1, new_start - 1, old_count, new_count)
            diffs[-1].hunks.append(hunk)
        else:
            at += 1
    if not diffs:
        raise PatchError(f"{name}: no diff in it")
    return diffs


def _hunk(
    name: str, lines: list[str], at: int, start: int, new_start: int, old_count: int, new_count: int
) -> tuple[Hunk, int]:
    old: list[str] = []
    new: list[str] = []
    while len(old) < old_count or len(new) < new_count:
        if at == len(lines) or lines[at][0] not in " +-":
            raise PatchError(f"{name}: line {at + 1}: hunk is cut short")
        mark, content = lines[at][0], lines[at][1:]
        if mark in " -":
            old.append(content)
        if mark in " +":
            new.append(content)
        at += 1
    return Hunk(start, new_start, old, new), at
