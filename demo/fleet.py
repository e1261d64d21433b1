"""The demo's engines and router, and what was computed for whom. Made by replay.py; both acts use it."""

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

from harness.engine import Engine, start_all
from harness.module import Worker
from harness.router import Router


@dataclass
class Fleet:
    """One prefill and two decode workers behind a router, and a plain server beside them."""

    append: int
    counts: Counter[str] = field(default_factory=Counter)
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self):
        self.plain = Engine("demo-plain", "plain", pool=65536)
        self.prefill = Worker("demo-prefill", role="prefill", append=self.append, page=16, pool=32768)
        self.decodes = [
            Worker(f"demo-decode{i}", role="decode", append=self.append, page=16, pool=10240, running=8) for i in (1, 2)
        ]
        self.router = Router("demo-router", [(w.role, w.url) for w in self.workers])

    @property
    def workers(self) -> list[Worker]:
        return [self.prefill, *self.decodes]

    def start(self) -> None:
        start_all(self.plain, *self.workers)
        self.router.start()

    def stop(self) -> None:
        self.router.stop()
        for engine in (self.plain, *self.workers):
            engine.stop()

    def named(self, headers: dict[str, str]) -> Worker:
        """The worker that an answer's headers name."""
        return next(w for w in self.workers if w.url.endswith(headers["x-kvc-worker"]))

    def other(self, worker: Worker) -> Worker:
        return next(d for d in self.decodes if d is not worker)

    def computed(self, sid: str | None = None) -> int:
        """Prompt tokens that entered any model so far, for one session or for all; read from the engines' forward passes."""
        with self.lock:
            for worker in self.workers:
                try:
                    seen = worker.forwards()
                except OSError:
                    continue  # it has been killed, and its counts with it
                for f in seen:
                    self.counts[f["session"] or ""] += f["forwarded"]
            return self.counts.total() if sid is None else self.counts[sid]


def short(worker: Worker) -> str:
    """Its name in the demo's lines."""
    return worker.name.removeprefix("demo-")
