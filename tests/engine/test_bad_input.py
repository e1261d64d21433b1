"""T9: bad input on every endpoint gets a 4xx with a code and a sentence, and changes nothing."""

import json

import pytest
from harness.module import question
from harness.process import free_port


@pytest.fixture
def worker(cluster):
    """The state before and after must be equal."""
    worker = cluster.decodes[0]
    before = worker.settled()
    yield worker
    after = worker.settled()
    keep = ("free", "evictable", "protected", "held", "rows_free", "sessions")
    assert {k: after[k] for k in keep} == {k: before[k] for k in keep}
    assert worker.alive()


def refused(answer, status=400):
    assert answer.status == status, f"HTTP {answer.status}: {answer.text}"
    error = answer.json["error"]
    assert error["code"] and len(error["message"]) > 10, error
    return error


GOOD = question("bad", 100)
BAD_QUESTIONS = {
    "no body": b"",
    "no JSON": b"{",
    "an array": b"[]",
    "null": b"null",
    "deep nesting": b"[" * 5000,
    "not UTF-8": b'{"session_id": "\xff"}',
    "no session_id": {k: v for k, v in GOOD.items() if k != "session_id"},
    "empty session_id": {**GOOD, "session_id": ""},
    "long session_id": {**GOOD, "session_id": "x" * 257},
    "control character": {**GOOD, "session_id": "a\nb"},
    "session_id a number": {**GOOD, "session_id": 7},
    "no input_tokens": {k: v for k, v in GOOD.items() if k != "input_tokens"},
    "input_tokens 0": {**GOOD, "input_tokens": 0, "append_tokens": 0},
    "input_tokens negative": {**GOOD, "input_tokens": -1},
    "input_tokens 2^32": {**GOOD, "input_tokens": 2**32},
    "input_tokens a text": {**GOOD, "input_tokens": "100"},
    "input_tokens a fraction": {**GOOD, "input_tokens": 1.5},
    "append above input": {**GOOD, "append_tokens": 101},
    "router too short": {**GOOD, "router": "aa"},
    "placement without store": {**GOOD, "placement": {"n": 1}},
    "unknown via": {**GOOD, "via": "teleport"},
    "incarnation no hex": {**GOOD, "incarnation": "zzzzzzzzzzzzzzzz"},
    "backup without incarnation": {**GOOD, "backup": {"peer": "127.0.0.1:1"}},
    "backup a text": {**GOOD, "backup": "127.0.0.1:1"},
}


@pytest.mark.parametrize("name", BAD_QUESTIONS)
def test_bad_admission_questions(worker, name):
    body = BAD_QUESTIONS[name]
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = worker.listener.call("POST", "/admit_direct_append", body)
    assert refused(answer)["code"] == "bad-request"
    through_engine = worker.http.call("POST", "/admit_direct_append", body)
    assert (through_engine.status, through_engine.json) == (answer.status, answer.json)


def test_an_oversized_body_is_refused(worker):
    answer = worker.listener.call("POST", "/admit_direct_append", b" " * 200_000)
    assert answer.status in (400, 413)


def test_a_prompt_no_worker_could_hold_is_too_large(worker):
    answer = worker.admit(**question("bad", 10**6)).json
    assert not answer["can_admit"] and answer["reason"] == "too-large"


IMPORT = {
    "reservation": 9**9, "placement": {"n": 1, "store": "0" * 16}, "peer": "127.0.0.1:1", "incarnation": "0" * 16,
    "deadline_ms": 100,
}  # fmt: skip


NO_GRANT = {k: v for k, v in IMPORT.items() if k != "reservation"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/kvc/v1/sessions/none/import", {}, 400),
        ("/kvc/v1/sessions/none/import", {**IMPORT, "peer": "nonsense"}, 400),
        ("/kvc/v1/sessions/none/import", IMPORT, 404),
        ("/kvc/v1/sessions/none/import", {**IMPORT, "source": "thief"}, 400),
        ("/kvc/v1/sessions/none/import", {**NO_GRANT, "source": "prefill"}, 400),
        ("/kvc/v1/sessions/none/import", {**IMPORT, "source": "owner"}, 400),
        ("/kvc/v1/sessions/none/withdraw", {}, 400),
        ("/kvc/v1/sessions/none/withdraw", {"placement": {"n": 1, "store": "0" * 16}, "incarnation": "0" * 16}, 409),
        ("/kvc/v1/drain", {"deadline_ms": -1}, 400),
        ("/kvc/v1/drain", {"draining": "yes"}, 400),
        ("/kvc/v1/sessions/%00/release", {}, 400),
        ("/kvc/v1/sessions/" + "x" * 300 + "/release", {}, 400),
        ("/kvc/v1/sessions/none/release", {"drop_kv": "yes"}, 400),
        ("/kvc/v1/sessions/none/release", {"request": {"router": "1"}}, 400),
        ("/kvc/v1/nothing", {}, 404),
    ],
)  # fmt: skip
def test_bad_posts_to_the_module(worker, path, body, status):
    refused(worker.listener.call("POST", path, body), status)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/kvc/v1/sessions/none", 404),
        ("/kvc/v1/sessions?limit=0", 400),
        ("/kvc/v1/sessions?limit=many", 400),
        ("/admit_direct_append", 405),
        ("/nothing", 404),
    ],
)
def test_bad_gets_to_the_module(worker, path, status):
    refused(worker.listener.get(path), status)


@pytest.mark.parametrize(
    "header",
    ["", "x", "s=", "s=%zz", "s=a;r=x", "s=a;p=1", "s=a;s=b", "s=a;unknown=1", "s=" + "a" * 2000],
)
def test_bad_turn_headers_are_refused_by_the_engine(worker, header):
    answer = worker.http.call("POST", "/generate", worker.body([1, 2, 3], n=1), headers={"x-kvc-turn": header})
    assert answer.status == 400 and "x-kvc-turn" in answer.text.lower(), answer.text


@pytest.mark.parametrize(
    "params",
    [{"id": ""}, {"id": "x" * 300}, {"id": "a\tb"}, {"id": 7}, {"id": "a", "nonsense": 1}],
    ids=str,
)
def test_bad_session_params_are_refused_by_the_engine(worker, params):
    answer = worker.http.call("POST", "/generate", {**worker.body([1, 2, 3], n=1), "session_params": params})
    assert 400 <= answer.status < 500, f"HTTP {answer.status}: {answer.text}"


ROUTER_BAD = {
    "no JSON": ("/generate", b"{", {}),
    "an array": ("/generate", b"[1]", {}),
    "long session header": ("/generate", {"input_ids": [1]}, {"x-session-id": "x" * 300}),
    "empty session header": ("/generate", {"input_ids": [1]}, {"x-session-id": ""}),
    "no prompt": ("/generate", {"sampling_params": {}}, {"x-session-id": "r"}),
    "messages missing": ("/v1/chat/completions", {"model": "tiny"}, {"x-session-id": "r"}),
    "a move without target": ("/v1/sessions/r/move", {}, {}),
    "a move to a number": ("/v1/sessions/r/move", {"to": 7}, {}),
    "a move of a nameless session": ("/v1/sessions/%00/move", {"to": "http://127.0.0.1:1"}, {}),
}


@pytest.mark.parametrize("name", ROUTER_BAD)
def test_bad_requests_to_the_router(cluster, name):
    path, body, headers = ROUTER_BAD[name]
    answer = cluster.router.http.call("POST", path, body, headers=headers)
    assert 400 <= answer.status < 500, f"HTTP {answer.status}: {answer.text}"
    body = answer.json  # what only the engine can judge has the engine's error shape
    assert body.get("error", body)["message"]


def test_a_prompt_no_worker_can_hold_is_413_at_the_router(cluster):
    answer = cluster.router.http.call("POST", "/generate", cluster.router.body([7] * 40000, "huge", 4))
    assert refused(answer, 413)["code"] == "too-large"


def test_unknown_paths_at_the_router(cluster):
    refused(cluster.router.http.get("/nothing"), 404)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--session-aware-cache=rust", "--enable-hierarchical-cache"], "hierarchical"),
        (["--session-aware-cache=rust", "--kvc-listen", "0.0.0.0:0"], "loopback"),
        (["--session-aware-cache=wood"], "session-aware-cache"),
    ],
    ids=["hierarchical cache", "open listener", "unknown cache"],
)
def test_bad_configuration_stops_the_start_with_one_line(flags, says):
    from harness.engine import Engine
    from harness.process import Process

    engine = Engine("bad-config", "radix", flags=flags)
    process = Process("bad-config", engine.command, engine.env)
    try:
        assert process.popen.wait(60) != 0
    finally:
        process.stop(0)
    last = [line for line in process.text().splitlines() if line.strip()][-1]
    assert says in last, process.tail()


def test_the_router_names_what_is_wrong_with_its_flags():
    from harness.process import Process
    from harness.router import BINARY

    for flags, says in (
        ([], "worker"),
        (["--worker", "role=cook,url=http://127.0.0.1:1"], "role"),
        (["--worker", "nonsense"], "worker"),
    ):
        process = Process("bad-router", [BINARY, "--listen", f"127.0.0.1:{free_port()}", *flags])
        try:
            assert process.popen.wait(20) != 0
        finally:
            process.stop(0)
        assert says in process.text().lower(), process.text()
