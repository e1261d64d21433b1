"""T5: turns, closes, aborts and disconnects that meet each other; a decode worker that dies."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
from harness import script
from harness.engine import start_all
from harness.http import HttpError
from harness.module import Seed, Worker, assert_balanced
from harness.waiting import Background, held_import, opened, running, until


@pytest.fixture
def worker(cluster) -> Iterator[Worker]:
    """Page 1; after the test nothing is lost on it."""
    yield cluster.decodes[0]
    assert_balanced(cluster.decodes[0])


def test_a_second_turn_while_the_first_runs_is_told_so(worker, plain, oracle):
    """ADM-8, F2: 409 session-busy, and the first is not disturbed."""
    history = opened(worker, "busy")
    first = Background(worker.generate, history, "busy", n=400)
    until(lambda: running(worker, "busy"))
    with pytest.raises(HttpError) as refused:
        worker.generate([*history, 7], "busy", n=2)
    assert refused.value.answer.status == 409 and "session-busy" in refused.value.answer.text
    oracle.tokens(history, first.done().tokens, plain.generate(history, n=400).tokens, "first turn")
    assert worker.generate(history, "busy", n=2).cached >= len(history) - 1


def test_a_second_turn_through_the_router_is_409(cluster):
    """ADM-8: a bounded wait, then 409; never a reseed elsewhere meanwhile."""
    prompt = script.ids(random.Random(20), 500)
    reply = cluster.router.generate(prompt, "busy-router", n=4)
    history = prompt + reply.tokens
    holder = cluster.holder("busy-router")
    first = Background(cluster.router.generate, history, "busy-router", n=400)
    until(lambda: running(holder, "busy-router"))
    with pytest.raises(HttpError) as refused:
        cluster.router.generate([*history, 9], "busy-router", n=2)
    assert refused.value.answer.status == 409 and "session-busy" in refused.value.answer.text
    assert len(first.done(120).tokens) == 400
    assert cluster.holder("busy-router") is holder


def test_close_while_running_waits_for_the_turns_end(worker):
    """SES-2, F10: deferred and said so; the turn answers once; then the KV is gone."""
    history = opened(worker, "closing")
    turn = Background(worker.generate, history, "closing", n=400)
    until(lambda: running(worker, "closing"))
    answer = worker.release("closing", drop_kv=True)
    assert answer.status == 200 and answer.json["kv"] == "deferred"
    assert len(turn.done().tokens) == 400
    until(lambda: (worker.session("closing") or {"committed": 0})["committed"] == 0)


def test_abort_while_queued_leaves_the_session(worker):
    """F4: the cache is not told of an abort in the queue."""
    history = opened(worker, "ab-queue")
    committed = worker.session("ab-queue")["committed"]
    blockers = [Background(worker.generate, script.ids(random.Random(i), 300), n=250) for i in range(worker.running)]
    until(lambda: worker.state()["running"] >= worker.running)
    waiting = Background(worker.generate, history, "ab-queue", n=8, rid="ab-queue")
    until(lambda: worker.state()["waiting"] >= 1)
    worker.http.post("/abort_request", {"rid": "ab-queue"})
    try:
        waiting.done()
    except HttpError:
        pass
    for blocker in blockers:
        blocker.done()
    assert worker.session("ab-queue")["committed"] == committed
    assert worker.generate(history, "ab-queue", n=4).cached == committed


def test_abort_while_prefilling_rolls_back(cluster, worker):
    """F8: chunked prefill is cut short; what was restored is there again, the rest is free."""
    history = opened(worker, "ab-prefill")
    committed = worker.session("ab-prefill")["committed"]
    long = history + script.ids(random.Random(21), 7000)
    turn = Background(worker.generate, long, "ab-prefill", n=4, rid="ab-prefill")
    until(lambda: running(worker, "ab-prefill"))
    worker.http.post("/abort_request", {"rid": "ab-prefill"})
    try:
        turn.done()
    except HttpError:
        pass
    worker.settled()
    assert worker.session("ab-prefill")["committed"] == committed
    assert worker.generate(history, "ab-prefill", n=4).cached == committed


def test_abort_while_decoding_does_not_advance(worker):
    """OWN-6: an aborted turn never moves `committed`."""
    history = opened(worker, "ab-decode")
    committed = worker.session("ab-decode")["committed"]
    stream = worker.http.stream("/generate", worker.body(history, "ab-decode", 1000, stream=True, rid="ab-decode"))
    next(iter(stream))
    worker.http.post("/abort_request", {"rid": "ab-decode"})
    for _ in stream:
        pass
    stream.close()
    worker.settled()
    assert worker.session("ab-decode")["committed"] == committed
    assert worker.generate(history, "ab-decode", n=4).cached == committed


def test_abort_after_the_end_changes_nothing(worker):
    history = opened(worker, "ab-late")
    worker.generate(history, "ab-late", n=4, rid="ab-late")
    committed = worker.session("ab-late")["committed"]
    worker.http.post("/abort_request", {"rid": "ab-late"})
    assert worker.session("ab-late")["committed"] == committed


def test_a_client_that_leaves_while_decoding_cancels_its_turn(cluster):
    """Engines §6, F14: through the router; the worker stops and the next turn works."""
    prompt = script.ids(random.Random(22), 500)
    history = prompt + cluster.router.generate(prompt, "leave", n=4).tokens
    holder = cluster.holder("leave")
    stream = cluster.router.http.stream("/generate", holder.body(history, "leave", 1500, stream=True))
    next(iter(stream))
    assert running(holder, "leave")
    stream.close()
    until(lambda: not running(holder, "leave"))
    assert cluster.router.generate(history, "leave", n=4).headers["x-kvc-mode"] == "direct"
    assert_balanced(holder)


def test_a_client_that_leaves_while_queued_or_prefilling_releases_its_charge(cluster):
    """ADM-10: a client that goes away releases at once."""
    rnd = random.Random(23)
    used = [w.info["load"]["used"] for w in cluster.decodes]
    for i, wait in enumerate((0.0, 0.05, 0.3)):
        body = cluster.router.body(script.ids(rnd, 5000), f"gone-{i}", 400)
        connection = cluster.router.http.open("POST", "/generate", body)
        time.sleep(wait)
        connection.close()

    def quiet():
        return all(w.http.get("/kvc/v1/info").json["load"]["running"] == 0 for w in cluster.workers)

    until(quiet, 30)
    for worker in cluster.workers:
        assert_balanced(worker)
        until(lambda w=worker: not w.transfers()["imports"] and not w.transfers()["leases"])
    assert len(used) == 2
    assert cluster.router.generate(script.ids(rnd, 300), "gone-0", n=4).tokens


def test_a_client_that_leaves_while_importing_frees_the_landing_pages(cluster):
    """F14: cancelled at a safe point; nothing lands, nothing leaks."""
    target, source = cluster.decodes[0], cluster.prefill
    seed = Seed(source, target, "leave-import", script.ids(random.Random(24), 5000))
    seed.admit()
    with held_import(seed) as pull:
        released = target.release(seed.sid, request=seed.key)
        assert released.status == 200, released.text
        assert pull.done().status >= 400
        assert assert_balanced(target)["landing"] == 0
    until(lambda: not source.listener.get("/kvc/v1/transfers").json["leases"])


def test_a_dead_decode_worker_is_left_and_the_turn_served_elsewhere(cluster, plain, oracle):
    """DISP-8, ROUTE-6: the router retries on another path until the first token has gone out."""
    from harness.router import Router

    dying = Worker("dying", role="decode", append=1024, pool=8192)
    start_all(dying)
    router = None
    try:
        workers = [("prefill", cluster.prefill.url), ("decode", dying.url), ("decode", cluster.decodes[1].url)]
        router = Router("router-dying", workers).start()
        history = script.ids(random.Random(25), 600)
        for turn in range(12):
            reply = router.generate(history, f"dead-{turn}", n=6)
            if str(dying.port) in reply.headers["x-kvc-worker"]:
                break
        else:
            pytest.fail("no session was placed on the worker")
        sid = f"dead-{turn}"
        history += reply.tokens + script.ids(random.Random(26), 20)
        dying.stop()
        again = router.generate(history, sid, n=6)
        oracle.tokens(history, again.tokens, plain.generate(history, n=6).tokens, "after the death")
        assert str(dying.port) not in again.headers["x-kvc-worker"]
    finally:
        dying.stop()
        if router:
            router.stop()


def test_equal_requests_at_once_are_served_or_told_busy(worker):
    """One turn at a time (ADM-8); nobody hangs, nobody gets another's answer."""
    history = opened(worker, "thrice")
    barrier = threading.Barrier(3)
    answers: list[tuple[int, ...] | int] = []

    def go():
        barrier.wait()
        try:
            answers.append(tuple(worker.generate(history, "thrice", n=9).tokens))
        except HttpError as error:
            answers.append(error.answer.status)

    threads = [threading.Thread(target=go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    served = {a for a in answers if isinstance(a, tuple)}
    assert len(answers) == 3 and len(served) == 1
    assert set(answers) - served <= {409}
