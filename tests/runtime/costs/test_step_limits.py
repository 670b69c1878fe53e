"""Step limits that the configuration does not set.

Before step costs are measured, the limits are upper bounds. Afterwards they are derived from the
smallest sizes with nearly the best throughput.
"""

from __future__ import annotations

import pytest

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import (
    StepLimits,
    decide_limits,
    redundant_sizes,
    upper_limits,
)


def make_costs(decode_ms: dict[int, float], prompt_ms: dict[int, float]) -> CostTable:
    return CostTable.from_medians(
        tokens=list(prompt_ms),
        seqs=list(decode_ms),
        contexts=[0],
        seconds=[ms / 1e3 for ms in prompt_ms.values() for _ in decode_ms],
        decode=[ms / 1e3 for ms in decode_ms.values()],
    )


# Decodes: 32 sequences give 1.6 tokens a ms, 64 and 128 hardly more.
# Prompts: steps of 256 tokens or more give 10 tokens a ms.
PLATEAU = make_costs(
    {1: 10.0, 8: 11.0, 32: 20.0, 64: 39.5, 128: 79.0},
    {1: 5.0, 64: 10.0, 256: 25.6, 512: 51.2, 1024: 102.0},
)
RISING = make_costs({1: 10.0, 4: 10.5, 16: 12.0, 64: 20.0}, {1: 5.0, 64: 10.0, 512: 30.0})


@pytest.mark.parametrize(
    ("seqs", "tokens", "is_cpu", "expected"),
    [
        (None, None, True, (64, 2048)),
        (None, None, False, (256, 8192)),
        (4096, None, True, (4096, 4096)),
        (None, 3, True, (3, 3)),
        (5, 7, False, (5, 7)),
    ],
)
def test_upper_bounds(
    seqs: int | None, tokens: int | None, is_cpu: bool, expected: tuple[int, int]
) -> None:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert upper_limits(config, is_cpu=is_cpu) == StepLimits(
        *expected, chooses_seqs=config.max_num_seqs is None
    )


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        (StepLimits(8, 64), 8),
        (StepLimits(8, 64, 4), 32),
        (StepLimits(8, 20, 4), 20),  # no more rows of logits than tokens
        (StepLimits(8, 4, 4), 8),  # padded buckets have a row for each sequence
        (StepLimits(8, 64, 4, 5), 13),
        (StepLimits(8, 64, 4, 100), 32),
    ],
)
def test_rows_of_the_largest_step(limits: StepLimits, rows: int) -> None:
    assert limits.max_num_rows == rows


def test_rows_per_sequence_are_those_of_the_drafter_whatever_is_decided() -> None:
    upper = upper_limits(SchedulerConfig(), max_drafts=3)
    assert upper == StepLimits(64, 2048, 4, 128, chooses_seqs=True)
    decided = decide_limits(SchedulerConfig(), upper, PLATEAU).limits
    assert (decided.rows_per_seq, decided.max_step_drafts) == (4, 128)
    on_gpu = upper_limits(SchedulerConfig(), is_cpu=False, max_drafts=3)
    assert on_gpu == StepLimits(256, 8192, 4, chooses_seqs=True)


def test_a_step_keeps_its_room_for_an_image_beside_its_sequences() -> None:
    upper = StepLimits(256, 2048, image_tokens=700)
    decided = decide_limits(SchedulerConfig(), upper, PLATEAU).limits
    assert decided == StepLimits(32, 700 + 32, image_tokens=700)


def test_larger_steps_that_bring_nothing_are_not_used() -> None:
    decided = decide_limits(SchedulerConfig(), StepLimits(256, 2048), PLATEAU)
    assert decided.limits == StepLimits(32, 256 + 32)
    assert decided.seqs_origin == "chosen: larger sizes give at most 1% more tokens a second"
    assert decided.tokens_origin == "chosen: larger sizes give at most 0% more tokens a second"


def test_bounds_stay_where_throughput_rises_to_the_last_point() -> None:
    decided = decide_limits(SchedulerConfig(), StepLimits(64, 2048), RISING)
    assert decided.limits == StepLimits(64, 2048)
    assert decided.seqs_origin == "the upper bound: throughput rises up to 64, the most measured"
    assert decided.tokens_origin == "the upper bound: throughput rises up to 512, the most measured"


def test_one_slow_point_at_the_end_is_no_plateau() -> None:
    costs = make_costs({1: 10.0, 16: 12.0, 64: 60.0}, {1: 5.0, 64: 10.0, 512: 100.0})
    assert decide_limits(SchedulerConfig(), StepLimits(64, 2048), costs).limits == StepLimits(
        64, 2048
    )


def test_what_was_set_stays() -> None:
    config = SchedulerConfig(max_num_seqs=48, max_num_batched_tokens=1000)
    decided = decide_limits(config, upper_limits(config), PLATEAU)
    assert decided == (StepLimits(48, 1000), "set", "set")
    half = SchedulerConfig(max_num_seqs=48)
    assert decide_limits(half, upper_limits(half), PLATEAU).limits == StepLimits(48, 256 + 48)


def test_nothing_is_decided_without_a_table() -> None:
    decided = decide_limits(SchedulerConfig(), StepLimits(64, 2048), None)
    assert decided == (StepLimits(64, 2048), *["the upper bound: not measured"] * 2)


def test_decided_limits_are_not_tiny() -> None:
    costs = make_costs(
        {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}, {1: 10.0, 4: 40.0, 16: 160.0, 64: 640.0}
    )
    decided = decide_limits(SchedulerConfig(), StepLimits(64, 2048), costs)
    assert decided.limits == StepLimits(32, 256 + 32)
    assert decided.seqs_origin == "the least: throughput rises only up to 1"


def test_buckets_as_slow_as_the_next_larger_one_are_redundant() -> None:
    costs = make_costs({1: 5.0, 2: 5.0, 4: 5.05, 8: 6.0, 16: 6.1, 32: 9.0}, {1: 5.0})
    assert redundant_sizes([1, 2, 4, 8, 16, 32], costs) == [1, 2, 8]
    assert redundant_sizes([4], costs) == []
    assert redundant_sizes([], costs) == []


def test_slowly_rising_costs_keep_some_buckets() -> None:
    """A bucket is compared with the next larger one that stays, so small differences add up."""
    costs = make_costs({size: 5.0 * 1.02**size for size in range(1, 11)}, {1: 5.0})
    assert redundant_sizes(range(1, 11), costs) == [1, 3, 5, 7, 9]
