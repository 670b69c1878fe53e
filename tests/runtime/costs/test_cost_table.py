"""The step-cost table: costs never fall along an axis, and are interpolated between points.

Converting a table to bytes and back changes nothing.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.costs.cost_table import Chunk, CostTable
from tests.runtime.cost_tables import make_table, tables

ARGUMENTS = st.tuples(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 1000))


def two_by_two(**changes: object) -> CostTable:
    fields: dict = {
        "tokens": (1, 11),
        "seqs": (1, 3),
        "contexts": (0, 100),
        "seconds": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        "decode": (1.0, 1.5, 2.0, 3.5),
    }
    return CostTable(**{**fields, **changes})


def test_points_of_the_grid_are_as_measured() -> None:
    table = two_by_two()
    assert [table.step_seconds(t, s, c) for t in (1, 11) for s in (1, 3) for c in (0, 100)] == [
        1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0
    ]  # fmt: skip
    assert [table.decode_seconds(s, c) for s in (1, 3) for c in (0, 100)] == [1.0, 1.5, 2.0, 3.5]


def test_a_log_probability_costs_what_was_measured_or_as_much_as_a_token() -> None:
    assert two_by_two().seconds_per_score == two_by_two().step_seconds(11, 1, 0) / 11
    table = two_by_two(scored_seconds=0.25)
    for start in (0, 50):
        difference = table.chunk_surcharge(Chunk(6, start, 4)) - table.chunk_surcharge(
            Chunk(6, start)
        )
        assert difference == pytest.approx(1.0)
    assert CostTable.from_bytes(table.to_bytes()) == table
    with pytest.raises(ValueError, match="scored_seconds must be finite"):
        two_by_two(scored_seconds=float("nan"))


def test_between_points_it_is_multilinear() -> None:
    table = two_by_two()
    assert table.step_seconds(6, 1, 0) == 3.0
    assert table.step_seconds(6, 2, 50) == 4.5
    assert table.decode_seconds(2, 50) == 2.0


def test_past_the_grid_the_last_interval_goes_on() -> None:
    table = two_by_two()
    assert table.step_seconds(21, 1, 0) == pytest.approx(9.0)  # 0.4 a token
    assert table.step_seconds(11, 1, 300) == pytest.approx(8.0)  # 0.01 a token of context
    assert table.step_seconds(1, 5, 0) == pytest.approx(5.0)  # 1.0 a sequence
    assert table.decode_seconds(3, 200) == pytest.approx(5.0)
    assert table.decode_seconds(1, 200) == pytest.approx(2.0)


def test_a_single_point_scales_with_tokens_and_sequences() -> None:
    table = CostTable(tokens=(2,), seqs=(1,), contexts=(0,), seconds=(0.5,), decode=(0.4,))
    assert table.step_seconds(1, 1, 0) == 0.5
    assert table.step_seconds(6, 1, 0) == pytest.approx(1.5)
    assert table.decode_seconds(3, 5000) == pytest.approx(1.2)


def test_a_disturbed_measurement_is_lowered_to_its_larger_neighbours() -> None:
    table = CostTable.from_medians(
        tokens=[1, 2, 4], seqs=[1], contexts=[0], seconds=[1.0, 9.0, 2.0], decode=[1.0]
    )
    assert table.seconds == (1.0, 2.0, 2.0)


def test_contexts_of_decodes_and_chunks_are_charged_one_by_one() -> None:
    table = make_table(step_ms=2.0, token_ms=0.1, seq_ms=0.05, pair_us=1.0)
    assert table.mixed_seconds(0, 0, []) == 0.0
    assert table.mixed_seconds(4, 32, []) == pytest.approx(2e-3 + 4 * 0.15e-3 + 4 * 32e-6)
    # 4 decodes over 32 tokens each, 16 tokens of a prompt behind 64 others.
    assert table.mixed_seconds(4, 32, [Chunk(16, 64)]) == pytest.approx(
        2e-3 + 20 * 0.1e-3 + 5 * 0.05e-3 + (4 * 32 + 16 * 64) * 1e-6
    )
    assert table.mixed_seconds(0, 0, [Chunk(16, 0)]) == table.step_seconds(16, 1, 0)


@given(tables(), ARGUMENTS, ARGUMENTS)
def test_it_never_falls(
    table: CostTable, first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    low = [min(pair) for pair in zip(first, second, strict=True)]
    high = [max(pair) for pair in zip(first, second, strict=True)]
    allowed = 1e-9 * (1 + table.step_seconds(*high))
    assert 0.0 <= table.step_seconds(*low) <= table.step_seconds(*high) + allowed
    assert 0.0 <= table.decode_seconds(*low[1:]) <= table.decode_seconds(*high[1:]) + allowed


@given(tables(), st.data())
def test_between_points_it_stays_within_the_corners(table: CostTable, data: st.DataObject) -> None:
    axes = (table.tokens, table.seqs, table.contexts)
    corners, place = [], []
    for axis in axes:
        index = data.draw(st.integers(0, max(0, len(axis) - 2)))
        pair = (axis[index], axis[min(index + 1, len(axis) - 1)])
        corners.append(pair)
        place.append(data.draw(st.floats(*map(float, pair))))
    values = [table.step_seconds(*corner) for corner in itertools.product(*corners)]
    assert min(values) <= table.step_seconds(*place) <= max(values)


@given(tables())
def test_bytes_and_back(table: CostTable) -> None:
    again = CostTable.from_bytes(table.to_bytes())
    assert again == table
    assert again.step_seconds(7, 3, 40) == table.step_seconds(7, 3, 40)


@settings(max_examples=50)
@given(tables())
def test_the_envelope_changes_nothing_that_rises(table: CostTable) -> None:
    again = CostTable.from_medians(
        tokens=table.tokens,
        seqs=table.seqs,
        contexts=table.contexts,
        seconds=table.seconds,
        decode=table.decode,
        scored_seconds=table.scored_seconds,
    )
    assert again == table


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": (11, 1)}, "tokens must rise from at least 1, got (11, 1)"),
        ({"seqs": (0, 3)}, "seqs must rise from at least 1, got (0, 3)"),
        ({"contexts": ()}, "contexts must rise from at least 0, got ()"),
        ({"seconds": (1.0,)}, "seconds must have 8 entries, got 1"),
        ({"decode": (1.0, 2.0, float("nan"), 3.0)}, "decode must be finite and at least 0"),
        ({"decode": (-1.0, 2.0, 2.0, 3.0)}, "decode must be finite and at least 0"),
        ({"decode": (3.0, 3.0, 2.0, 3.0)}, "decode falls along an axis"),
    ],
)
def test_what_is_no_table_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        two_by_two(**changes)
    assert str(caught.value).startswith(f"cost table: {words}")


def test_other_bytes_are_refused() -> None:
    data = two_by_two().to_bytes()
    for broken in (b"", data[:-1], b"\x00" + data, data.replace(b"decode", b"decoda")):
        with pytest.raises(ValueError, match="not a step-cost table: "):
            CostTable.from_bytes(broken)
    falling = data.replace(b"\xcb\x40\x0c", b"\xcb\x3f\x0c")  # the last decode entry, 3.5
    assert falling != data
    with pytest.raises(ValueError, match="falls along an axis"):
        CostTable.from_bytes(falling)
