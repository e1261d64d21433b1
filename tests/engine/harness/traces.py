"""Recorded agent sessions as prompts: sizes and shared prefixes from the trace, tokens made from its block hashes.

A trace names each full block of 64 prompt tokens by a hash; equal hashes mean an equal prefix. Scaled down by `scale`, a block
becomes 64 / scale tokens drawn from the hash, so that equal hashes give equal tokens. Where a prompt only extends the
last one, the answer that was really generated stands in it, as an agent would send it.
"""

import gzip
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

BLOCK = 64


@dataclass(frozen=True)
class Turn:
    """One request of the trace, in its own token counts."""

    input: int
    output: int
    hashes: list[int]
    streamed: bool
    think_s: float


@dataclass
class Trace:
    """A session to replay; `prompt` and `answered` in turn order."""

    sid: str
    turns: list[Turn]
    scale: int
    last: list[int]
    last_hashes: list[int]

    @staticmethod
    def load(path: Path, scale: int) -> "Trace":
        with gzip.open(path, "rt") as file:
            requests = [r for r in json.load(file)["requests"] if r["type"] != "subagent"]
        turns = [Turn(r["in"], r["out"], r["hash_ids"], r["type"] == "s", r.get("think_time") or 0.0) for r in requests]
        return Trace(path.name.split(".")[0], turns, scale, [], [])

    def prompt(self, turn: Turn) -> list[int]:
        """Token ids of this turn's prompt; `answered` must have been called for the one before."""
        size = BLOCK // self.scale
        same = 0
        while same < min(len(turn.hashes), len(self.last_hashes)) and turn.hashes[same] == self.last_hashes[same]:
            same += 1
        extends = same == len(self.last_hashes)
        tokens = self.last[:] if extends else self.last[: same * size]
        length = max(1, turn.input // self.scale)
        while len(tokens) < length:
            block = len(tokens) // size
            name = turn.hashes[block] if block < len(turn.hashes) else -turn.input
            rnd = random.Random(zlib.crc32(f"{self.sid} {name}".encode()))
            made = [rnd.randrange(1, 250) for _ in range(size)]
            tokens += made[len(tokens) % size :]
        self.last, self.last_hashes = tokens[:length], turn.hashes
        return list(self.last)

    def answered(self, tokens: list[int]) -> None:
        self.last = self.last + tokens

    def new_tokens(self, turn: Turn, least: int = 4, most: int = 48) -> int:
        """How many tokens to generate."""
        return min(most, max(least, turn.output // self.scale))
