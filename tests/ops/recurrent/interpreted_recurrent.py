"""The Triton kernels of recurrent layers against the references, under Triton's interpreter.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from ostinato.models.config.recurrent_spec import DeltaSpec, RecurrentSpec, StateSpaceSpec
from ostinato.models.sharding import WHOLE
from ostinato.ops.recurrent import triton_convolution
from ostinato.ops.recurrent.delta_rule import reference_gated_delta_rule
from ostinato.ops.recurrent.short_conv import reference_gated_short_conv
from ostinato.ops.recurrent.state_space import reference_state_space
from ostinato.ops.recurrent.triton_delta_rule import delta_rule_on_cuda
from ostinato.ops.recurrent.triton_short_conv import short_conv_on_cuda
from ostinato.ops.recurrent.triton_state_space import state_space_on_cuda
from tests.live_bytes import LiveBytes
from tests.ops.recurrent.compared_kernels import (
    MIXED,
    Op,
    Problem,
    Row,
    check,
    check_chunks,
    delta_problem,
    run,
    short_conv_problem,
    state_space_problem,
    step_tensors,
)

SLOW = pytest.mark.slow
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
INFINITY = float("inf")
CHUNKS = (1, 5, 2, 9)


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
    problem = delta_problem(*sizes, dtype)
    check(delta_rule_on_cuda, reference_gated_delta_rule, problem, MIXED, tolerance(dtype))


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
    problem = short_conv_problem(channels, width, dtype, bias=bias)
    check(short_conv_on_cuda, reference_gated_short_conv, problem, MIXED, tolerance(dtype))


@pytest.mark.parametrize(
    ("sizes", "dtype", "bias", "limits"),
    [
        ((2, 8, 1, 16, 4), FLOAT32, True, (0.0, INFINITY)),
        ((4, 12, 2, 12, 4), BFLOAT16, False, (0.0, INFINITY)),  # two blocks of rows
        ((3, 5, 3, 7, 2), FLOAT16, True, (0.3, 1.1)),
        pytest.param((4, 24, 2, 40, 3), FLOAT32, True, (0.0, INFINITY), marks=SLOW),
        pytest.param((2, 64, 1, 128, 4), BFLOAT16, True, (0.0, INFINITY), marks=SLOW),
    ],
)
def test_state_space(
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    bias: bool,
    limits: tuple[float, float],
) -> None:
    problem = state_space_problem(*sizes, dtype, bias=bias, limits=limits)
    check(state_space_on_cuda, reference_state_space, problem, MIXED, tolerance(dtype))


def test_chunks_have_the_bits_of_the_whole() -> None:
    check_chunks(delta_rule_on_cuda, delta_problem(1, 2, 12, 8, 4, BFLOAT16), CHUNKS)
    check_chunks(short_conv_on_cuda, short_conv_problem(24, 3, BFLOAT16, bias=True), CHUNKS)
    problem = state_space_problem(2, 8, 1, 12, 4, BFLOAT16, bias=True)
    check_chunks(state_space_on_cuda, problem, CHUNKS)


def test_more_sequences_than_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of later tiles count the tiles of two sequences at once."""
    monkeypatch.setattr(triton_convolution, "_BLOCK_S", 2)
    problem = short_conv_problem(5, 3, FLOAT32, bias=False)
    check(short_conv_on_cuda, reference_gated_short_conv, problem, MIXED, tolerance(FLOAT32))


@pytest.mark.parametrize("first", [0, 1])
def test_a_step_of_decodes(first: int) -> None:
    """Also a bucket with fewer sequences than rows: three rows of padding belong to none."""
    rows: list[Row] = [(1, (slot if first else 0, slot, 0, 0)) for slot in range(1, 10)]
    problem = delta_problem(1, 1, 4, 4, 4, FLOAT32)
    check(delta_rule_on_cuda, reference_gated_delta_rule, problem, rows, tolerance(FLOAT32))


def test_steps_with_padding_only_and_without_rows() -> None:
    absent: list[Row] = [(0, (0, 0, 0, 0))] * 2
    for op, problem in (
        (delta_rule_on_cuda, delta_problem(1, 1, 4, 4, 4, FLOAT32)),
        (short_conv_on_cuda, short_conv_problem(4, 3, FLOAT32, bias=False)),
        (state_space_on_cuda, state_space_problem(1, 4, 1, 4, 4, FLOAT32, bias=True)),
    ):
        for padding in (0, 20):
            found = run(op, problem, absent, padding=padding)
            assert len(found.out) == padding
            assert (found.out == 0).all()
            for one, before in zip(found.states, problem.states, strict=True):
                assert torch.equal(one.nan_to_num(), before.nan_to_num())


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
        (delta_rule_on_cuda, delta_problem(1, 2, 12, 8, 4, BFLOAT16), DELTA),
        (state_space_on_cuda, state_space_problem(2, 8, 1, 12, 4, BFLOAT16, bias=True), SPACE),
    ],
)
def test_the_memory_plan_counts_what_is_between_kernels(
    op: Op, problem: Problem, spec: RecurrentSpec
) -> None:
    starts, slots = step_tensors(MIXED)
    num_tokens = int(starts[-1])
    tokens = [tensor[:num_tokens] for tensor in problem.tokens]
    with LiveBytes() as live:
        op(*tokens, *problem.weights, *problem.states, starts, slots, *problem.options)
    projected = sum(tensor.shape[1] * 2 for tensor in tokens)
    counted = spec.step_bytes(2, WHOLE, is_cpu=False) - projected
    assert live.peak == num_tokens * counted


def test_small_steps_keep_their_relative_size() -> None:
    """softplus of a very negative number is about its exponential, not 0."""
    problem = state_space_problem(2, 8, 1, 8, 4, FLOAT32, bias=True)
    dt_bias = problem.weights[3]
    assert dt_bias is not None
    weights = (*problem.weights[:3], dt_bias - 14, *problem.weights[4:])
    small = problem._replace(weights=weights)
    found = run(state_space_on_cuda, small, [(4, (0, 1, 0, 0))])
    expected = run(reference_state_space, small, [(4, (0, 1, 0, 0))])
    torch.testing.assert_close(found.states[1][1], expected.states[1][1], atol=0.0, rtol=1e-4)


def test_strides_are_checked() -> None:
    problem = short_conv_problem(4, 3, FLOAT32, bias=False)
    turned = problem.tokens[0].T.contiguous().T
    with pytest.raises(ValueError, match="gated_short_conv: the rows of bcx must be contiguous"):
        run(short_conv_on_cuda, problem._replace(tokens=(turned,)), MIXED)
    weight = problem.weights[0]
    assert weight is not None
    weights = (weight.T.contiguous().T, None)
    with pytest.raises(ValueError, match="gated_short_conv: conv_weight must be contiguous"):
        run(short_conv_on_cuda, problem._replace(weights=weights), MIXED)
