"""Sessions as agents make them, from a seed: long first prompts, small appends, now and then a large one, a rewritten or a
shortened history."""

import random
from dataclasses import dataclass

SPECIAL_FROM = 256  # token ids above are the tokenizer's special ones


def ids(rnd: random.Random, n: int) -> list[int]:
    return [rnd.randrange(1, 250) for _ in range(n)]


def words(rnd: random.Random, n: int) -> str:
    """About `n` tokens of text; the tokenizer has one token per byte."""
    return " ".join(
        "".join(rnd.choices("abcdefghijklmnopqrstuvwxyz", k=rnd.randrange(2, 9))) for _ in range(n // 6 + 1)
    )


@dataclass(frozen=True)
class Step:
    """One turn: how the history changes, and how the turn is asked."""

    change: str  # first, append, large, rewrite, shorten
    stream: bool
    n: int


@dataclass
class Session:
    """A native session: `history` are the token ids so far."""

    sid: str
    rnd: random.Random
    history: list[int]
    steps: list[Step]
    large: int

    def prompt(self, step: Step) -> list[int]:
        """The next prompt; also the history from here on."""
        cut = len(self.history)
        if step.change == "rewrite":
            cut -= self.rnd.randrange(20, min(120, cut // 2))
        elif step.change == "shorten":
            self.history = self.history[: cut - self.rnd.randrange(30, cut // 3)]
            return list(self.history)
        more = 0 if step.change == "first" else self.large if step.change == "large" else self.rnd.randrange(8, 90)
        self.history = self.history[:cut] + ids(self.rnd, more)
        return list(self.history)

    def answered(self, tokens: list[int]) -> None:
        self.history += tokens


@dataclass
class Chat:
    """An OpenAI chat session: `messages` so far."""

    sid: str
    rnd: random.Random
    messages: list[dict]
    steps: list[Step]

    def body(self, step: Step) -> dict:
        if step.change == "rewrite" and len(self.messages) > 2:
            self.messages[-1] = {"role": "assistant", "content": words(self.rnd, 30)}
        elif step.change == "shorten" and len(self.messages) > 4:
            self.messages = self.messages[:-2]
        if step.change != "first":
            self.messages.append({"role": "user", "content": words(self.rnd, 60)})
        return {
            "model": "tiny", "messages": list(self.messages), "max_tokens": step.n, "temperature": 0,
            "ignore_eos": True, "stream": step.stream,
        }  # fmt: skip

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


CHANGES = ["append", "append", "rewrite", "append", "large", "append", "shorten", "append", "append", "rewrite"]


def steps(rnd: random.Random, turns: int, turn_of: int) -> list[Step]:
    """`first`, then every kind of change; `turn_of` rotates them, so that sessions differ."""
    changes = ["first"] + [CHANGES[(i + turn_of) % len(CHANGES)] for i in range(turns - 1)]
    return [Step(change, rnd.random() < 0.5, rnd.randrange(5, 24)) for change in changes]


def native(seed: int, count: int, turns: int, shared: int, first: int, large: int) -> list[Session]:
    """`count` sessions with a common head of `shared` tokens and about `first` tokens of their own."""
    rnd = random.Random(seed)
    head = ids(rnd, shared)
    out = []
    for i in range(count):
        own = random.Random(rnd.random())
        out.append(Session(f"native-{seed}-{i}", own, head + ids(own, first + 37 * i), steps(own, turns, i), large))
    return out


def chats(seed: int, count: int, turns: int) -> list[Chat]:
    rnd = random.Random(seed)
    system = {"role": "system", "content": words(rnd, 300)}
    out = []
    for i in range(count):
        own = random.Random(rnd.random())
        first = [system, {"role": "user", "content": words(own, 200)}]
        out.append(Chat(f"chat-{seed}-{i}", own, first, steps(own, turns, i)))
    return out
