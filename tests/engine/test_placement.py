"""SES-4 on real engines: a worker whose session is granted elsewhere under a later placement ends its turn with a typed error,
and keeps its copy as a replica at most."""

import random

import pytest
from harness import script
from harness.http import HttpError
from harness.module import Seed, Worker, assert_balanced, question, tag
from harness.oracle import first_difference
from harness.waiting import Background, running, until


class Session:
    """One turn has been placed on the first decode worker; the next is sent there under the same placement."""

    def __init__(self, cluster, sid: str, tokens: int = 400):
        self.sid = sid
        self.owner, self.other = cluster.decodes
        rnd = random.Random(sid)
        placed = Seed(cluster.prefill, self.owner, sid, script.ids(rnd, tokens)).run()
        self.history = placed.prompt + placed.decode(6).tokens
        self.committed = self.owner.view(sid)["committed"]
        self.prompt = self.history + script.ids(rnd, 30)
        self.headers = tag(sid, placement=placed.placement)
        self.old = placed.placement

    def stream(self, n: int) -> list[dict]:
        body = self.owner.body(self.prompt, n=n, stream=True)
        events = self.owner.http.stream("/generate", body, self.headers)
        try:
            return list(events)
        finally:
            events.close()

    def generate(self, n: int):
        return self.owner.generate(self.prompt, n=n, headers=self.headers)

    def reseed(self) -> Seed:
        """As a router that asks the other worker: a granted number, and the import from what the owner has committed."""
        seed = Seed(self.owner, self.other, self.sid, self.prompt, turn=1)
        seed.admit()
        pulled = seed.pull(source="replica")
        assert pulled.status == 200, pulled.text
        assert pulled.json["resident_tokens"] == self.committed
        return seed

    def lost(self) -> None:
        """The owner of before has the committed copy, as a replica, and takes no turn of the old placement."""
        view = self.owner.view(self.sid)
        assert (view["standing"], view["committed"]) == ("replica", self.committed)
        with pytest.raises(HttpError) as refused:
            self.generate(2)
        assert refused.value.answer.status == 409 and "stale-epoch" in refused.value.answer.text
        asked = question(self.sid, len(self.prompt), 1, placement=self.old)
        assert self.owner.admit(**asked).json["reason"] == "stale-epoch"

    def lives_there(self, seed: Seed, plain, oracle) -> None:
        """The other worker has every byte and computes the same tokens."""
        same = (self.owner.kv(self.sid, 0, self.committed), self.other.kv(self.sid, 0, self.committed))
        assert first_difference(*same) is None
        self.other.forwards()
        oracle.tokens(self.prompt, seed.decode(12).tokens, plain.generate(self.prompt, n=12).tokens, self.sid)
        assert self.other.computed() <= len(self.prompt) - self.committed + self.other.page
        assert self.other.view(self.sid)["standing"] == "owner"


@pytest.fixture(autouse=True)
def balanced(cluster):
    yield
    for worker in cluster.workers:
        until(lambda w=worker: not w.transfers()["imports"] and not w.transfers()["leases"], 30)
        assert_balanced(worker)


def superseded(worker: Worker) -> float:
    return worker.state()["counters"]["superseded_turns"]


def test_a_stream_ends_typed_when_its_session_is_granted_elsewhere(cluster, plain, oracle):
    session = Session(cluster, "place-stream")
    before = superseded(session.owner)
    turn = Background(session.stream, 3000)
    until(lambda: running(session.owner, session.sid))
    seed = session.reseed()
    events = turn.done()
    assert 1 <= len(events[-2]["output_ids"]) < 3000, "it must have been caught while it streamed"
    end = events[-1]["meta_info"]["finish_reason"]
    assert (end["type"], end["status_code"], end["err_type"]) == ("abort", 409, "stale-epoch"), end
    assert end["message"].startswith("stale-epoch: ")
    assert superseded(session.owner) == before + 1
    session.lost()
    session.lives_there(seed, plain, oracle)


def test_an_answer_that_is_not_streamed_is_409(cluster, plain, oracle):
    session = Session(cluster, "place-whole")
    turn = Background(session.generate, 3000)
    until(lambda: running(session.owner, session.sid))
    seed = session.reseed()
    with pytest.raises(HttpError) as ended:
        turn.done()
    assert ended.value.answer.status == 409 and "stale-epoch: " in ended.value.answer.text
    session.lost()
    session.lives_there(seed, plain, oracle)


def test_a_turn_that_waits_is_told_at_once(cluster, plain, oracle):
    """No row is free: it would begin much later, on a session that is not its worker's any more."""
    for worker in cluster.decodes:
        worker.flush()  # room for all of it: the copy of a session that lives elsewhere is the first to be evicted
    session = Session(cluster, "place-waits")
    blockers = [
        Background(session.owner.generate, script.ids(random.Random(i), 100), n=400)
        for i in range(session.owner.running)
    ]
    until(lambda: session.owner.state()["running"] >= session.owner.running)
    turn = Background(session.generate, 8)
    until(lambda: session.owner.state()["waiting"] == 1)
    seed = session.reseed()
    with pytest.raises(HttpError) as ended:
        turn.done()
    assert ended.value.answer.status == 409 and "stale-epoch: " in ended.value.answer.text
    assert not all(blocker.future.done() for blocker in blockers)
    for blocker in blockers:
        assert len(blocker.done().tokens) == 400
    session.lost()
    session.lives_there(seed, plain, oracle)


def test_a_long_prefill_ends_with_its_next_chunk(cluster, plain, oracle):
    """The reseed waits for it."""
    session = Session(cluster, "place-chunks")
    session.owner.forwards()
    short, session.prompt = session.prompt, session.history + script.ids(random.Random(5), 6000)
    turn = Background(session.generate, 8)
    until(lambda: running(session.owner, session.sid))
    session.prompt = short
    seed = session.reseed()
    with pytest.raises(HttpError) as ended:
        turn.done()
    assert ended.value.answer.status == 409 and "stale-epoch: " in ended.value.answer.text
    assert session.owner.computed() < 5000
    session.lost()
    session.lives_there(seed, plain, oracle)
