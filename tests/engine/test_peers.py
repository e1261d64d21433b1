"""T7 on real engines: a peer that dies, stops or lies. Typed errors, nothing leaked, the request still answered. The wire
itself (truncated and oversized frames, slow peers, stale keys) is tested in the crates rdma and engine-ext."""

import random
import time
from http.client import HTTPException

import pytest
from harness import script
from harness.engine import start_all
from harness.module import Seed, Worker, assert_balanced
from harness.waiting import held_import, until


@pytest.fixture(scope="module")
def victim():
    """A worker to be stopped and killed; started again on demand by `alive`."""
    box: dict[str, Worker] = {}

    def alive(**kw) -> Worker:
        if "w" not in box or not box["w"].alive() or kw:
            if "w" in box:
                box["w"].stop()
            box["w"] = Worker("victim", pool=16384, page=16, **kw)
            start_all(box["w"])
        return box["w"]

    yield alive
    if "w" in box:
        box["w"].stop()


def code(answer) -> str:
    return answer.json["error"]["code"]


def test_an_exporter_that_stops_mid_pull_is_given_up_in_time(cluster, plain, oracle):
    """XFER-7, F12: deadline, fence, reclaim; then the turn is computed here."""
    source, target = cluster.prefill, cluster.decodes[0]
    seed = Seed(source, target, "frozen", script.ids(random.Random(70), 5000))
    seed.admit()
    with held_import(seed, deadline_ms=3000) as pull:
        began = time.monotonic()
        answer = pull.done()
        assert time.monotonic() - began < 8
        assert code(answer) in {"deadline-exceeded", "peer-unreachable", "transfer-failed"}
        assert assert_balanced(target)["landing"] == 0
        reply = seed.decode(n=6)  # the grant is still good: the prompt is computed here
    oracle.tokens(seed.prompt, reply.tokens, plain.generate(seed.prompt, n=6).tokens, "computed here")
    until(lambda: not source.listener.get("/kvc/v1/transfers").json["leases"], 60)


def test_an_importer_that_dies_mid_pull_holds_nothing_at_the_source(cluster, victim):
    """XFER-7: not beyond lease and fence."""
    source, target = cluster.prefill, victim()
    seed = Seed(source, target, "importer-dies", script.ids(random.Random(71), 5000))
    seed.admit()
    with held_import(seed) as pull:
        target.stop()
    with pytest.raises((OSError, HTTPException)):
        pull.done()
    until(lambda: not source.listener.get("/kvc/v1/transfers").json["leases"], 60)
    assert_balanced(source)


def test_an_exporter_that_dies_is_a_typed_error(cluster, victim):
    source, target = victim(), cluster.decodes[0]
    seed = Seed(source, target, "exporter-dies", script.ids(random.Random(72), 2000))
    seed.admit()
    seed.prefill()
    assert source.info
    source.stop()
    answer = seed.pull(deadline_ms=3000)
    assert code(answer) in {"peer-unreachable", "deadline-exceeded"}
    seed.give_up()
    assert assert_balanced(target)["landing"] == 0


def test_a_restarted_peer_is_another_incarnation(cluster, victim):
    """F16, SES-4: a message for the earlier process is refused."""
    source, target = victim(), cluster.decodes[0]
    seed = Seed(source, target, "restarted", script.ids(random.Random(73), 500))
    seed.admit()
    seed.prefill()
    wrong = f"{int(source.info['incarnation'], 16) ^ 1:016x}"
    answer = seed.pull(incarnation=wrong)
    assert code(answer) == "stale-incarnation"
    seed.give_up()
    assert_balanced(target)


def test_a_stale_placement_is_refused(cluster):
    """SES-4: stale-epoch names what is held and what came."""
    source, target = cluster.prefill, cluster.decodes[0]
    seed = Seed(source, target, "stale", script.ids(random.Random(74), 500))
    seed.admit()
    seed.prefill()
    assert seed.pull().status == 200
    seed.decode(n=3)
    older = {**seed.placement, "n": int(seed.placement["n"]) - 1}
    with_older = target.admit(
        session_id="stale", turn=1, input_tokens=510, append_tokens=10, placement=older,
        router="00000000000000aa", request=10**6, attempt=0,
    ).json  # fmt: skip
    assert not with_older["can_admit"] and with_older["reason"] == "stale-epoch"


def test_another_secret_is_refused_before_any_byte(cluster, victim, tmp_path):
    """XFER-10, F19."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    source, target = victim(env={"KVC_SECRET_FILE": str(secret)}), cluster.decodes[0]
    seed = Seed(source, target, "secret", script.ids(random.Random(75), 500))
    seed.admit()
    seed.prefill()
    assert code(seed.pull(deadline_ms=5000)) == "unauthenticated"
    seed.give_up()
    assert_balanced(target)


def test_another_kv_layout_is_refused_at_the_handshake(cluster, victim):
    """XFER-6, F21: bf16 against float32."""
    source, target = victim(flags=["--dtype", "bfloat16"]), cluster.decodes[0]
    seed = Seed(source, target, "layout", script.ids(random.Random(76), 500))
    seed.admit()
    seed.prefill()
    assert code(seed.pull(deadline_ms=5000)) == "layout-mismatch"
    seed.give_up()
    assert_balanced(target)
