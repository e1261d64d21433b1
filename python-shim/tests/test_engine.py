"""Real engines whose turns vanish, whose module fails, and that are told to stop (ADR 0044, 0046; MIG-4)."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "engine"))

from harness import engine as engines
from harness.module import STORE_ID, Worker, question, tag
from harness.process import MODEL

WAITING_S = 3


def ids(seed: int, n: int) -> list[int]:
    return [1 + (seed * 7919 + i * i * 31 + i) % 240 for i in range(n)]


@pytest.fixture(scope="module")
def worker(request):
    """Two rows, the engine's own limit on waiting, its strict memory checks on."""
    if not MODEL.exists():
        pytest.skip("no engine environment: run scripts/setup-engine.sh first")
    request.getfixturevalue("own_interpreter")
    worker = Worker("shim", page=16, pool=6144, running=2, env={"SGLANG_REQ_WAITING_TIMEOUT": str(WAITING_S)})
    try:
        worker.start().ready()
        yield worker
    finally:
        worker.stop()


@pytest.fixture(scope="module")
def own_interpreter():
    """The engine of the environment that runs this test."""
    before, engines.PYTHON = engines.PYTHON, Path(sys.executable)
    yield
    engines.PYTHON = before


def assert_whole(worker: Worker) -> None:
    state = worker.settled(30)
    assert state["free"] + state["evictable"] + state["protected"] + state["held"] == state["pool"], state
    assert worker.alive() and not worker.leak_reports()


def test_a_turn_that_times_out_in_the_queue_frees_its_session(worker):
    """F12, ADM-8: nobody tells the cache of it, and the next turn is served."""
    history = ids(1, 200)
    history += worker.generate(history, "queued").tokens
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(worker.generate, ids(i, 300), f"long-{i}", n=1500) for i in (2, 3)]
        while worker.state()["rows_free"]:
            time.sleep(0.05)
        answer = worker.http.call("POST", "/generate", worker.body([*history, 5], "queued"))
        assert (answer.status, "waiting timeout" in answer.text) == (503, True), answer.text
        for turn in running:
            turn.result()
    assert worker.settled(30)["counters"]["cancels"] == 1
    assert worker.generate([*history, 6], "queued").cached >= len(history) - 16
    assert_whole(worker)


def test_a_panic_in_the_module_ends_the_module_and_no_request(worker):
    history = ids(4, 500)
    history += worker.generate(history, "idle").tokens
    assert worker.state()["counters"]["commits"] > 0
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(worker.generate, [*history, 7, 8], "idle", n=200)
        while worker.state()["rows_free"] == 2:
            time.sleep(0.02)
        first = pool.submit(worker.generate, ids(5, 3000), "first", n=4)
        assert worker.test("fail") == {"faulted": True}
        assert len(running.result().tokens) == 200
        assert len(first.result().tokens) == 4
    # What nobody accounts for any more comes back when nothing runs; sessions run plain from here on.
    assert worker.settled(30)["held"] == 0
    again = worker.generate(history, "idle")
    assert len(again.tokens) == 8
    assert len(worker.generate(ids(6, 5900), "whole-pool").tokens) == 8
    assert worker.http.call("GET", "/kvc/v1/info").status == 502
    assert_whole(worker)


@pytest.fixture
def stopping(request):
    """A worker of its own, to be ended by a signal."""
    if not MODEL.exists():
        pytest.skip("no engine environment: run scripts/setup-engine.sh first")
    request.getfixturevalue("own_interpreter")
    worker = Worker("shim-stopping", pool=6144, running=2, env={"KVC_DRAIN_MS": "60000"})
    try:
        worker.start().ready()
        yield worker
    finally:
        worker.stop()


def terminate(worker: Worker) -> None:
    """As a service manager does that signals the main process (`KillMode=mixed`, `docker stop`)."""
    os.kill(worker.process.pid, signal.SIGTERM)


def wait_for(condition, deadline_s: float = 20.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_sigterm_drains_first_and_the_engine_stays_healthy_meanwhile(stopping):
    """MIG-4: the turn that runs is finished, new sessions are refused, and when the last session that a router placed
    here has gone the engine ends."""
    history, placed = ids(7, 200), tag("owned", placement={"n": 1, "store": STORE_ID})
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(stopping.generate, history, n=300, headers=placed)
        wait_for(lambda: stopping.state()["running"])
        terminate(stopping)
        wait_for(lambda: stopping.http.get("/kvc/v1/info").json["draining"])
        assert len(turn.result().tokens) == 300
    assert stopping.http.get("/health", timeout_s=10).status == 200
    refused = stopping.admit(**question("new", 50)).json
    assert (refused["can_admit"], refused["reason"]) == (False, "draining")
    time.sleep(6)  # longer than the engine's own shutdown takes to look
    assert stopping.alive()
    assert stopping.release("owned", drop_kv=True).status == 200
    wait_for(lambda: not stopping.alive())


def test_a_worker_that_owns_nothing_ends_without_delay(stopping):
    stopping.generate(ids(8, 50), n=2)  # no session
    terminate(stopping)
    wait_for(lambda: "'drained': True" in stopping.process.text(), 2)
    wait_for(lambda: not stopping.alive(), 10)  # the engine looks every 5 s
