"""T2: what the module says was reused is what never entered the model. The tokens of each forward pass are counted in the
engine, apart from the module."""

import random

import pytest
from harness import script
from harness.module import Worker
from harness.oracle import first_difference


def one(worker: Worker, rid: str) -> dict:
    """The counted forward passes of one request."""
    found = [f for f in worker.forwards() if f["rid"] == rid]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("which", [0, 1], ids=["page 1", "page 16"])
def test_reused_tokens_never_enter_the_model(cluster, which):
    """Append, rewrite, shorten, large append, over several chunks of prefill (OWN-5, OWN-7, F7)."""
    worker = cluster.decodes[which]
    session = script.native(seed=10 + which, count=1, turns=10, shared=200, first=500, large=1100)[0]
    before: list[int] = []
    for i, step in enumerate(session.steps):
        prompt = session.prompt(step)
        reply = worker.generate(prompt, session.sid, n=step.n, rid=f"reuse-{which}-{i}")
        counted = one(worker, f"reuse-{which}-{i}")
        assert reply.cached == counted["cached"] == len(prompt) - counted["forwarded"], f"turn {i} {step.change}"
        common = first_difference(before, prompt)
        held = min(len(before) if common is None else common, len(prompt) - 1)
        if worker.page == 1:
            assert reply.cached == held, f"turn {i} {step.change}"
        else:
            assert held - worker.page < reply.cached <= held, f"turn {i} {step.change}"
        session.answered(reply.tokens)
        before = (prompt + reply.tokens)[:-1]  # the last token has no KV
    worker.release(session.sid, drop_kv=True)


def test_a_seeded_session_computes_one_token_at_its_decode_worker(cluster):
    rnd = random.Random(12)
    prompt = script.ids(rnd, 807)  # whole pages would be shared to the end, and a shared page is computed whole
    for worker in cluster.workers:
        worker.forwards()
    reply = cluster.router.generate(prompt, "reuse-seed", n=6, rid="reuse-seed")
    assert reply.headers["x-kvc-mode"] == "seed"
    holder = cluster.holder("reuse-seed")
    counted = one(holder, "reuse-seed")
    assert counted["forwarded"] == 1 and reply.cached == counted["cached"] == 806
    assert sum(f["forwarded"] for f in cluster.prefill.forwards()) == 807


def test_a_shared_first_prompt_is_computed_once(cluster):
    """SES-6: the second session's import or prefill takes the common head from the engine's own tree."""
    rnd = random.Random(13)
    worker = cluster.decodes[1]
    head = script.ids(rnd, 640)
    worker.generate(head + script.ids(rnd, 50), "share-a", n=2)
    reply = worker.generate(head + script.ids(rnd, 50), "share-b", n=2)
    assert reply.cached == 640
    for sid in ("share-a", "share-b"):
        worker.release(sid, drop_kv=True)


def test_a_request_without_session_uses_the_engines_tree(cluster):
    worker, rnd = cluster.decodes[0], random.Random(14)
    prompt = script.ids(rnd, 300)
    worker.generate(prompt, n=4)
    assert worker.generate(prompt + script.ids(rnd, 20), n=4).cached >= 300
