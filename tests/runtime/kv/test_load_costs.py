"""`LoadCosts` refuses loads that are slower than computing, learns, and tries again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.kv.load_costs import LoadCosts
from tests.runtime.cost_tables import make_table

NUM_BLOCKS = 10  # of 16 tokens: about 18 ms in `make_table` at the beginning of a sequence
FAST, SLOW = 0.0004, 0.01  # seconds of a block


def learned(seconds_per_block: float) -> LoadCosts:
    costs = LoadCosts(make_table(), block_bytes=1 << 20, block_size=16)
    for _ in range(30):
        costs.observe(NUM_BLOCKS, NUM_BLOCKS * seconds_per_block)
    return costs


@given(st.integers(1, 1 << 24), st.floats(1e-6, 1.0), st.integers(1, 300))
def test_predictions_approach_the_observed_rate(
    block_bytes: int, seconds_per_block: float, num_blocks: int
) -> None:
    costs = LoadCosts(make_table(), block_bytes, 16)
    for _ in range(60):
        costs.observe(num_blocks, num_blocks * seconds_per_block)
    expected = 0.002 + 7 * seconds_per_block
    assert costs.predict(7) == pytest.approx(expected, rel=0.01)
    assert costs.num_loads == 60
    assert costs.load_seconds == pytest.approx(60 * num_blocks * seconds_per_block)


def test_a_load_that_is_slower_than_computing_is_refused() -> None:
    costs = learned(FAST)
    assert costs.is_faster(NUM_BLOCKS, 0)
    assert costs.num_refused == 0
    costs = learned(SLOW)
    assert not costs.is_faster(NUM_BLOCKS, 0)
    assert costs.num_refused == 1
    # Blocks late in a long prompt attend to all tokens before, so computing them takes longer.
    assert costs.is_faster(NUM_BLOCKS, 2000)
    assert costs.num_refused == 1


def test_after_refusals_the_tier_is_tried_again_and_a_fast_load_settles_it() -> None:
    costs = learned(SLOW)
    while not costs.is_faster(NUM_BLOCKS, 0):
        assert costs.num_refused < 500
    assert costs.num_refused > 20, "a slow tier is tried seldom"
    costs.observe(NUM_BLOCKS, NUM_BLOCKS * FAST)
    assert costs.is_faster(NUM_BLOCKS, 0)
    for _ in range(3):  # or it is still slow
        costs.observe(NUM_BLOCKS, NUM_BLOCKS * SLOW)
    assert not costs.is_faster(NUM_BLOCKS, 0)


def test_a_load_that_failed_at_once_does_not_count_as_fast() -> None:
    costs = learned(SLOW)
    before = costs.predict(NUM_BLOCKS)
    for _ in range(50):
        costs.observe(0, 0.001)
    assert costs.predict(NUM_BLOCKS) == before


def test_without_measured_costs_every_load_counts_as_faster() -> None:
    costs = LoadCosts(None, 1 << 30, 16)
    costs.observe(1, 1000.0)
    assert costs.is_faster(1, 0)


def test_when_a_load_is_late() -> None:
    assert learned(FAST).late_after(NUM_BLOCKS) == 1.0
    slow = learned(1.0)
    assert slow.late_after(NUM_BLOCKS) == pytest.approx(4 * slow.predict(NUM_BLOCKS))
