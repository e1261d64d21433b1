"""T4: many more sessions than rows and tokens. Every request completes, idle sessions are evicted and come back, nothing
stands still. Each known way to stand still is a test of its own; pytest's deadline catches a hang."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import script
from harness.engine import start_all
from harness.module import Seed, Worker, assert_balanced
from harness.process import MODEL
from harness.waiting import Background, held_import, until

WAIT_S = 40  # a request that takes longer stands still


def fresh(small: Worker) -> None:
    """No session, nothing held."""
    small.settled()
    small.flush()


def test_sessions_far_beyond_rows_and_pool_are_all_served(small, plain, oracle):
    """F1, F3, SES-3: 14 sessions on 4 rows, their sum three times the pool, four clients at once."""
    fresh(small)
    evicted = small.state()["counters"]["evictions"]
    sessions = script.native(seed=40, count=14, turns=4, shared=200, first=650, large=700)

    def play(session):
        for i, step in enumerate(session.steps):
            prompt = session.prompt(step)
            got = small.generate(prompt, session.sid, n=step.n, timeout_s=WAIT_S).tokens
            want = plain.generate(prompt, n=step.n).tokens
            oracle.tokens(prompt, got, want, f"{session.sid} turn {i}")
            session.answered(want)

    for turn_of in (0, 7):  # two halves one after the other: the first half comes back at the end
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(play, sessions[turn_of : turn_of + 7]))
    assert sum(len(s.history) for s in sessions) >= 3 * small.pool
    assert len(sessions) >= 3 * small.running
    for session in sessions[:3]:
        prompt = session.history + script.ids(session.rnd, 10)
        got = small.generate(prompt, session.sid, n=5, timeout_s=WAIT_S).tokens
        oracle.tokens(prompt, got, plain.generate(prompt, n=5).tokens, f"{session.sid} back")
    assert small.state()["counters"]["evictions"] > evicted
    assert_balanced(small)


def test_idle_sessions_count_as_room(small):
    """Trap: idle tokens missing from the evictable size, and the engine never asks to evict."""
    fresh(small)
    rnd = random.Random(41)
    for i in range(8):
        prompt = script.ids(rnd, 20)
        history = prompt + small.generate(prompt, f"own-{i}", n=2).tokens
        small.generate(history + script.ids(rnd, 718), f"own-{i}", n=2)
    assert len(small.generate(script.ids(rnd, 900), n=4, timeout_s=WAIT_S).tokens) == 4


def test_idle_sessions_lock_no_prefix(small):
    """Trap: prefixes locked by idle sessions fill the tree until nothing fits."""
    fresh(small)
    rnd = random.Random(42)
    for i in range(10):
        small.generate(script.ids(rnd, 640), f"prefix-{i}", n=2, timeout_s=WAIT_S)
    assert small.settled()["protected"] == 0
    assert len(small.generate(script.ids(rnd, 5000), n=4, timeout_s=WAIT_S).tokens) == 4


def test_a_large_rewind_gives_its_tail_back_first(small):
    """Trap: 5,000 tokens rewound to 200 plus 3,000 new in a pool of 6,144, with the old tail still counted as used."""
    fresh(small)
    rnd = random.Random(43)
    prompt = script.ids(rnd, 50)
    history = prompt + small.generate(prompt, "rewind", n=2).tokens + script.ids(rnd, 5000)
    small.generate(history, "rewind", n=2)
    reply = small.generate(history[:200] + script.ids(rnd, 3000), "rewind", n=2, timeout_s=WAIT_S)
    assert len(reply.tokens) == 2 and reply.cached >= 200 - small.page
    assert_balanced(small)


def test_an_unaligned_restore_that_never_fits_drops_its_own_session(small):
    """Trap, SES-3: restored 5,001, prompt 6,100 + 40: at page 16 the unaligned restore costs one page too many."""
    fresh(small)
    rnd = random.Random(44)
    prompt = script.ids(rnd, 40)
    history = prompt + small.generate(prompt, "tight", n=2).tokens + script.ids(rnd, 4958)
    history += small.generate(history, "tight", n=2).tokens
    reply = small.generate(history + script.ids(rnd, 6060 - len(history)), "tight", n=40, timeout_s=WAIT_S)
    assert len(reply.tokens) == 40
    assert_balanced(small)


def test_a_full_batch_flag_is_not_kept_while_nothing_runs(small, cluster):
    """Trap: a request that does not fit while an import lands marks the empty batch full, for ever."""
    fresh(small)
    rnd = random.Random(45)
    seed = Seed(cluster.prefill, small, "landing", script.ids(rnd, 4000))
    seed.admit()
    with held_import(seed) as pull:
        large = Background(small.generate, script.ids(rnd, 3000), n=2, timeout_s=WAIT_S)
        until(lambda: small.state()["waiting"])
    assert pull.done().status == 200
    seed.give_up()
    assert len(small.generate(script.ids(rnd, 10), n=2, timeout_s=WAIT_S).tokens) == 2
    assert len(large.done(WAIT_S).tokens) == 2
    assert_balanced(small)


def test_an_idle_engine_with_a_landing_import_keeps_its_balance(small, cluster):
    """Trap: landing slots that no account holds end the scheduler at its next idle check."""
    fresh(small)
    seed = Seed(cluster.prefill, small, "slow", script.ids(random.Random(46), 4003))
    seed.admit()
    with held_import(seed) as pull:
        time.sleep(1.5)  # the engine's idle check runs meanwhile
        state = small.state()
        total = state["free"] + state["evictable"] + state["protected"] + state["held"]
        assert state["running"] == state["waiting"] == 0 and total == state["pool"], state
    answer = pull.done()
    assert answer.status == 200, answer.text
    assert seed.decode().cached == 4002
    assert_balanced(small)


def test_a_landing_import_leaves_room_for_the_prefill_that_runs(small, cluster):
    """The engine checks the room of a chunked prefill once, at its first chunk. An import that lands between two chunks
    must not take what the others need: `Prefill out of memory` ends the scheduler."""
    fresh(small)
    rnd = random.Random(51)
    seed = Seed(cluster.prefill, small, "between-chunks", script.ids(rnd, 3000))
    seed.admit()
    seed.prefill()
    long = Background(small.generate, script.ids(rnd, 5000), n=4, timeout_s=WAIT_S)
    until(lambda: small.state()["rows_free"] < small.running)
    answer = seed.pull()
    assert answer.status in (200, 503), answer.text
    assert len(long.done(WAIT_S).tokens) == 4
    assert len(seed.decode().tokens) == 8
    assert_balanced(small)


@pytest.mark.parametrize("how", ["flush", "weight update"])
def test_flush_and_weight_update_cancel_imports_and_leases(small, cluster, how):
    """Trap: flushed pages go to others while an import still writes; a refused flush ends the scheduler in a weight
    update. Both cancel and fence within a bound and then succeed; the next turn works."""
    fresh(small)
    seed = Seed(cluster.prefill, small, f"cut-{how[:5]}", script.ids(random.Random(47), 4000))
    seed.admit()
    with held_import(seed) as pull:
        if how == "flush":
            small.flush()
        else:
            small.http.post("/update_weights_from_disk", {"model_path": str(MODEL)})
        assert pull.done().status >= 400
        state = assert_balanced(small)
        assert state["landing"] == 0 and state["free"] == state["pool"]
    assert len(seed.decode(n=4).tokens) == 4
    until(lambda: not cluster.prefill.listener.get("/kvc/v1/transfers").json["leases"])


def test_a_prompt_that_ends_in_its_prefill_is_shared(small):
    """Trap: a one-token answer never reaches the unfinished call; its prompt is shared all the same (SES-6)."""
    fresh(small)
    rnd = random.Random(48)
    head = script.ids(rnd, 320)
    small.generate(head + script.ids(rnd, 9), "one-a", n=1)
    assert small.generate(head + script.ids(rnd, 9), "one-b", n=1).cached >= 320 - small.page


def test_longest_prefix_scheduling_sees_sessions(small):
    """Twelve sessions on four rows at once; each turn's restored length is its whole history."""
    fresh(small)
    rnd = random.Random(49)
    histories = {f"lpm-{i}": script.ids(rnd, 200 + 10 * i) for i in range(12)}
    for sid, history in histories.items():
        history += small.generate(history, sid, n=4).tokens + script.ids(rnd, 15)
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda s: (s, small.generate(histories[s], s, n=4, timeout_s=WAIT_S)), histories))
    for sid, reply in replies:
        assert reply.cached == len(histories[sid]) - 16, sid
    assert_balanced(small)


@pytest.fixture(scope="module")
def retracting():
    """An engine that retracts running requests again and again."""
    env = {"SGLANG_TEST_RETRACT": "1"}
    worker = Worker("retracting", pool=6144, running=6, page=16, env=env)
    try:
        start_all(worker)
        yield worker
    finally:
        worker.stop()


def test_forced_retracts_change_no_answer_and_lose_nothing(retracting, plain, oracle):
    """F8, F9: a retracted turn gives back what it took, moves no checkpoint, and is computed again."""
    sessions = script.native(seed=50, count=6, turns=4, shared=100, first=150, large=300)

    def play(session):
        for i, step in enumerate(session.steps):
            prompt = session.prompt(step)
            got = retracting.generate(prompt, session.sid, n=30, timeout_s=WAIT_S).tokens
            want = plain.generate(prompt, n=30).tokens
            oracle.tokens(prompt, got, want, f"{session.sid} turn {i}")
            session.answered(want)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(play, sessions))
    assert retracting.state()["counters"]["retracts"] > 0
    assert_balanced(retracting)
