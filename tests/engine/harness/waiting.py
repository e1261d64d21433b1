"""Requests in the background, and waiting for something to be so, with a deadline."""

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from . import script
from .module import Seed, Worker


class Background:
    """One request in a thread; `done()` gives its result or raises its error."""

    def __init__(self, call, *args, **kw):
        self.pool = ThreadPoolExecutor(1)
        self.future = self.pool.submit(call, *args, **kw)

    def done(self, timeout_s: float = 60):
        try:
            return self.future.result(timeout_s)
        finally:
            self.pool.shutdown(wait=False)


def until(what, deadline_s: float = 15):
    """Waits for `what()` to be true."""
    end = time.monotonic() + deadline_s
    while not (got := what()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return got


def follows(replica: Worker, owner: Worker, sid: str, deadline_s: float = 15) -> dict:
    """Waits until `replica` has all of what `owner` has committed, under the same epoch; its view."""

    def same():
        ours, theirs = replica.session(sid), owner.session(sid)
        equal = ours and theirs and all(ours.get(k) == theirs.get(k) for k in ("committed", "epoch"))
        return ours if equal else None

    return until(same, deadline_s)


def evict(worker: Worker, sid: str) -> None:
    """Drops the session's KV there."""
    worker.release(sid, drop_kv=True)
    until(lambda: not (worker.session(sid) or {"committed": 0})["committed"])


def running(worker: Worker, sid: str):
    view = worker.session(sid)
    return view is not None and view["state"] == "running"


def opened(worker: Worker, sid: str, tokens: int = 400) -> list[int]:
    """A session with one finished turn; its history."""
    rnd = random.Random(sid)
    prompt = script.ids(rnd, tokens)
    return prompt + worker.generate(prompt, sid, n=6).tokens + script.ids(rnd, 30)


@contextmanager
def held_import(seed: Seed, deadline_ms: int = 20000) -> Iterator[Background]:
    """An import caught while its KV is still coming in: the source is stopped in the middle of the prefill that it pulls
    from (XFER-4), and goes on at the end of the block. Yields the running import."""
    prefill = Background(seed.prefill)
    pull = Background(seed.pull, deadline_ms=deadline_ms)
    until(lambda: seed.target.state()["landing"] or pull.future.done())
    seed.source.process.signal(signal.SIGSTOP)
    try:
        state = seed.target.state()
        assert state["landing"], f"it was over before it could be caught: {pull.future}, {state}"
        yield pull
    finally:
        seed.source.process.signal(signal.SIGCONT)
        prefill.done()
