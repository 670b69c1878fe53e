"""The Triton kernels of recurrent layers against the references, under Triton's interpreter.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.models.config.recurrent_spec import DeltaSpec, RecurrentSpec, StateSpaceSpec
from ostinato.models.sharding import WHOLE
from ostinato.ops.recurrent import triton_convolution
from ostinato.ops.recurrent.triton_delta_rule import delta_rule_on_cuda
from ostinato.ops.recurrent.triton_short_conv import short_conv_on_cuda
from ostinato.ops.recurrent.triton_state_space import state_space_on_cuda
from tests.live_bytes import LiveBytes
from tests.ops.recurrent.recurrent_problems import (
    MIXED,
    NUM_ROWS,
    NUM_SLOTS,
    Op,
    Problem,
    SequenceStep,
    check,
    check_chunks,
    delta_rule,
    short_conv,
    state_space,
)

SLOW = pytest.mark.slow
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
INFINITY = float("inf")
CHUNKS = (1, 5, 2, 9)
STATES = ("conv_state", "state")


def delta_problem(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> Problem:
    """Sizes: heads of keys, heads of values, their sizes, and the width of the convolution."""
    heads, dims, width = sizes[:2], sizes[2:4], sizes[4]
    return delta_rule(NUM_ROWS, NUM_SLOTS, heads=heads, dims=dims, width=width, dtype=dtype)


def conv_problem(channels: int, width: int, has_bias: bool, dtype: torch.dtype) -> Problem:
    sizes = {"channels": channels, "width": width}
    return short_conv(NUM_ROWS, NUM_SLOTS, **sizes, has_bias=has_bias, dtype=dtype)


def space_problem(
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    has_bias: bool = True,
    limits: tuple[float, float] = (0.0, INFINITY),
) -> Problem:
    """Sizes: heads, groups, the size of a head, of a state, and the width of the convolution."""
    heads, dims, width = sizes[:2], sizes[2:4], sizes[4]
    return state_space(
        NUM_ROWS,
        NUM_SLOTS,
        heads=heads,
        dims=dims,
        width=width,
        has_bias=has_bias,
        limits=limits,
        dtype=dtype,
    )


def tolerance(dtype: torch.dtype) -> float:
    """A result is rounded once; the interpreter truncates to bfloat16."""
    return max(2e-5, torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 2, 16, 16, 4), FLOAT32),
        ((2, 2, 12, 20, 4), BFLOAT16),  # the state has two blocks of columns
        ((1, 3, 24, 5, 2), FLOAT16),
        pytest.param((2, 4, 20, 70, 3), FLOAT32, marks=SLOW),
        pytest.param((1, 2, 128, 128, 4), BFLOAT16, marks=SLOW),
    ],
)
def test_delta_rule(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check(delta_problem(sizes, dtype), delta_rule_on_cuda, tolerance(dtype))


@pytest.mark.parametrize(
    ("channels", "width", "bias", "dtype"),
    [
        (24, 3, False, FLOAT16),
        (130, 4, True, FLOAT32),
        (5, 1, True, FLOAT16),
        (7, 20, False, FLOAT32),
    ],
)
def test_short_conv(channels: int, width: int, bias: bool, dtype: torch.dtype) -> None:
    check(conv_problem(channels, width, bias, dtype), short_conv_on_cuda, tolerance(dtype))


@pytest.mark.parametrize(
    ("sizes", "dtype", "bias", "limits"),
    [
        ((2, 1, 8, 16, 4), FLOAT32, True, (0.0, INFINITY)),
        ((4, 2, 12, 12, 4), BFLOAT16, False, (0.0, INFINITY)),  # two blocks of rows
        ((3, 3, 5, 7, 2), FLOAT16, True, (0.3, 1.1)),
        pytest.param((4, 2, 24, 40, 3), FLOAT32, True, (0.0, INFINITY), marks=SLOW),
        pytest.param((2, 1, 64, 128, 4), BFLOAT16, True, (0.0, INFINITY), marks=SLOW),
    ],
)
def test_state_space(
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    bias: bool,
    limits: tuple[float, float],
) -> None:
    check(space_problem(sizes, dtype, bias, limits), state_space_on_cuda, tolerance(dtype))


def test_chunks_have_the_bits_of_the_whole() -> None:
    check_chunks(delta_problem((1, 2, 12, 8, 4), BFLOAT16), delta_rule_on_cuda, CHUNKS)
    check_chunks(conv_problem(24, 3, True, BFLOAT16), short_conv_on_cuda, CHUNKS)
    check_chunks(space_problem((2, 1, 8, 12, 4), BFLOAT16), state_space_on_cuda, CHUNKS)


def test_more_sequences_than_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of later tiles count the tiles of two sequences at once."""
    monkeypatch.setattr(triton_convolution, "_BLOCK_S", 2)
    check(conv_problem(5, 3, False, FLOAT32), short_conv_on_cuda, tolerance(FLOAT32))


@pytest.mark.parametrize("first", [0, 1])
def test_a_step_of_decodes(first: int) -> None:
    """Also a bucket with fewer sequences than rows: three rows of padding belong to none."""
    sequences = [SequenceStep(1, slot if first else 0, slot) for slot in range(1, 10)]
    problem = delta_problem((1, 1, 4, 4, 4), FLOAT32)
    check(problem, delta_rule_on_cuda, tolerance(FLOAT32), sequences)


def test_steps_with_padding_only_and_without_rows() -> None:
    absent = [SequenceStep(0, 0, 0)] * 2
    for op, problem in (
        (delta_rule_on_cuda, delta_problem((1, 1, 4, 4, 4), FLOAT32)),
        (short_conv_on_cuda, conv_problem(4, 3, False, FLOAT32)),
        (state_space_on_cuda, space_problem((1, 1, 4, 4, 4), FLOAT32)),
    ):
        for padding in (0, 20):
            found = problem.step(absent, slice(0, padding)).run(op)
            assert len(found.out) == padding
            assert (found.out == 0).all()
            assert found.equals(replace(found, **{name: problem[name] for name in STATES}))


DELTA = DeltaSpec(layers=(True,), num_k_heads=1, num_v_heads=2, k_dim=12, v_dim=8, conv_width=4)
SPACE = StateSpaceSpec(
    layers=(True,),
    num_heads=2,
    head_dim=8,
    state_size=12,
    num_groups=1,
    conv_width=4,
    has_conv_bias=True,
    has_bias=False,
    step_limits=(0.0, INFINITY),
    norm_eps=1e-5,
)


@pytest.mark.parametrize(
    ("op", "problem", "spec"),
    [
        (delta_rule_on_cuda, delta_problem((1, 2, 12, 8, 4), BFLOAT16), DELTA),
        (state_space_on_cuda, space_problem((2, 1, 8, 12, 4), BFLOAT16), SPACE),
    ],
)
def test_the_memory_plan_counts_what_is_between_kernels(
    op: Op, problem: Problem, spec: RecurrentSpec
) -> None:
    num_tokens = sum(each.tokens for each in MIXED)
    step = problem.step(MIXED, slice(0, num_tokens))
    arguments = [step.arguments[name] for name in step.names]
    with LiveBytes() as live:
        op(*arguments)
    projected = sum(2 * step[name].shape[1] for name in step.per_row)
    assert live.peak == num_tokens * (spec.step_bytes(2, WHOLE, is_cpu=False) - projected)


def test_small_steps_keep_their_relative_size() -> None:
    """softplus of a very negative number is about its exponential, not 0."""
    problem = space_problem((2, 1, 8, 8, 4), FLOAT32)
    small = problem.having(dt_bias=problem["dt_bias"] - 14)
    step = small.step([SequenceStep(4, 0, 1)], slice(0, 4))
    found, expected = step.run(state_space_on_cuda), step.run()
    torch.testing.assert_close(found.state[1], expected.state[1], atol=0.0, rtol=1e-4)


def test_strides_are_checked() -> None:
    problem = conv_problem(4, 3, False, FLOAT32).step(MIXED)
    for name, text in (("bcx", "the rows of bcx"), ("conv_weight", "conv_weight")):
        turned = problem.having(**{name: problem[name].T.contiguous().T})
        with pytest.raises(ValueError, match=f"gated_short_conv: {text} must be contiguous"):
            turned.run(short_conv_on_cuda)
