"""One session as its client lives it: through a router, turn after turn, every answer against the plain server's. Used by
the tests of sync, moves, crashes and drain, and by the demo."""

import random
import time
from dataclasses import dataclass, field

from . import script
from .engine import Engine, Generate, Reply
from .oracle import Oracle


@dataclass
class Talk:
    """`history` is what the client would send next, without the new words."""

    router: Generate
    plain: Engine
    oracle: Oracle
    sid: str
    history: list[int] = field(default_factory=list)
    turns: int = 0
    answered: float = 0.0  # when the last answer was complete, as `time.monotonic` counts

    def __post_init__(self):
        self.rnd = random.Random(self.sid)

    def say(self, tokens: int) -> list[int]:
        """The next prompt: the history and `tokens` new ones. Sent again when its turn failed."""
        self.history = self.history + script.ids(self.rnd, tokens)
        return self.history

    def rewrite(self, cut: int) -> None:
        """The client changes its mind about the last `cut` tokens."""
        self.history = self.history[:-cut]

    def ask(self, n: int = 6, stream: bool = False, **more) -> Reply:
        """Sends the history as it stands; the answer becomes part of it."""
        prompt = self.history
        call = self.router.stream if stream else self.router.generate
        reply = call(prompt, self.sid, n=n, **more)
        self.answered = time.monotonic()
        self.judge(prompt, reply)
        return reply

    def judge(self, prompt: list[int], reply: Reply) -> None:
        want = self.plain.generate(prompt, n=len(reply.tokens)).tokens
        self.oracle.tokens(prompt, reply.tokens, want, f"{self.sid} turn {self.turns}")
        self.turns += 1
        self.history = prompt + reply.tokens

    def turn(self, tokens: int, n: int = 6, stream: bool = False, **more) -> Reply:
        """One whole turn with `tokens` new ones."""
        self.say(tokens)
        return self.ask(n, stream, **more)
