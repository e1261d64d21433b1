"""Draining a worker under load (MIG-4): its sessions move to the other one with their KV, no request fails, and a restart in
between is noticed by nobody. The prefill worker's copies are not used: KV comes from the drained worker itself."""

import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from harness.module import assert_balanced
from harness.talk import Talk
from harness.waiting import until

SESSIONS, FIRST, APPEND, MOST = 8, 400, 25, 900  # all of them fit into one worker


class Load:
    """Eight clients in a closed loop until the block ends: each turn appends a little, streamed or not, and is compared. A
    history that has grown too long is cut back."""

    def __init__(self, talks: list[Talk]):
        self.talks = talks
        self.over = threading.Event()
        self.pool = ThreadPoolExecutor(len(talks))
        self.running: list[Future] = []
        self.modes: list[str] = []

    def play(self, talk: Talk) -> None:
        while not self.over.is_set():
            if len(talk.history) > MOST:
                talk.rewrite(len(talk.history) - FIRST)
            reply = talk.turn(APPEND, n=12, stream=talk.turns % 2 == 0)
            self.modes.append(reply.headers["x-kvc-mode"])
            self.over.wait(0.2)

    def __enter__(self) -> "Load":
        self.running = [self.pool.submit(self.play, talk) for talk in self.talks]
        return self

    def settle(self, turns: int = 2) -> None:
        """Waits until every client has had some more turns: all are alive."""
        want = [talk.turns + turns for talk in self.talks]
        until(lambda: self.failed() or all(t.turns >= w for t, w in zip(self.talks, want, strict=True)), 60)
        assert not self.failed()

    def failed(self) -> list[BaseException | None]:
        return [f.exception() for f in self.running if f.done()]

    def __exit__(self, *_) -> None:
        self.over.set()
        for future in self.running:
            future.result(60)
        self.pool.shutdown()


@pytest.fixture(autouse=True)
def whole(cluster):
    yield
    cluster.whole()
    for worker in cluster.workers:
        until(lambda w=worker: not w.transfers()["imports"] and not w.transfers()["leases"], 30)
        assert_balanced(worker)


@pytest.fixture
def talks(talk, request) -> list[Talk]:
    """Sessions that have begun."""
    made = [talk(f"{request.node.name[:12]}-{i}") for i in range(SESSIONS)]
    for one in made:
        one.turn(FIRST)
    return made


def owned(worker) -> list[str]:
    sessions = worker.listener.get("/kvc/v1/sessions?limit=1000").json["sessions"]
    # A client without a router has no placement, and nobody to hand its session over to.
    return [s["session_id"] for s in sessions if s["standing"] == "owner" and s["committed"] and s.get("epoch")]


def test_both_workers_are_drained_and_restarted_under_load(cluster, talks):
    """Drain one, restart it, drain the other: no failed request, the same tokens, nothing is left behind."""
    first, second = cluster.decodes
    with Load(talks) as load:
        load.settle(1)
        for worker, other in ((first, second), (second, first)):
            answer = worker.drain(30000)
            assert answer["drained"] and answer["owned"] == answer["turns"] == 0, answer
            assert not owned(worker)
            load.settle(1)
            assert {t.sid for t in talks} <= set(owned(other))
            assert cluster.router.sees(worker)["health"] == "draining"
            if worker is first:
                worker.restart()
                cluster.whole()
                load.settle(1)
    assert "fallback" not in load.modes, load.modes
    for one in talks:
        assert one.turn(APPEND).headers["x-kvc-mode"] == "direct"


def test_sigterm_drains_before_the_engine_ends(cluster, talks):
    """The engine's own signal: it hands its sessions over first, then ends by itself."""
    leaving = max(cluster.decodes, key=lambda w: len(owned(w)))  # whichever the router gave more
    other = cluster.other(leaving)
    had = set(owned(leaving)) & {t.sid for t in talks}
    assert had
    with Load(talks) as load:
        load.settle(1)
        leaving.process.popen.send_signal(signal.SIGTERM)
        began = time.monotonic()
        until(lambda: load.failed() or not leaving.alive(), 60)
        assert not load.failed(), load.failed()
        took = time.monotonic() - began
        load.settle(1)
    assert took < 45
    assert {t.sid for t in talks} <= set(owned(other))
    assert "fallback" not in load.modes and "seed" not in load.modes, load.modes
