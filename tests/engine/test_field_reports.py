"""T8: public fault reports of other systems, as far as they show on a real engine and no other file has them. Names follow
the behaviour; SPECIFICATION.md maps each report to its tests."""

import random
from concurrent.futures import ThreadPoolExecutor

from harness import script
from harness.http import HttpError
from harness.module import assert_balanced
from harness.waiting import opened


def test_an_over_long_turn_leaves_the_session_untouched(cluster):
    """F4: refused before its forward pass; held counts stay right."""
    worker = cluster.decodes[0]
    history = opened(worker, "over-long")
    before = worker.session("over-long")
    try:
        worker.generate(history + script.ids(random.Random(80), 20000), "over-long", n=4)
        raise AssertionError("it cannot fit")
    except HttpError as error:
        assert 400 <= error.answer.status < 500
    after = worker.session("over-long")
    assert after["committed"] == before["committed"]
    assert worker.generate(history, "over-long", n=4).cached == before["committed"]
    assert_balanced(worker)


def test_input_logprobs_from_the_first_token_work_on_a_held_session(cluster, plain):
    """F5: `logprob_start_len=0` shortens the match; tokens and logprobs are the plain server's."""
    worker = cluster.decodes[0]
    history = opened(worker, "logprobs")
    ask = dict(n=5, return_logprob=True, logprob_start_len=0)
    got, want = worker.generate(history, "logprobs", **ask), plain.generate(history, **ask)
    assert got.tokens == want.tokens
    mine, theirs = ([x[0] for x in r.meta["input_token_logprobs"]] for r in (got, want))
    assert len(mine) == len(theirs)
    assert max(abs(a - b) for a, b in zip(mine[1:], theirs[1:], strict=True)) < 1e-3
    after = worker.generate(history + got.tokens, "logprobs", n=3)
    assert after.cached == len(history) + 4
    assert_balanced(worker)


def test_chunked_prefills_that_wait_for_budget_restore_once(cluster, plain, oracle):
    """F6: long appends of several sessions compete for the chunk budget and are tried again."""
    worker = cluster.decodes[1]
    histories = {f"budget-{i}": opened(worker, f"budget-{i}", 333) for i in range(4)}
    for i, sid in enumerate(histories):
        histories[sid] += script.ids(random.Random(81 + i), 900)
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda s: (s, worker.generate(histories[s], s, n=5)), histories))
    for sid, reply in replies:
        oracle.tokens(histories[sid], reply.tokens, plain.generate(histories[sid], n=5).tokens, sid)
    assert_balanced(worker)


def test_a_retokenised_answer_still_hits_its_common_prefix(cluster):
    """F17: the client's history differs near the end of the last answer; everything before it is reused."""
    worker = cluster.decodes[0]
    prompt = script.ids(random.Random(85), 500)
    answer = worker.generate(prompt, "retokenised", n=20).tokens
    other = [t % 200 + 1 if t % 200 + 1 != t else t + 1 for t in answer[10:]]
    reply = worker.generate(prompt + answer[:10] + other + [5, 6, 7], "retokenised", n=4)
    assert reply.cached == 510
    assert_balanced(worker)


def test_salt_and_extra_key_separate_histories(cluster):
    """SES-5: equal tokens under another key share nothing."""
    worker = cluster.decodes[0]
    prompt = script.ids(random.Random(86), 400)
    worker.generate(prompt, "salted", n=4, extra_key="a")
    assert worker.generate(prompt, "salted", n=4, extra_key="b").cached == 0
    assert worker.generate(prompt, n=4, extra_key="c").cached == 0
    assert_balanced(worker)


def test_of_several_samples_only_the_first_holds_the_session(cluster, plain):
    """Batch items and n > 1 carry one session id; the others run plain."""
    worker = cluster.decodes[0]
    prompt = script.ids(random.Random(87), 300)
    body = {
        **worker.body(prompt, "samples", 5),
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "n": 3, "ignore_eos": True},
    }
    answers = worker.http.post("/generate", body).json
    want = plain.generate(prompt, n=5).tokens
    assert [a["output_ids"] for a in answers] == [want] * 3
    two = [script.ids(random.Random(88), 200), script.ids(random.Random(89), 210)]
    batch = worker.http.post("/generate", worker.body(two, "items", 4)).json
    assert [a["output_ids"] for a in batch] == [plain.generate(p, n=4).tokens for p in two]
    assert worker.session("items")["committed"] in {203, 213}
    assert_balanced(worker)
