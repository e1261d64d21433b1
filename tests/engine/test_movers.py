"""How KV comes from one worker of a host to another (XFER-9): through shared memory, over tcp where one of them has it not,
and a process that is killed in the middle takes nobody along."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import pytest
from harness import script
from harness.engine import start_all
from harness.module import Seed, Worker, assert_balanced
from harness.oracle import first_difference
from harness.waiting import Background, until

SLOW = 300_000  # bytes a second: a session of 2,000 tokens takes some ten
RDMA = Path("/sys/class/infiniband")


@dataclass
class Own:
    """Workers that may be ended."""

    importer: Worker
    exporter: Worker
    forced: Worker
    """Told to use RDMA or not to start."""
    named: Worker
    """Told to use a device that no machine has."""


@pytest.fixture(scope="module")
def own(cluster) -> Iterator[Own]:
    workers = Own(
        Worker("movers-importer", pool=16384, page=16),
        Worker("movers-exporter", pool=16384, page=16),
        Worker("movers-forced", flags=["--force-rdma"]),
        Worker("movers-named", flags=["--ib-device", "nosuch_0"]),
    )
    try:
        workers.forced.start()
        workers.named.start()
        start_all(workers.importer, workers.exporter)
        yield workers
        # The last thing that the killed ones held: leases that nobody renews.
        until(lambda: not any(worker.transfers()["leases"] for worker in cluster.workers), 30)
        for worker in cluster.workers:
            assert_balanced(worker)
    finally:
        for worker in vars(workers).values():
            worker.stop()


def moved(worker: Worker) -> dict[str, float]:
    """Bytes that came to the worker, by mover."""
    name = 'kvc_mover_bytes_total{mover="'
    return {k.removeprefix(name)[:-2]: v for k, v in worker.metrics().items() if k.startswith(name)}


@contextmanager
def comes_over(mover: str, *workers: Worker, least: int = 1) -> Iterator[None]:
    """What comes to these workers in the block, at least so many bytes, comes over that mover alone."""
    before = [moved(w) for w in workers]
    yield
    came: dict[str, float] = {}
    for worker, was in zip(workers, before, strict=True):
        for kind, total in moved(worker).items():
            came[kind] = came.get(kind, 0) + total - was.get(kind, 0)
    assert came.pop(mover, 0) >= least and not any(came.values()), (mover, came)


def pools(worker: Worker) -> set[str]:
    """The shared pools that the worker's scheduler has mapped: its own and those of peers that it reads."""
    maps = Path(f"/proc/{worker.process.named('sglang::scheduler')}/maps").read_text()
    return {line.split()[4] for line in maps.splitlines() if "/memfd:kvc-kv" in line}


def seeded(source: Worker, target: Worker, sid: str, tokens: int, oracle) -> Seed:
    """A session whose KV the target has from the source, byte for byte; its next turn is the plain server's."""
    seed = Seed(source, target, sid, script.ids(random.Random(sid), tokens)).run()
    tokens_of = seed.decode(n=6).tokens
    held = len(seed.prompt) - 1
    assert first_difference(source.kv(sid, 0, held), target.kv(sid, 0, held)) is None
    oracle.tokens(seed.prompt, tokens_of, oracle.plain.generate(seed.prompt, n=6).tokens, sid)
    return seed


def test_a_session_goes_through_shared_memory_wherever_it_goes(cluster, talk):
    """XFER-9: seeded from the prefill worker, synced to it, moved between two page sizes; tokens and bytes are the same."""
    chat = talk("movers-moves")
    assert all(w.info["movers"][-2:] == ["shm", "tcp"] for w in cluster.workers)
    with comes_over("shm", *cluster.workers, least=2 * 1 << 20):
        chat.turn(900)
        source = cluster.holder(chat.sid)
        target = cluster.other(source)
        held = source.view(chat.sid)["committed"]
        answer = cluster.router.move(chat.sid, target.url)
        assert answer.status == 200 and answer.json["pulled_tokens"] == held, answer.text
        assert first_difference(source.kv(chat.sid, 0, held), target.kv(chat.sid, 0, held)) is None
        reply = chat.turn(30)
    assert reply.headers["x-kvc-mode"] == "direct" and cluster.worker_of(reply.headers) is target


def test_a_killed_importer_leaves_its_source_serving(cluster, own, oracle):
    """XFER-7. Its lease ends: see the end of `own`."""
    source, target = cluster.prefill, own.importer
    seed = Seed(source, target, "movers-importer-dies", script.ids(random.Random(81), 2000))
    seed.admit()
    seed.prefill()
    target.throttle(SLOW)
    pull = Background(seed.pull)
    until(lambda: moved(target).get("shm"))
    assert source.transfers()["leases"] and not pull.future.done()
    target.kill()
    with pytest.raises((OSError, HTTPException)):
        pull.done()
    with comes_over("shm", cluster.decodes[0]):
        seeded(source, cluster.decodes[0], "movers-next-importer", 700, oracle)


def test_a_killed_exporter_leaves_its_importer_serving(cluster, own, oracle):
    """XFER-7, F12: the import ends with a typed error long before its deadline, and the dead pool's memory is given back."""
    source, target = own.exporter, cluster.decodes[1]
    seed = Seed(source, target, "movers-exporter-dies", script.ids(random.Random(82), 2000))
    seed.admit()
    seed.prefill()
    before, was = pools(target), moved(target)["shm"]
    target.throttle(SLOW)
    try:
        pull = Background(seed.pull)
        until(lambda: moved(target)["shm"] > was)
        assert len(pools(target) - before) == 1, "the exporter's pool is not mapped"
        source.kill()
        began = time.monotonic()
        answer = pull.done()
    finally:
        target.throttle(0)
    assert answer.json["error"]["code"] in {"peer-unreachable", "transfer-failed"}, answer.text
    assert time.monotonic() - began < 10
    until(lambda: pools(target) <= before)
    seed.give_up()
    assert assert_balanced(target)["landing"] == 0
    with comes_over("shm", target):
        seeded(cluster.prefill, target, "movers-next-exporter", 700, oracle)


def test_a_worker_without_shared_memory_uses_tcp_both_ways(cluster, own, oracle):
    """XFER-9: with peers that have both; its pool is the engine's own."""
    own.importer.env["KVC_MOVERS"] = "tcp"
    own.importer.restart()
    assert own.importer.info["movers"] == ["tcp"] and not pools(own.importer)
    for source, target in ((cluster.prefill, own.importer), (own.importer, cluster.decodes[0])):
        with comes_over("tcp", target):
            seeded(source, target, f"movers-tcp-{target.name}", 700, oracle)


@pytest.mark.parametrize(("which", "setting"), [("forced", "force_rdma"), ("named", "ib_device")])
def test_an_engine_that_must_use_rdma_does_not_start_without(own, which, setting):
    """XFER-9: before the model is loaded, with one line that names the setting, what is wrong and the way out."""
    if which == "forced" and RDMA.exists() and any(RDMA.iterdir()):
        pytest.skip("this machine has an RDMA device")
    worker: Worker = getattr(own, which)
    until(lambda: not worker.alive(), 60)
    text = worker.process.text()
    [line] = [line for line in text.splitlines() if line.startswith("kvc: ")]
    assert line.startswith(f"kvc: {setting}: ") and line.count(": ") >= 3, line
    assert worker.process.popen.returncode == 2
    assert "Traceback" not in text and "Load weight" not in text
