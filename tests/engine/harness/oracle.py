"""Compares answers with the plain server's, token by token, and knows when a difference is only rounding.

The shape of a batch may change a float32 sum in its last bit. A difference counts unless the plain server itself gives the
two best tokens there within DELTA of each other; then the answers are compared up to that point only, and the tie
is counted.
"""

from dataclasses import dataclass, field
from threading import Lock

from .engine import Engine

DELTA = 1e-4
TIES_ALLOWED = 0.01


@dataclass
class Oracle:
    """Collects verdicts; `close` judges the share of ties."""

    plain: Engine
    turns: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def tokens(self, ids: list[int], got: list[int], want: list[int], what: str) -> None:
        """`got` against `want`, the plain server's answer to the prompt `ids`."""
        at = first_difference(got, want)
        gap = None if at is None else self.gap(ids, want, at)
        self.note(at, gap, f"{what}: from token {at}: got {got[at or 0 :][:5]}, plain {want[at or 0 :][:5]}, gap {gap}")

    def text(self, chat: dict, got: str, want: str, what: str) -> None:
        """The same for the body of a chat request and its text."""
        same = got == want
        gap = None if same else self.smallest_chat_gap(chat)
        self.note(None if same else 0, gap, f"{what}: got {got!r}, plain {want!r}, smallest gap {gap}")

    def note(self, at: int | None, gap: float | None, line: str) -> None:
        with self.lock:
            self.turns += 1
            if at is not None and gap is not None and gap <= DELTA:
                self.ties += 1
            elif at is not None:
                self.wrong.append(line)

    def close(self) -> None:
        assert not self.wrong, f"{len(self.wrong)} of {self.turns} answers differ:\n" + "\n".join(self.wrong[:10])
        assert self.ties <= TIES_ALLOWED * self.turns, f"{self.ties} near-ties in {self.turns} turns"

    def gap(self, ids: list[int], want: list[int], at: int) -> float | None:
        """Logit gap of the plain server's two best tokens at generated position `at`."""
        if at >= len(want):
            return None  # another length is never rounding
        reply = self.plain.generate([*ids, *want[:at]], n=1, return_logprob=True, top_logprobs_num=2)
        best, second = reply.meta["output_top_logprobs"][0][:2]
        return best[0] - second[0]

    def smallest_chat_gap(self, chat: dict) -> float:
        asked = {**chat, "stream": False, "logprobs": True, "top_logprobs": 2}
        choice = self.plain.http.post("/v1/chat/completions", asked).json["choices"][0]
        tops = [t["top_logprobs"] for t in choice["logprobs"]["content"]]
        return min(top[0]["logprob"] - top[1]["logprob"] for top in tops)


def first_difference(a: list, b: list) -> int | None:
    """Where they part; None if equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
