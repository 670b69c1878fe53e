"""Attention on the CPU: the bits of a sequence do not depend on its batch or on its chunks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from ostinato.ops.attention import AttentionMetadata
from tests.ops.attention_steps import Shape, Step, known, make_step, run
from tests.ops.kernel_checks import EACH_LEVEL, LEVELS, SLOW_LEVELS
from tests.ops.level_backend import LevelBackend
from tests.pairwise import all_combinations

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = [(1, 1), (1, 300), (70, 70), (1, 64), (33, 290), (2, 257)]


@pytest.fixture(scope="module", params=EACH_LEVEL)
def level(request: pytest.FixtureRequest) -> LevelBackend:
    return LevelBackend(request.param)


@pytest.fixture(autouse=True)
def _one_thread(set_threads: Callable[[int], None]) -> None:
    """Tests use one thread by default: small steps do not gain from a second."""
    set_threads(1)


def part_of(step: Step, row: int) -> Step:
    """The step with one of its sequences alone."""
    begin, end = step.metadata.query_start_loc[row : row + 2].tolist()
    metadata = AttentionMetadata(
        torch.tensor([0, end - begin], dtype=torch.int32),
        step.metadata.seq_lens[row : row + 1],
        step.metadata.block_table[row : row + 1],
        step.metadata.slot_mapping[begin:end],
        step.metadata.plan,
        None if step.metadata.visible_ends is None else step.metadata.visible_ends[begin:end],
    )
    q, k, v = (x[begin:end] for x in (step.q, step.k, step.v))
    return Step(q, k, v, step.k_cache, step.v_cache, metadata, end - begin)


@pytest.mark.parametrize(
    ("level", "dtype", "extras"),
    all_combinations(
        LEVELS,
        DTYPES,
        (
            {},
            {"sliding_window": 90},
            {"soft_cap": 4.0},
            {"has_alibi": True, "has_sinks": True},
            {"run_tokens": 17},
        ),
        rare=SLOW_LEVELS,
    ),
    indirect=["level"],
    ids=str,
)
def test_a_sequence_alone_and_in_a_batch(
    level: LevelBackend, dtype: torch.dtype, extras: dict[str, Any]
) -> None:
    shape = Shape(dtype=dtype, head_dim=64, **extras)
    step = make_step(MIXED, shape)
    out, _, _ = run(level, step, shape)
    for row in range(len(MIXED)):
        begin, end = step.metadata.query_start_loc[row : row + 2].tolist()
        alone, _, _ = run(level, part_of(step, row), shape)
        assert torch.equal(alone, out[begin:end])


@pytest.mark.parametrize(
    ("level", "dtype", "cache_dtype", "extras"),
    all_combinations(
        LEVELS,
        DTYPES,
        (None, torch.int8),
        (
            {},
            {"sliding_window": 90},
            {"sliding_window": -128, "soft_cap": 4.0},
            {"has_alibi": True, "has_sinks": True},
            {"run_tokens": 17, "block_size": 24},
        ),
        rare=SLOW_LEVELS,
    ),
    indirect=["level"],
    ids=str,
)
def test_few_rows_with_all_or_some_or_one_of_the_kv_heads_together(
    level: LevelBackend,
    set_threads: Callable[[int], None],
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    extras: dict[str, Any],
) -> None:
    # These contexts have nine partitions. One thread computes all six kv heads of a sequence
    # together, two threads three of them, and four threads each kv head by itself.
    shape = Shape(
        dtype=dtype, cache_dtype=cache_dtype, head_dim=64, num_heads=12, num_kv_heads=6, **extras
    )
    step = make_step([(1, 300), (3, 700), (40, 60), (1, 65), (5, 300)], shape)
    out, k_cache, v_cache = run(level, step, shape)
    assert out.isfinite().all()
    for threads in (2, 4):
        set_threads(threads)
        for one, other in zip(run(level, step, shape), (out, k_cache, v_cache), strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("case", ["float32", "bfloat16", "float16", "int8", "options", "blocks"])
def test_sequences_that_share_blocks(
    level: LevelBackend, set_threads: Callable[[int], None], case: str
) -> None:
    # The kernel reads the blocks of a common prefix once for all rows that share them.
    dtype = torch.bfloat16 if case not in ("float32", "float16") else getattr(torch, case)
    shape = Shape(
        dtype=dtype,
        cache_dtype=torch.int8 if case == "int8" else None,
        block_size=24 if case == "blocks" else 16,
        head_dim=40 if case == "blocks" else 64,
        soft_cap=4.0 if case == "options" else 0.0,
        has_alibi=case == "options",
        has_sinks=case == "options",
    )
    # Rows of one token, of a verify step and of prompts. Contexts end within a shared partition, at
    # its end and after it.
    lengths = [
        (1, 900),
        (1, 256),
        (3, 800),
        (1, 512),
        (50, 700),
        (1, 513),
        (1, 1100),
        (1, 40),
        (2, 770),
    ]
    lengths += [(1, 600)] * 40
    step = make_step(lengths, shape)
    table = step.metadata.block_table
    size = shape.block_size
    for rows, tokens in [
        (range(len(lengths)), 272),
        ([0, 2, 6, 8], 760),
        ([3, 5], 511),
        (range(9, 49), 530),
    ]:
        for row in rows:
            count = min(tokens, lengths[row][1] - lengths[row][0]) // size
            table[row, :count] = table[rows[0], :count]
    out, _, _ = run(level, step, shape)
    assert out.isfinite().all()
    set_threads(2)
    assert torch.equal(run(level, step, shape)[0], out)
    set_threads(1)
    for row in (*range(10), 48):
        begin, end = step.metadata.query_start_loc[row : row + 2].tolist()
        alone, _, _ = run(level, part_of(step, row), shape)
        assert torch.equal(alone, out[begin:end])


@pytest.mark.parametrize(
    ("level", "dtype", "chunks", "extras"),
    all_combinations(
        LEVELS,
        DTYPES,
        ([1] * 5 + [495], [499, 1], [33, 167, 3, 297], [128, 372]),
        ({}, {"sliding_window": 70}, {"has_alibi": True, "has_sinks": True}),
        rare=SLOW_LEVELS,
    ),
    indirect=["level"],
    ids=str,
)
def test_whole_prefill_and_chunks_of_it(
    level: LevelBackend, dtype: torch.dtype, chunks: list[int], extras: dict[str, Any]
) -> None:
    shape = Shape(dtype=dtype, head_dim=64, num_heads=6, num_kv_heads=2, **extras)
    check_chunks(level, make_step([(500, 500)], shape), chunks, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["plain", "int8"])
def test_chunks_that_end_between_runs_of_tokens_that_see_each_other(
    level: LevelBackend, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    shape = Shape(
        dtype=dtype, cache_dtype=cache_dtype, head_dim=64, sliding_window=90, run_tokens=25
    )
    check_chunks(level, make_step([(500, 500)], shape), [75, 25, 150, 250], shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_batches_over_a_cache_of_eight_bits(
    level: LevelBackend, dtype: torch.dtype
) -> None:
    shape = Shape(dtype=dtype, head_dim=64, num_heads=6, cache_dtype=torch.int8)
    check_chunks(level, make_step([(500, 500)], shape), [33, 1, 166, 3, 296, 1], shape)
    step = make_step(MIXED, shape)
    out, _, _ = run(level, step, shape)
    for row in range(len(MIXED)):
        begin, end = step.metadata.query_start_loc[row : row + 2].tolist()
        alone, _, _ = run(level, part_of(step, row), shape)
        assert torch.equal(alone, out[begin:end])


@pytest.mark.parametrize(
    ("level", "window", "exponent", "cache_dtype"),
    all_combinations(
        LEVELS, (0, 70, -70), (-120, -126, -130), (None, torch.int8), rare=SLOW_LEVELS
    ),
    indirect=["level"],
)
def test_sums_that_become_subnormal_in_a_whole_prefill_and_in_chunks(
    level: LevelBackend, exponent: int, window: int, cache_dtype: torch.dtype | None
) -> None:
    """Matrix tiles replace subnormal sums by zeros. Whether they do may depend only on a row's own
    tokens, although other rows of the tile may see more keys.
    """
    shape = Shape(
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        head_dim=64,
        num_heads=6,
        num_kv_heads=2,
        sliding_window=window,
    )
    step = make_step([(500, 500)], shape)
    step = step._replace(v=step.v * 2.0**exponent)
    assert int((step.v != 0).sum()) > 0
    check_chunks(level, step, [33, 1, 166, 3, 296, 1], shape)


def check_chunks(level: LevelBackend, step: Step, chunks: list[int], shape: Shape) -> None:
    """Checks that a prompt of one sequence has the same bits in one step and in chunks."""
    whole, k_whole, v_whole = run(level, step, shape)
    k_cache, v_cache = step.k_cache, step.v_cache
    ends = step.metadata.visible_ends
    done = 0
    for size in chunks:
        span = slice(done, done + size)
        done += size
        metadata = step.metadata._replace(
            query_start_loc=torch.tensor([0, size], dtype=torch.int32),
            seq_lens=torch.tensor([done], dtype=torch.int32),
            slot_mapping=step.metadata.slot_mapping[span],
            visible_ends=None if ends is None else ends[span],
        )
        part = Step(step.q[span], step.k[span], step.v[span], k_cache, v_cache, metadata, size)
        out, k_cache, v_cache = run(level, part, shape)
        assert torch.equal(out, whole[span])
    assert torch.equal(known(k_cache), known(k_whole))
    assert torch.equal(known(v_cache), known(v_whole))


@pytest.mark.parametrize(
    ("level", "dtype", "extras"),
    all_combinations(
        LEVELS,
        DTYPES,
        ({}, {"soft_cap": 4.0}, {"has_alibi": True, "has_sinks": True}),
        rare=SLOW_LEVELS,
    ),
    indirect=["level"],
    ids=str,
)
@pytest.mark.parametrize("side", ["q", "k"])
def test_nan_stays_nan_in_the_rows_that_see_it(
    level: LevelBackend, dtype: torch.dtype, extras: dict[str, Any], side: str
) -> None:
    """A query or a key that is not a number, in decode steps and within prompts."""
    shape = Shape(dtype=dtype, head_dim=64, **extras)
    step = make_step(MIXED, shape)
    expected, _, _ = run(level, step, shape)
    group = shape.num_heads // shape.num_kv_heads
    has_nan = torch.zeros(expected.shape[:2], dtype=torch.bool)
    changed = getattr(step, side).clone()
    for begin, end in pairwise(step.metadata.query_start_loc.tolist()):
        token = (begin + end) // 2
        changed[token, 1, 5] = float("nan")
        if side == "q":
            has_nan[token, 1] = True
        else:
            has_nan[token:end, group : 2 * group] = True
    out, _, _ = run(level, step._replace(**{side: changed}), shape)
    assert torch.equal(out.isnan().all(2), has_nan)
    assert torch.equal(out[~has_nan], expected[~has_nan])
