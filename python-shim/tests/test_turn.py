"""A turn against the native module, without an engine: what the adapter passes is checked, never trusted."""

from collections.abc import Iterator

import pytest
from kvc._native import Engine, Layout, Rows, TurnTag

torch = pytest.importorskip("torch")

POOL = 256


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    pool = [torch.zeros(POOL + 1, 2, 4) for _ in range(2)]
    layout = Layout(
        dtype="float32", device="cpu", layers=1, kv_heads=2, head_dim=4, page_tokens=1,
        buffers=[(buffer.data_ptr(), 2 * 4 * 4, POOL + 1) for buffer in pool],
    )  # fmt: skip
    flags = {"listen": "127.0.0.1:0", "peer_listen": "127.0.0.1:0"}
    engine = Engine(flags=flags, layout=layout, capacity=POOL, engine="none", model="none")
    yield engine
    engine.shutdown()


@pytest.fixture
def table() -> "torch.Tensor":
    """Three rows of 32 slots, each slot another one."""
    return torch.arange(1, 97, dtype=torch.int32).view(3, 32)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda table: table.to(torch.int64),
        lambda table: table[:, :8],
        lambda table: table[0],
        lambda table: table.t(),
        lambda table: table.to("meta"),
    ],
    ids=["dtype", "columns of it", "one row", "transposed", "not on cpu"],
)
def test_a_table_of_another_kind_is_refused(table, wrong):
    with pytest.raises(ValueError, match=r"rows must be a contiguous torch\.int32 tensor of two dimensions on cpu"):
        Rows(wrong(table))


@pytest.mark.parametrize(("row", "end"), [(3, 1), (0, 33), (2, 33), (2**40, 1), (0, 2**62)])
def test_slots_outside_the_table_are_an_error_and_the_turn_goes_on(engine, table, row, end):
    rows = Rows(table)
    turn = engine.arrive(TurnTag.of(f"outside-{row}-{end}"), "", [1, 2, 3], 0, 4)
    assert turn.begin() is None
    for call in (
        lambda: turn.progress(end, rows, row),
        lambda: turn.adopt(0, 0, rows, row, end),
        lambda: turn.commit(end, [], rows, row),
        lambda: turn.rollback(end, rows, row, False),
    ):
        with pytest.raises(ValueError, match="are not in a table of 3 rows and 32 columns"):
            call()
    turn.progress(3, rows, 0)
    turn.adopt(0, 0, rows, 0, 3)
    turn.commit(4, [7], rows, 0)
    assert engine.history_len(f"outside-{row}-{end}") == 4


def test_a_negative_row_is_no_row(engine, table):
    turn = engine.arrive(TurnTag.of("negative"), "", [1, 2, 3], 0, 4)
    with pytest.raises(OverflowError):
        turn.progress(3, Rows(table), -1)


def first_turn(engine: Engine, table: "torch.Tensor", session: str) -> None:
    """Tokens 10 to 19, and 20 as the answer, in the slots of row 1."""
    turn = engine.arrive(TurnTag.of(session), "", list(range(10, 20)), 0, 4)
    assert turn.match(9) is None
    turn.begin()
    turn.progress(10, Rows(table), 1)
    turn.adopt(0, 0, Rows(table), 1, 10)
    turn.commit(11, [20], Rows(table), 1)


def test_the_slots_of_a_row_come_back_for_the_next_turn(engine, table):
    first_turn(engine, table, "restored")
    turn = engine.arrive(TurnTag.of("restored"), "", [*range(10, 21), 5], 0, 4)
    tokens, shared, _, _ = turn.match(11)
    assert (tokens, shared) == (11, 0)
    out = torch.zeros(tokens, dtype=torch.int64)
    turn.slots_into(out.data_ptr(), tokens)
    assert out.tolist() == table[1, :11].tolist()


def test_a_match_asked_again_is_the_same_until_something_changes(engine, table):
    """`KvcCache` reads the slots once as long as the answers are equal."""
    first_turn(engine, table, "asked-again")
    turn = engine.arrive(TurnTag.of("asked-again"), "", [*range(10, 21), 5], 0, 4)
    before = turn.match(11)
    turn.claim(11)
    assert turn.match(11) == before
    first_turn(engine, table, "another")
    assert turn.match(11) != before


def test_a_known_history_is_not_compared_again_and_a_lost_one_is(engine, table):
    first_turn(engine, table, "known")
    appended = engine.arrive(TurnTag.of("known"), "", [0] * 11 + [5], 11, 4)  # only its tail is read
    assert appended.match(11)[0] == 11
    appended.cancel()
    rewritten = engine.arrive(TurnTag.of("known"), "", [0] * 11 + [5], 10, 4)  # not what is held: all of it is
    assert rewritten.match(11) is None


def test_a_token_that_is_none_is_named(engine):
    from kvc.errors import Refused

    with pytest.raises(Refused, match=r"input_ids\[2\] is no token id"):
        engine.arrive(TurnTag.of("bad"), "", [1, 2, -3], 0, 4)
