"""The replica that follows (SYNC-1..4): a prefill worker pulls what a decode worker commits, and a session that lost its
place goes on from there. What was computed is read from the engines' own forward passes."""

import random
from collections.abc import Iterator

import pytest
from conftest import APPEND
from harness import script
from harness.engine import start_all
from harness.module import Seed, Worker, assert_balanced, fill
from harness.oracle import first_difference
from harness.router import Router
from harness.waiting import evict, follows, until

PAGE = 16  # the largest in the cluster: what an unaligned end may cost


@pytest.fixture(autouse=True)
def balanced(cluster):
    """Nothing is lost on any worker, and nothing is left to sync."""
    yield
    until(lambda: not any(w.transfers()["sync_pending"] or w.transfers()["imports"] for w in cluster.workers))
    for worker in cluster.workers:
        assert_balanced(worker)


@pytest.fixture(scope="module")
def unsynced(cluster) -> Iterator[Router]:
    """A router that names no backup, and leaves a worker after one refusal."""
    workers = [(w.role, w.url) for w in cluster.workers]
    router = Router("router-unsynced", workers, ["--sync=false", "--kvcache-migration-reject-threshold", "1"]).start()
    yield router
    router.stop()


def same_bytes(cluster, holder: Worker, sid: str) -> None:
    """Both copies, position by position."""
    held = holder.view(sid)["committed"]
    copies = [w.kv(sid, 0, held) for w in (cluster.prefill, holder)]
    assert [len(c) for c in copies] == [held, held] and first_difference(*copies) is None


def test_the_replica_follows_each_turn_byte_for_byte(cluster, talk):
    """SYNC-1, SYNC-4, OWN-5: the same epoch, the same bytes, and only what is new is pulled."""
    chat = talk("sync-follow")
    chat.turn(700)
    holder = cluster.holder(chat.sid)
    for turn in range(3):
        before = follows(cluster.prefill, holder, chat.sid)["committed"]
        pulled = cluster.prefill.metrics()["kvc_imported_tokens_total"]
        assert chat.turn(50 + 13 * turn, n=9).headers["x-kvc-mode"] == "direct"
        view = follows(cluster.prefill, holder, chat.sid)
        assert view["standing"] == "replica" and holder.view(chat.sid)["standing"] == "owner"
        new = view["committed"] - before
        pulled = cluster.prefill.metrics()["kvc_imported_tokens_total"] - pulled
        assert new == len(chat.history) - 1 - before and new <= pulled < new + PAGE
        same_bytes(cluster, holder, chat.sid)
    assert holder.view(chat.sid)["backup"] == cluster.prefill.peer


def test_an_evicted_session_is_reseeded_from_its_replica(cluster, talk):
    """SYNC-2: nobody computes more than the append."""
    chat = talk("sync-evict")
    chat.turn(900)
    chat.turn(60)
    holder = cluster.holder(chat.sid)
    held = follows(cluster.prefill, holder, chat.sid)["committed"]
    evict(holder, chat.sid)
    cluster.computed()
    reply = chat.turn(50)
    assert (reply.headers["x-kvc-mode"], reply.headers["x-kvc-source"]) == ("reseed", "replica")
    done = cluster.computed()
    append = len(chat.history) - 6 - held
    assert done.pop(cluster.prefill.name) == 0 and append <= sum(done.values()) < append + PAGE, done
    assert chat.turn(20).headers["x-kvc-mode"] == "direct"


@pytest.mark.parametrize("where", ["resident", "evicted"])
def test_a_large_append_is_prefilled_on_top_of_the_replica(cluster, talk, where):
    """SYNC-2, DISP-6: above τ_append P computes the append, and the append only; D one token."""
    chat = talk(f"sync-large-{where}")
    chat.turn(810)
    chat.turn(60)
    holder = cluster.holder(chat.sid)
    held = follows(cluster.prefill, holder, chat.sid)["committed"]
    if where == "evicted":
        evict(holder, chat.sid)
    cluster.computed()
    reply = chat.turn(APPEND + 203)
    assert reply.headers["x-kvc-mode"] == "reseed"
    done = cluster.computed()
    append = len(chat.history) - 6 - held
    assert append <= done.pop(cluster.prefill.name) < append + PAGE and sum(done.values()) <= PAGE, done


def test_a_replica_that_is_behind_is_refreshed_before_it_prefills(cluster, talk, unsynced):
    """SYNC-2: a large append without a synced replica: P pulls from the holder first, then computes the append only."""
    chat = talk("sync-refresh", unsynced)
    chat.turn(810)
    chat.turn(60)
    held = cluster.holder(chat.sid).view(chat.sid)["committed"]
    assert cluster.prefill.view(chat.sid)["committed"] < held
    cluster.computed()
    assert chat.turn(APPEND + 203).headers["x-kvc-mode"] == "reseed"
    done = cluster.computed()
    append = len(chat.history) - 6 - held
    assert append <= done.pop(cluster.prefill.name) < append + PAGE and sum(done.values()) <= PAGE, done


def test_a_rewritten_history_cuts_the_replica(cluster, talk):
    """OWN-7, SYNC-1: the replica is cut to the common prefix, then extended; the old tail is in no answer."""
    chat = talk("sync-rewrite")
    chat.turn(800)
    chat.turn(200)
    holder = cluster.holder(chat.sid)
    before = follows(cluster.prefill, holder, chat.sid)
    for cut in (120, 7):
        chat.rewrite(cut)
        chat.turn(45)
        after = follows(cluster.prefill, holder, chat.sid)
        assert after["epoch"]["rewind"] > before["epoch"]["rewind"]
        same_bytes(cluster, holder, chat.sid)
        before = after
    evict(holder, chat.sid)
    cluster.computed()
    reply = chat.turn(30)
    assert reply.headers["x-kvc-source"] == "replica"
    assert sum(cluster.computed().values()) < 40 + PAGE


def test_a_router_may_switch_sync_off(cluster, talk, unsynced):
    """SYNC-3: no backup is named, nothing is announced, and an evicted session is computed again."""
    chat = talk("sync-off-router", unsynced)
    chat.turn(500)
    holder = cluster.holder(chat.sid)
    kept = cluster.prefill.view(chat.sid)["committed"]
    chat.turn(40)
    assert chat.turn(40).headers["x-kvc-mode"] == "direct"
    assert holder.session(chat.sid).get("backup") is None
    assert cluster.prefill.view(chat.sid)["committed"] == kept
    evict(holder, chat.sid)
    cluster.computed()
    assert chat.turn(20).headers["x-kvc-mode"] == "reseed"
    assert sum(cluster.computed().values()) >= len(chat.history) - 6 - kept - PAGE


def test_a_worker_may_switch_sync_off(cluster, plain, oracle):
    """SYNC-3: KVC_SYNC=false neither keeps a replica nor has one kept; its turns are right."""
    off = Worker("sync-off", append=APPEND, pool=8192, env={"KVC_SYNC": "false"})
    try:
        start_all(off)
        rnd = random.Random(90)
        for owner, backup in ((off, cluster.prefill), (cluster.decodes[0], off)):
            seed = Seed(cluster.prefill, owner, f"sync-off-{owner.name}", script.ids(rnd, 400))
            seed.admit(backup=backup.peer)
            reply = seed.decode(n=5)
            oracle.tokens(seed.prompt, reply.tokens, plain.generate(seed.prompt, n=5).tokens, seed.sid)
            owner.settled()
            assert owner.view(seed.sid)["committed"] == len(seed.prompt) + 4
            assert owner.view(seed.sid)["epoch"]["placement"] == seed.placement
            if backup is off:
                until(lambda: off.metrics()['kvc_refusals_total{reason="sync-off"}'])
            assert (backup.session(seed.sid) or {"committed": 0})["committed"] == 0
            owner.release(seed.sid, drop_kv=True)
        assert_balanced(off)
    finally:
        off.stop()


def test_a_refused_session_takes_its_kv_along(cluster, talk, unsynced):
    """KVC's reject-driven move: the holder has no room, the session leaves it, and its KV is pulled from there. No replica is
    kept here, so it can come from nowhere else."""
    chat = talk("sync-reject", unsynced)
    chat.turn(900)
    chat.turn(60)
    holder = cluster.holder(chat.sid)
    other = cluster.other(holder)
    grants = fill(holder)
    try:
        refused = chat.turn(30)
        assert refused.headers["x-kvc-mode"] == "fallback" and "no-d-capacity" in refused.headers["x-kvc-reason"]
        held = holder.view(chat.sid)["committed"]  # more than before, if the fallback ran there
        other.flush()  # and if it ran here, nothing of it is left
        cluster.computed()
        reply = chat.turn(30)
    finally:
        for grant in grants:
            grant.give_up()
    assert (reply.headers["x-kvc-mode"], reply.headers["x-kvc-source"]) == ("reseed", "replica")
    assert cluster.worker_of(reply.headers) is other is cluster.holder(chat.sid)
    assert holder.view(chat.sid)["standing"] == "replica"
    append = len(chat.history) - 6 - held
    done = cluster.computed()
    assert done.pop(other.name) in range(append, append + PAGE) and not any(done.values()), (append, done)
