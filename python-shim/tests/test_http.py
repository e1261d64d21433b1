"""What the engine's HTTP server hands to the scheduler: header, batch items, session_params (engines §2)."""

from types import SimpleNamespace

import pytest
from kvc._native import TurnTag
from kvc.errors import Refused
from kvc.sglang.http import ROUTING_KEY, batch_item, check_session_params, routing_key


def test_the_turn_header_becomes_the_routing_key_and_wins_over_the_engines_own():
    assert routing_key({"x-kvc-turn": "s=a", "x-smg-routing-key": "k"}) == ROUTING_KEY + "s=a"
    assert routing_key({"x-smg-routing-key": "k"}) == "k"
    assert routing_key({}) is None


def test_an_engines_routing_key_is_never_taken_for_a_turn():
    assert not routing_key({"x-smg-routing-key": "s=a"}).startswith(ROUTING_KEY)


def items(session_params, n, key="k"):
    return [batch_item(SimpleNamespace(session_params=session_params, routing_key=key), i) for i in range(n)]


def test_of_a_batch_with_one_session_only_the_first_item_holds_it():
    got = items({"id": "a"}, 3)
    assert [item["session_params"] for item in got] == [{"id": "a"}, None, None]
    assert [item["routing_key"] for item in got] == ["k", None, None]


def test_items_with_sessions_of_their_own_keep_them():
    got = items([{"id": "a"}, {"id": "b"}, {"id": "a"}, None], 5)
    assert [item["session_params"] for item in got] == [{"id": "a"}, {"id": "b"}, None, None, None]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"id": "a", "turn": 1}, "session_params.turn is unknown"),
        ({"id": 7}, "session_params.id must be a string"),
        (["a"], "session_params must be an object"),
    ],
)
def test_unknown_keys_and_types_are_named(params, says):
    """Upstream answers an unknown key with status 500."""
    with pytest.raises(ValueError, match=says):
        check_session_params(params)


def test_good_session_params_pass():
    check_session_params({"id": "a", "rid": None, "offset": 0, "replace": False, "drop_previous_output": False})


@pytest.mark.parametrize("value", ["", "s=", "r=1", "s=a;z=1", "s=%zz", "s=a;r=x", "s=a;s=b", "s=" + "a" * 2000])
def test_a_bad_header_is_refused_with_its_reason(value):
    with pytest.raises(Refused) as caught:
        TurnTag.parse(value)
    assert (caught.value.code, caught.value.status) == ("bad-request", 400)
    assert str(caught.value).startswith("bad-request: x-kvc-turn")


def test_a_header_is_read():
    tag = TurnTag.parse("s=agent%207;r=12;prefill")
    assert (tag.session, tag.prefill) == ("agent 7", True)
    assert TurnTag.of("agent 7").session == "agent 7"
    with pytest.raises(Refused, match="256"):
        TurnTag.of("a" * 257)
