"""Requests in the background, and waiting for something to be so, with a deadline."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

from . import script
from .module import Worker


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


def running(worker: Worker, sid: str):
    view = worker.session(sid)
    return view is not None and view["state"] == "running"


def opened(worker: Worker, sid: str, tokens: int = 400) -> list[int]:
    """A session with one finished turn; its history."""
    rnd = random.Random(sid)
    prompt = script.ids(rnd, tokens)
    return prompt + worker.generate(prompt, sid, n=6).tokens + script.ids(rnd, 30)
