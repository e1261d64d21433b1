"""The patch series for an installed SGLang wheel: apply, check, revert.

Called as `python -m kvc.sglang.patch`. Works on the files alone: neither git nor `patch` is needed, and SGLang is not
imported. Every touched file is known by its SHA-256 before and after, so each is either original, patched or foreign,
and an interrupted run is finished by the next one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvc.sglang.patch.diff import FileDiff, PatchError, parse

SERIES = Path(__file__).parent / "series"

__all__ = ["Installed", "PatchError", "Series", "supported"]


def supported() -> list[str]:
    """Versions that a series exists for."""
    return sorted(path.name for path in SERIES.iterdir() if (path / "UPSTREAM").is_file())


@dataclass(frozen=True)
class Series:
    """One series: which files it touches, what they look like before it, and its patches in order."""

    version: str
    originals: dict[str, str]
    """Path below the site folder → SHA-256 of the file as the wheel installs it."""
    patches: list[tuple[str, list[FileDiff]]]

    @classmethod
    def load(cls, version: str) -> Series:
        """Reads `UPSTREAM`, `series` and the patches it lists."""
        folder = SERIES / version
        lines = [line for line in (folder / "UPSTREAM").read_text().splitlines() if line and not line.startswith("#")]
        originals = {path: digest for digest, path in (line.split(maxsplit=1) for line in lines[1:])}
        names = (folder / "series").read_text().split()
        return cls(version, originals, [(name, parse(name, (folder / name).read_text())) for name in names])

    def forward(self, path: str, text: str) -> str:
        """The patched text of an original file."""
        for diff in self._diffs(path):
            text = diff.apply(text)
        return text

    def backward(self, path: str, text: str) -> str:
        """The original text of a patched file."""
        for diff in reversed(self._diffs(path)):
            text = diff.reversed().apply(text)
        return text

    def _diffs(self, path: str) -> list[FileDiff]:
        return [diff for _, diffs in self.patches for diff in diffs if diff.path == path]


@dataclass(frozen=True)
class Installed:
    """An installed SGLang and the state of each file that the series touches."""

    site: Path
    series: Series

    @classmethod
    def find(cls) -> Installed:
        """The SGLang of this interpreter; refuses a version without a series."""
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise PatchError("sglang is not installed in this environment: pip install sglang==" + supported()[-1])
        site = Path(next(iter(spec.submodule_search_locations))).parent
        version = importlib.metadata.version("sglang")
        if version not in supported():
            raise PatchError(f"sglang {version} is installed, supported: {', '.join(supported())}")
        return cls(site, Series.load(version))

    def state(self, path: str) -> str:
        """`original`, `patched` or `foreign`."""
        try:
            content = (self.site / path).read_bytes()
        except FileNotFoundError:
            return "foreign"
        if _digest(content) == self.series.originals[path]:
            return "original"
        try:
            before = self.series.backward(path, content.decode())
        except (PatchError, UnicodeDecodeError):
            return "foreign"
        return "patched" if _digest(before.encode()) == self.series.originals[path] else "foreign"

    def states(self) -> dict[str, str]:
        """The state of every touched file."""
        return {path: self.state(path) for path in self.series.originals}

    def apply(self) -> list[str]:
        """Patches what is original; returns the changed files. Nothing is written if any file is foreign."""
        return self._turn("original", self.series.forward)

    def revert(self) -> list[str]:
        """Restores what is patched, byte for byte; returns the changed files."""
        return self._turn("patched", self.series.backward)

    def _turn(self, source: str, change: Callable[[str, str], str]) -> list[str]:
        states = self.states()
        foreign = [path for path, state in states.items() if state == "foreign"]
        if foreign:
            raise PatchError(
                f"changed by something else, nothing was touched: {', '.join(foreign)}; reinstall "
                f"sglang=={self.series.version}"
            )
        new = {
            path: change(path, (self.site / path).read_bytes().decode()).encode()
            for path, state in states.items()
            if state == source
        }
        _replace_all(self.site, new)
        return sorted(new)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _replace_all(site: Path, new: dict[str, bytes]) -> None:
    """All or nothing: everything is written beside its target first; if a rename fails, the earlier ones are undone."""
    staged: list[tuple[Path, Path, bytes]] = []
    try:
        for path, content in new.items():
            target = site / path
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=".kvc-", suffix=".tmp")
            staged.append((Path(name), target, target.read_bytes()))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                file.flush()
                os.fsync(file.fileno())
        done: list[tuple[Path, bytes]] = []
        try:
            for temporary, target, before in staged:
                os.replace(temporary, target)
                done.append((target, before))
        except OSError:
            for target, before in done:
                target.write_bytes(before)
            raise
    except OSError as error:
        raise PatchError(f"nothing was changed: {error}") from error
    finally:
        for temporary, _, _ in staged:
            temporary.unlink(missing_ok=True)
