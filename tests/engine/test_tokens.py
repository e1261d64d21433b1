"""T1: answers are the plain server's, and imported KV is the exporter's, byte for byte per position."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import script
from harness.module import Seed
from harness.oracle import first_difference

SESSIONS, TURNS = 6, 9


def ask(target, session, step):
    """One native turn; (prompt, reply)."""
    prompt = session.prompt(step)
    call = target.stream if step.stream else target.generate
    return prompt, call(prompt, session.sid, n=step.n)


def chat(target, body, sid):
    """One chat turn, streamed or not; (text, headers)."""
    headers = {"x-session-id": sid}
    if not body["stream"]:
        answer = target.http.post("/v1/chat/completions", body, headers=headers)
        return answer.json["choices"][0]["message"]["content"], answer.headers
    events = target.http.stream("/v1/chat/completions", body, headers=headers)
    try:
        pieces = [c["delta"].get("content") or "" for e in events for c in e.get("choices", [])]
        return "".join(pieces), events.headers
    finally:
        events.close()


def test_native_sessions_answer_as_the_plain_server(cluster, plain, oracle):
    """Seed, direct, reseed after eviction, large append, rewritten and shortened history, streaming and not. The decode
    pools are smaller than the sum of the histories, so sessions are evicted and come back."""
    sessions = script.native(seed=1, count=SESSIONS, turns=TURNS, shared=400, first=700, large=1200)
    modes: dict[str, int] = {}

    def play(session):
        for i, step in enumerate(session.steps):
            prompt, reply = ask(cluster.router, session, step)
            want = plain.generate(prompt, n=step.n).tokens
            oracle.tokens(prompt, reply.tokens, want, f"{session.sid} turn {i} {step.change}")
            session.answered(want)
            modes[reply.headers["x-kvc-mode"]] = modes.get(reply.headers["x-kvc-mode"], 0) + 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(play, sessions))
    assert modes.get("seed", 0) >= SESSIONS, modes
    assert modes.get("direct", 0) > 0 and modes.get("reseed", 0) > 0, modes
    assert oracle.turns == SESSIONS * TURNS


def test_an_evicted_session_is_reseeded_with_the_same_tokens(cluster, plain, oracle):
    rnd = random.Random(2)
    history = script.ids(rnd, 900)
    for turn in range(3):
        reply = cluster.router.generate(history, "evicted", n=9)
        want = plain.generate(history, n=9).tokens
        oracle.tokens(history, reply.tokens, want, f"turn {turn}")
        assert reply.headers["x-kvc-mode"] == ("seed" if turn == 0 else "reseed")
        history += want + script.ids(rnd, 40)
        cluster.holder("evicted").release("evicted", drop_kv=True)


def test_chat_sessions_answer_as_the_plain_server(cluster, plain, oracle):
    """The client sends text; the engine re-tokenises the last answer, so most turns rewind a little (OWN-7, F17)."""
    sessions = script.chats(seed=3, count=SESSIONS, turns=8)

    def play(session):
        for i, step in enumerate(session.steps):
            body = session.body(step)
            got, _ = chat(cluster.router, body, session.sid)
            want, _ = chat(plain, {**body, "stream": False}, session.sid)
            oracle.text(body, got, want, f"{session.sid} turn {i} {step.change} stream {step.stream}")
            session.answered(want)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(play, sessions))
    assert oracle.turns == SESSIONS * 8


def test_imported_kv_is_the_exporters_byte_for_byte(cluster):
    """SES-6, XFER-3, XFER-8: pages of 16 at the source; pages of 1 and 16 at the destinations."""
    rnd = random.Random(4)
    assert {d.page for d in cluster.decodes} == {1, 16}
    for target in cluster.decodes:
        prompt = script.ids(rnd, 1000 + 7 * target.page)
        seed = Seed(cluster.prefill, target, f"bytes-{target.page}", prompt).run()
        seed.decode(n=4)
        source, copy = (w.kv(seed.sid, 0, len(prompt) - 1) for w in (cluster.prefill, target))
        assert len(source) == len(prompt) - 1 and first_difference(source, copy) is None


@pytest.mark.parametrize("damage", ["one byte", "two positions swapped"])
def test_the_byte_check_sees_damage(cluster, damage):
    """Negative control: what tokens may not show, the comparison per position does."""
    sid, rnd = f"damage-{damage[:3]}", random.Random(5)
    prompt = script.ids(rnd, 600)
    cluster.router.generate(prompt, sid, n=2)
    holder = cluster.holder(sid)
    before = holder.kv(sid, 0, 599)
    holder.test("corrupt", session=sid, **({"at": 300} if damage == "one byte" else {"swap": [300, 450]}))
    after = holder.kv(sid, 0, 599)
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == ([300] if damage == "one byte" else [300, 450])
    holder.release(sid, drop_kv=True)


def test_the_token_check_sees_another_history(plain, oracle):
    """Negative control: other tokens far back change the answer, and the gap there is no tie."""
    rnd = random.Random(6)
    prompt = script.ids(rnd, 400)
    other = script.ids(rnd, 100) + prompt[100:]
    got, want = plain.generate(other, n=12).tokens, plain.generate(prompt, n=12).tokens
    oracle.tokens(prompt, got, want, "control")
    assert len(oracle.wrong) == 1
    oracle.wrong.clear()
