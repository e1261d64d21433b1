"""Live migration (MIG-1..3): a session changes its worker between turns and while one streams, has one owner at every moment,
and nothing of it is computed again. Refused moves change nothing on either side."""

import random
import threading

import pytest
from conftest import Cluster
from harness import script
from harness.module import STORE_ID, Seed, Worker, assert_balanced, fill, question
from harness.oracle import first_difference
from harness.process import free_port
from harness.waiting import Background, running, until

PAGE = 16
SLOW = 300_000  # bytes a second: a session of 1,000 tokens takes about seven


@pytest.fixture(autouse=True)
def balanced(cluster):
    """Nothing is lost, nothing stays throttled."""
    yield
    for worker in cluster.workers:
        worker.throttle(0)
        until(lambda w=worker: not w.transfers()["imports"] and not w.transfers()["leases"], 30)
        assert_balanced(worker)


class Owners:
    """Looks at both decode workers again and again while the block runs: never may two own the session (MIG-3)."""

    def __init__(self, cluster: Cluster, target: Worker, sid: str):
        self.sid, self.order = sid, [target, cluster.other(target)]
        self.over, self.both, self.looks = threading.Event(), 0, 0
        self.thread = threading.Thread(target=self.look)

    def look(self) -> None:
        while not self.over.wait(0.01):
            # The target first: had it been granted before its look, the source's later look must know.
            views = [w.session(self.sid) for w in self.order]
            self.both += all(v and v["committed"] and v["standing"] == "owner" for v in views)
            self.looks += 1

    def __enter__(self) -> "Owners":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.thread.join(10)
        assert self.looks and not self.both, f"two owners in {self.both} of {self.looks} looks"


def moved(router, sid: str, to: Worker) -> dict:
    answer = router.move(sid, to.url)
    assert answer.status == 200, answer.text
    return answer.json


def direct_and_only_new(cluster, chat, where: Worker, new: int = 30) -> None:
    """The next turn runs on what `where` holds, and only its new tokens are computed anywhere."""
    held = where.view(chat.sid)["committed"]
    cluster.computed()
    reply = chat.turn(new)
    assert reply.headers["x-kvc-mode"] == "direct" and cluster.worker_of(reply.headers) is where
    assert sum(cluster.computed().values()) < len(chat.history) - 6 - held + PAGE


def test_a_session_moves_between_turns_and_back(cluster, talk):
    """MIG-1: the next turn is direct on the target; the way back pulls only what is new; the bytes are the source's."""
    chat = talk("move-idle")
    chat.turn(800)
    chat.turn(50)
    source = cluster.holder(chat.sid)
    target = cluster.other(source)
    held, epoch = (source.view(chat.sid)[k] for k in ("committed", "epoch"))
    cluster.computed()
    answer = moved(cluster.router, chat.sid, target)
    assert answer["pulled_tokens"] == held and sum(cluster.computed().values()) == 0
    was, now = source.view(chat.sid), target.view(chat.sid)
    assert (was["standing"], now["standing"]) == ("moved", "owner") and now["committed"] == held
    assert now["epoch"]["placement"]["n"] > epoch["placement"]["n"]
    assert was["moved"]["placement"] == now["epoch"]["placement"] == answer["placement"]
    assert {k: was["moved"][k] for k in target.peer} == target.peer
    assert first_difference(source.kv(chat.sid, 0, held), target.kv(chat.sid, 0, held)) is None
    direct_and_only_new(cluster, chat, target)
    for here, there in ((target, source), (source, target)):
        before, after = there.view(chat.sid)["committed"], here.view(chat.sid)["committed"]
        assert moved(cluster.router, chat.sid, there)["pulled_tokens"] < after - before + PAGE
        assert cluster.holder(chat.sid) is there
        direct_and_only_new(cluster, chat, there)


def test_a_session_moves_while_its_turn_streams(cluster, talk):
    """MIG-1, MIG-3: the stream is whole, the session has one owner at every moment, the next turn is direct there."""
    chat = talk("move-stream")
    chat.turn(700)
    source = cluster.holder(chat.sid)
    target = cluster.other(source)
    turn = Background(chat.turn, 40, n=400, stream=True)
    until(lambda: running(source, chat.sid))
    with Owners(cluster, target, chat.sid):
        move = Background(cluster.router.move, chat.sid, target.url)
        until(lambda: target.imports(chat.sid))
        assert running(source, chat.sid), "the move must begin while the turn streams"
        assert len(turn.done().tokens) == 400
        answer = move.done()
    assert answer.status == 200, answer.text
    assert cluster.holder(chat.sid) is target and target.view(chat.sid)["committed"] == len(chat.history) - 1
    direct_and_only_new(cluster, chat, target)


def test_turns_go_on_while_a_slow_move_prepares(cluster, talk):
    """MIG-1: delta rounds while turns commit; each turn is served by exactly one worker."""
    chat = talk("move-slow")
    chat.turn(1000)
    source = cluster.holder(chat.sid)
    target = cluster.other(source)
    target.throttle(SLOW)
    with Owners(cluster, target, chat.sid):
        move = Background(cluster.router.move, chat.sid, target.url)
        until(lambda: any(i["phase"] == "pulling" for i in target.imports(chat.sid)))
        for _ in range(3):
            reply = chat.turn(20)
            assert reply.headers["x-kvc-mode"] == "direct" and cluster.worker_of(reply.headers) is source
        assert target.imports(chat.sid), "the turns must run while the move prepares"
        target.throttle(0)
        answer = move.done()
    assert answer.status == 200, answer.text
    assert cluster.holder(chat.sid) is target
    direct_and_only_new(cluster, chat, target)


# The module's own refusals, without a router: sessions are placed by hand.


@pytest.fixture
def placed(cluster, plain, oracle):
    """A session owned by the first decode worker. At the end nothing about it has changed, and its next turn is direct."""
    source, target = cluster.decodes
    seed = Seed(cluster.prefill, source, f"refused-{free_port()}", script.ids(random.Random(92), 600)).run()
    reply = seed.decode(n=5)
    source.settled()
    before = facts(seed.sid, source), facts(seed.sid, target)
    yield seed
    assert (facts(seed.sid, source), facts(seed.sid, target)) == before
    history = seed.prompt + reply.tokens + [9, 8, 7]
    again = source.generate(history, seed.sid, n=4)
    oracle.tokens(history, again.tokens, plain.generate(history, n=4).tokens, "after the refusal")
    assert again.cached == before[0]["committed"]


def facts(sid: str, worker: Worker) -> dict:
    """What a move could change of the session. Who holds no KV of it may know the name (MIG-2)."""
    view = worker.session(sid) or {"committed": 0}
    return {k: view.get(k) for k in ("committed", "standing", "epoch", "readable")} if view["committed"] else {}


def pending(seed: Seed, by: int = 1) -> dict:
    return {"n": seed.placement["n"] + by, "store": STORE_ID}


def refusal(answer, status: int, *codes: str) -> None:
    assert answer.status == status and answer.json["error"]["code"] in codes, answer.text
    assert len(answer.json["error"]["message"]) > 10


def test_a_move_of_an_unknown_session_is_refused(cluster, placed):
    source, target = cluster.decodes
    refusal(target.import_("never-seen", source, pending(placed)), 404, "unknown-session")
    assert target.session("never-seen") is None or not target.session("never-seen")["committed"]


def test_a_move_to_itself_is_refused(cluster, placed):
    source = cluster.decodes[0]
    refusal(source.import_(placed.sid, source, pending(placed)), 400, "import-from-self")


def test_a_move_under_an_older_placement_is_refused(cluster, placed):
    """SES-4: the owner's own number is not above it."""
    source, target = cluster.decodes
    for by in (0, -1):
        refusal(target.import_(placed.sid, source, pending(placed, by)), 409, "stale-epoch")


def test_a_move_from_a_replica_is_refused(cluster, placed):
    """MIG-1: only the owner hands over; the prefill worker's copy is a replica."""
    refusal(cluster.decodes[1].import_(placed.sid, cluster.prefill, pending(placed)), 409, "not-owner")


def test_a_move_from_an_earlier_process_is_refused(cluster, placed):
    """F16."""
    source, target = cluster.decodes
    wrong = f"{int(source.info['incarnation'], 16) ^ 1:016x}"
    refusal(target.import_(placed.sid, source, pending(placed), incarnation=wrong), 409, "stale-incarnation")


def test_a_move_from_nobody_is_refused(cluster, placed):
    source, target = cluster.decodes
    nobody = f"127.0.0.1:{free_port()}"
    answer = target.import_(placed.sid, source, pending(placed), peer=nobody, deadline_ms=2000)
    refusal(answer, 502 if answer.status == 502 else 504, "peer-unreachable", "deadline-exceeded")


def test_a_move_into_a_full_worker_is_refused(cluster, placed):
    """ADM-6: the target's ledger takes no session that it has no room for."""
    source, target = cluster.decodes
    grants = fill(target)
    try:
        answer = target.import_(placed.sid, source, pending(placed))
        refusal(answer, 503, "no-d-capacity", "session-not-resident-no-capacity")
    finally:
        for grant in grants:
            grant.give_up()


def test_a_second_move_while_one_runs_is_refused_and_a_withdrawn_one_ends_for_good(cluster, placed):
    """MIG-2: `withdraw` ends a pending move; its number is never good again."""
    source, target = cluster.decodes
    target.throttle(SLOW // 3)
    first = Background(target.import_, placed.sid, source, pending(placed))
    until(lambda: any(i["kind"] == "move" and i["phase"] == "pulling" for i in target.imports(placed.sid)))
    refusal(target.import_(placed.sid, source, pending(placed, 2)), 409, "import-running")
    answer = target.withdraw(placed.sid, pending(placed))
    assert answer.status == 200 and answer.json["answer"] == "withdrawn", answer.text
    ended = first.done()
    assert ended.status == 409, ended.text
    target.throttle(0)
    refusal(target.import_(placed.sid, source, pending(placed)), 409, "stale-epoch", "cancelled")


def test_a_hand_over_that_was_granted_is_not_withdrawn(cluster):
    """MIG-2: the pending target answers `owner` from then on, and the source `moved`."""
    source, target = cluster.decodes
    seed = Seed(cluster.prefill, source, "granted", script.ids(random.Random(93), 500)).run()
    seed.decode(n=5)
    source.settled()
    answer = target.import_(seed.sid, source, pending(seed))
    assert answer.status == 200, answer.text
    for _ in range(2):
        told = target.withdraw(seed.sid, pending(seed)).json
        assert told["answer"] == "owner" and told["epoch"]["placement"] == pending(seed)
    refused = source.admit(**question(seed.sid, 510, turn=1, placement=seed.placement)).json
    assert not refused["can_admit"] and refused["reason"] == "moved"
    assert refused["moved"]["placement"] == pending(seed) and refused["moved"]["peer"] == target.info["peer"]
    for worker in cluster.decodes:
        worker.release(seed.sid, drop_kv=True)


@pytest.mark.parametrize("wrong", ["unknown session", "unknown worker", "to itself", "a prefill worker", "no target"])
def test_the_router_refuses_moves_that_make_no_sense(cluster, talk, wrong):
    """Typed, and the session stays where it is."""
    chat = talk(f"move-wrong-{wrong.replace(' ', '-')}")
    chat.turn(300)
    holder = cluster.holder(chat.sid)
    http = cluster.router.http
    path = f"/v1/sessions/{chat.sid}/move"
    answer = {
        "unknown session": lambda: http.call("POST", "/v1/sessions/never-seen/move", {"to": holder.url}),
        "unknown worker": lambda: http.call("POST", path, {"to": f"http://127.0.0.1:{free_port()}"}),
        "to itself": lambda: http.call("POST", path, {"to": holder.url}),
        "a prefill worker": lambda: http.call("POST", path, {"to": cluster.prefill.url}),
        "no target": lambda: http.call("POST", path, {}),
    }[wrong]()
    assert 400 <= answer.status < 500 and answer.json["error"]["code"], answer.text
    assert cluster.holder(chat.sid) is holder
    assert chat.turn(20).headers["x-kvc-mode"] == "direct"
