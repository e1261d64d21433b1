"""Engines of the test run, started once and shared. At most six live at a time (about 2 GB each).

`plain` (the reference), and the cluster of one prefill and two decode workers with the router, live through the whole
run; the Python session cache and the small pools only while their file runs.
"""

import time
from dataclasses import dataclass

import pytest
from harness.engine import Engine, start_all
from harness.module import Worker
from harness.oracle import Oracle
from harness.process import PYTHON, Process
from harness.router import Router
from harness.talk import Talk

# The cluster's files first, then those that start engines of their own.
ORDER = [
    "test_harness", "test_tokens", "test_reuse", "test_sync", "test_migration", "test_placement", "test_races", "test_peers",
    "test_movers", "test_field_reports", "test_bad_input", "test_streaming_api", "test_ledger", "test_pressure", "test_drain",
    "test_crash",
]  # fmt: skip
LAST = ["test_drain", "test_crash"]  # they end and restart the cluster's own workers
APPEND = 1024  # τ_append of the cluster, low so that a large append is cheap
live: list[Process] = []


def pytest_collection_modifyitems(items):
    def place(item):
        callspec = getattr(item, "callspec", None)
        page = callspec.params.get("small", 0) if callspec else 0  # one small pool after the other
        name = item.module.__name__
        return name in LAST, page, ORDER.index(name)

    items.sort(key=place)


def pytest_configure(config):
    if not PYTHON.exists():
        raise pytest.UsageError("no engine environment: run scripts/setup-engine.sh first")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        for process in live:
            state = "runs" if process.alive() else f"ended with {process.popen.returncode}"
            report.sections.append((f"{process.name} ({state})", process.tail(15)))
    return report


@pytest.fixture(scope="session", autouse=True)
def nothing_left():
    """After the run none of our processes is alive."""
    yield
    deadline = time.monotonic() + 10
    while left := [p.name for p in live if p.members()]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


@dataclass
class Cluster:
    """One prefill and two decode workers behind a router."""

    prefill: Worker
    decodes: list[Worker]
    router: Router

    @property
    def workers(self) -> list[Worker]:
        return [self.prefill, *self.decodes]

    def worker_of(self, headers: dict[str, str]) -> Worker:
        """The decode worker that an answer's headers name."""
        named = headers["x-kvc-worker"]
        return next(w for w in self.workers if str(w.port) in named)

    def holder(self, sid: str) -> Worker | None:
        """The decode worker that owns the session and holds KV of it."""
        views = ((w, w.session(sid)) for w in self.decodes if w.alive())
        return next((w for w, view in views if view and view["committed"] and view["standing"] == "owner"), None)

    def other(self, worker: Worker) -> Worker:
        """The other decode worker."""
        return next(d for d in self.decodes if d is not worker)

    def computed(self, frozen: Worker | None = None) -> dict[str, int]:
        """Prompt tokens that entered each live worker's model since the last look."""
        return {w.name: w.computed() for w in self.workers if w.alive() and w is not frozen}

    def whole(self) -> None:
        """Every worker lives, unthrottled, takes turns, and the router knows."""
        for worker in self.workers:
            if not worker.alive():
                worker.restart()
                live.append(worker.process)
            worker.throttle(0)
            worker.drain(0, draining=False)
        self.router.process.wait_until(lambda: all(map(self.router.knows, self.workers)), 30)


def run(value, *engines: Engine):
    """Starts engines, yields `value`, and stops them: the body of a fixture."""
    try:
        start_all(*engines)
        live.extend(e.process for e in engines)
        yield value
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture(scope="session")
def plain():
    """No cache at all: every answer computed from the whole prompt."""
    engine = Engine("plain", "plain", pool=131072)
    yield from run(engine, engine)


@pytest.fixture(scope="session")
def cluster():
    """The decode workers differ in page size, and their pools are small."""
    prefill = Worker("prefill", role="prefill", append=APPEND, page=16, pool=32768)
    d1 = Worker("decode1", role="decode", append=APPEND, page=1, pool=12288, running=8)
    d2 = Worker("decode2", role="decode", append=APPEND, page=16, pool=12288, running=8)
    workers = [("prefill", prefill.url), ("decode", d1.url), ("decode", d2.url)]
    router = Router("router", workers, ["--busy-wait-ms", "300"])
    started = run(None, prefill, d1, d2)
    next(started)
    try:
        router.start()
        live.append(router.process)
        yield Cluster(prefill, [d1, d2], router)
    finally:
        router.stop()
        next(started, None)


def pytest_generate_tests(metafunc):
    """`small` at pages 1 and 16; 64 for the ledger alone."""
    if "small" in metafunc.fixturenames:
        pages = [1, 16, 64] if metafunc.module.__name__ == "test_ledger" else [1, 16]
        metafunc.parametrize("small", pages, indirect=True, ids=[f"page {p}" for p in pages], scope="session")


@pytest.fixture(scope="session")
def small(request):
    """A worker with a small pool and few rows."""
    worker = Worker(f"small{request.param}", append=65536, page=request.param, pool=6144, running=4, sleepy=False)
    yield from run(worker, worker)


@pytest.fixture
def talk(cluster, plain, oracle):
    """Makes sessions: `talk(sid)`; with `router`, through another one."""
    return lambda sid, router=None: Talk(router or cluster.router, plain, oracle, sid)


@pytest.fixture
def oracle(plain):
    """Compares with the plain server; judged at the end of the test."""
    oracle = Oracle(plain)
    yield oracle
    oracle.close()
