"""T3: every token slot and request row is accounted for, at page sizes 1, 16 and 64; the engine's own idle and busy memory
checks stay on and quiet."""

import random

from harness import script
from harness.http import HttpError
from harness.module import assert_balanced


def test_sessions_are_accounted_for_while_they_live_and_gone_after_close(small):
    """Appends, rewinds, shortenings, unaligned ends (F7), logprobs from 0 (F5), refused and too long requests (F4);
    no row while idle (OWN-3)."""
    sessions = script.native(seed=30, count=4, turns=6, shared=150, first=200, large=500)
    for i in range(6):
        for session in sessions:
            prompt = session.prompt(session.steps[i])
            session.answered(small.generate(prompt, session.sid, n=session.steps[i].n).tokens)
        assert_balanced(small)
    last = sessions[0]
    committed = small.session(last.sid)["committed"]
    small.generate(last.history, last.sid, n=3, return_logprob=True, logprob_start_len=0)
    for refused in ({"sampling": {"json_schema": "{}"}}, {"n": 10**6}):
        try:
            small.generate(last.history, last.sid, **{"n": 3, **refused})
        except HttpError as error:
            assert 400 <= error.answer.status < 500
    assert small.session(last.sid)["committed"] >= committed
    assert_balanced(small)
    for session in sessions:
        small.release(session.sid, drop_kv=True)
    state = assert_balanced(small)
    assert state["held"] == state["protected"] == 0
    small.flush()
    state = assert_balanced(small)
    assert state["free"] == state["pool"]


def test_flush_forgets_the_kv_and_keeps_the_session_known(small):
    """SES-1, F3: the next turn recomputes silently."""
    prompt = script.ids(random.Random(31), 500)
    first = small.generate(prompt, "flushed", n=6)
    small.settled()
    small.flush()
    again = small.generate(prompt, "flushed", n=6)
    assert again.tokens == first.tokens and again.cached == 0
    small.release("flushed", drop_kv=True)
    assert_balanced(small)


def test_streaming_sessions_are_accounted_for(small):
    small.http.post("/open_session", {"capacity_of_str_len": 100000, "session_id": "opened", "streaming": True})
    rnd = random.Random(32)
    for tokens in (301, 17, 40):
        small.generate(script.ids(rnd, tokens), "opened", n=5)
        assert_balanced(small)
    small.http.post("/close_session", {"session_id": "opened"})
    state = assert_balanced(small)
    assert state["held"] == 0
    small.flush()
    assert small.settled()["free"] == small.pool
