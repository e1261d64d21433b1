"""Workers that die or freeze at the worst moment (MIG-2, MIG-4, XFER-7): sessions go on from the replica, nothing hangs, and
who comes back learns that it owns nothing any more. Runs last; every killed worker is started again."""

import os
import signal
import time

import pytest
from harness.http import HttpError
from harness.module import Worker, assert_balanced
from harness.waiting import Background, follows, until

PAGE = 16
SLOW = 100_000  # bytes a second: 3,000 tokens take a minute
LEASE_S = 10.0  # KVC_LEASE_MS as it is by default


@pytest.fixture(autouse=True)
def whole(cluster):
    """Afterwards every worker lives again, and what the dead one had borrowed is given back."""
    yield
    cluster.whole()
    for worker in cluster.workers:
        until(lambda w=worker: not w.transfers()["imports"] and not w.transfers()["leases"], 60)
        assert_balanced(worker)


def synced(cluster, chat, tokens: int = 800) -> tuple[Worker, int]:
    """Two turns, and a replica of both; the holder and what it has committed."""
    chat.turn(tokens)
    chat.turn(50)
    holder = cluster.holder(chat.sid)
    return holder, follows(cluster.prefill, holder, chat.sid)["committed"]


def goes_on_from_the_replica(cluster, chat, where: Worker, held: int) -> None:
    """The prompt as it stands is served by `where`, and only what no living worker holds is computed."""
    cluster.computed()
    reply = chat.ask()
    assert cluster.worker_of(reply.headers) is where
    assert (reply.headers["x-kvc-mode"], reply.headers["x-kvc-source"]) == ("reseed", "replica")
    assert sum(cluster.computed().values()) < len(chat.history) - 6 - held + PAGE
    assert chat.turn(20).headers["x-kvc-mode"] == "direct"


def broken(events) -> dict:
    """The typed error that ends a stream after its first byte."""
    for event in events:
        if "error" in event:
            return event["error"]
    raise AssertionError("the stream ended as if nothing had happened")


def test_a_worker_killed_mid_turn(cluster, talk):
    """MIG-4, DISP-8: after the first byte the client gets a typed error; its next try goes on from the replica."""
    chat = talk("crash-turn")
    holder, held = synced(cluster, chat)
    prompt = chat.say(40)
    stream = cluster.router.http.stream("/generate", holder.body(prompt, chat.sid, 2000, stream=True))
    events = iter(stream)
    assert next(events)["output_ids"]
    holder.kill()
    error = broken(events)
    stream.close()
    assert error["code"] in ("peer-unreachable", "transfer-failed") and len(error["message"]) > 10
    goes_on_from_the_replica(cluster, chat, cluster.other(holder), held)


def test_a_worker_killed_mid_import(cluster, talk):
    """XFER-7, DISP-8: before the first byte another worker takes over; the exporter gets its pages back."""
    chat = talk("crash-import")
    for worker in cluster.decodes:
        worker.throttle(SLOW)
    cluster.computed()
    chat.say(3000)
    turn = Background(chat.ask)
    importer: Worker = until(lambda: pulling(cluster, chat.sid), 30)
    until(
        lambda: cluster.prefill.view(chat.sid)["committed"] >= 2900, 30
    )  # its own work is done; the bytes are under way
    assert pulling(cluster, chat.sid) is importer and cluster.prefill.transfers()["leases"]
    importer.kill()
    other = cluster.other(importer)
    other.throttle(0)
    reply = turn.done(60)
    assert cluster.worker_of(reply.headers) is other
    done = cluster.computed()
    assert done[cluster.prefill.name] < 3000 + 2 * PAGE and done[other.name] <= PAGE, done


def pulling(cluster, sid: str) -> Worker | None:
    """The decode worker whose import of the session has pulled something."""
    for worker in cluster.decodes:
        if any(i["phase"] == "pulling" and i["pulled_tokens"] for i in worker.imports(sid)):
            return worker
    return None


def test_a_worker_killed_mid_export(cluster, talk):
    """MIG-2: the source of a move dies while its target pulls. Nobody owned it twice, the target drops what it has, and the
    session goes on from the replica."""
    chat = talk("crash-export")
    source, held = synced(cluster, chat, 1500)
    target = cluster.other(source)
    target.throttle(SLOW)
    move = Background(cluster.router.move, chat.sid, target.url)
    until(lambda: pulling(cluster, chat.sid) is target)
    assert any(lease["session_id"] == chat.sid for lease in source.transfers()["leases"])
    source.kill()
    target.throttle(0)
    answer = move.done(60)
    assert answer.status >= 400 and answer.json["error"]["code"], answer.text
    chat.say(30)
    goes_on_from_the_replica(cluster, chat, target, held)


def test_the_prefill_worker_killed(cluster, talk):
    """MIG-4, F16: turns go on, new sessions are computed where they live, and its next process keeps replicas again."""
    chat, fresh = talk("crash-prefill"), talk("crash-prefill-new")
    holder, _ = synced(cluster, chat)
    before = cluster.prefill.info["incarnation"]
    cluster.prefill.kill()
    reply = chat.turn(40)
    assert reply.headers["x-kvc-mode"] == "direct" and cluster.worker_of(reply.headers) is holder
    fresh.turn(300)
    assert fresh.turn(20).headers["x-kvc-mode"] == "direct"
    cluster.whole()
    assert cluster.prefill.info["incarnation"] != before
    assert chat.turn(30).headers["x-kvc-mode"] == "direct"
    follows(cluster.prefill, holder, chat.sid)


def test_a_frozen_worker_learns_from_its_first_message(cluster, talk):
    """SES-4, MIG-3: frozen in the middle of a turn beyond the lease, while the session goes on elsewhere. When its scheduler
    wakes it ends that turn and announces it: the answer tells it that it owns nothing. Its HTTP process sleeps on
    meanwhile, so that no abort gets there first. No token of that turn reaches a client."""
    chat = talk("crash-frozen")
    holder, held = synced(cluster, chat)
    other = cluster.other(holder)
    placement = holder.view(chat.sid)["epoch"]["placement"]
    prompt = chat.say(40)
    stream = cluster.router.http.stream("/generate", holder.body(prompt, chat.sid, 300, stream=True))
    assert next(iter(stream))["output_ids"]
    holder.process.signal(signal.SIGSTOP)
    try:
        frozen = time.monotonic()
        stream.close()
        cluster.computed(holder)
        reply = chat.ask()
        assert cluster.worker_of(reply.headers) is other and reply.headers["x-kvc-source"] == "replica"
        assert sum(cluster.computed(holder).values()) < len(chat.history) - 6 - held + PAGE
        time.sleep(max(0.0, frozen + LEASE_S + 0.5 - time.monotonic()))
        assert chat.turn(20).headers["x-kvc-mode"] == "direct"
        os.kill(holder.process.named("sglang::scheduler"), signal.SIGCONT)
        until(lambda: holder.view(chat.sid)["standing"] == "replica", 30)
    finally:
        holder.process.signal(signal.SIGCONT)
    until(lambda: holder.view(chat.sid)["state"] == "idle")
    assert holder.view(chat.sid)["committed"] == len(prompt) + 299  # the turn came to its end, for nobody
    assert other.view(chat.sid)["standing"] == "owner"
    asked = dict(n=2, headers={"x-kvc-turn": f"s={chat.sid};p={placement['n']}.{placement['store']}"})
    with pytest.raises(HttpError) as refused:
        holder.generate([*chat.history, 7], **asked)
    assert "stale-epoch" in refused.value.answer.text
    reply = chat.turn(25)
    assert reply.headers["x-kvc-mode"] == "direct" and cluster.worker_of(reply.headers) is other
