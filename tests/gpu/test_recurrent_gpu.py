"""The kernels of recurrent layers on a device: results, bits of chunks, captured replays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.ops.recurrent.delta_rule import gated_delta_rule, reference_gated_delta_rule
from ostinato.ops.recurrent.short_conv import gated_short_conv, reference_gated_short_conv
from ostinato.ops.recurrent.state_space import reference_state_space, state_space
from tests.ops.recurrent.compared_kernels import (
    MIXED,
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

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
INFINITY = float("inf")
Op = Callable[..., Tensor]
# The sizes of Qwen3.5-4B, LFM2-1.2B and Granite-4-tiny, and sizes that are no powers of two.
SIZES: dict[str, tuple[Op, Op, Callable[[torch.dtype], Problem]]] = {
    "qwen3.5-4b": (
        gated_delta_rule,
        reference_gated_delta_rule,
        lambda dtype: delta_problem(16, 32, 128, 128, 4, dtype),
    ),
    "delta": (
        gated_delta_rule,
        reference_gated_delta_rule,
        lambda dtype: delta_problem(2, 6, 40, 72, 3, dtype),
    ),
    "lfm2-1.2b": (
        gated_short_conv,
        reference_gated_short_conv,
        lambda dtype: short_conv_problem(2048, 3, dtype, bias=False),
    ),
    "short-conv": (
        gated_short_conv,
        reference_gated_short_conv,
        lambda dtype: short_conv_problem(200, 5, dtype, bias=True),
    ),
    "granite-4-tiny": (
        state_space,
        reference_state_space,
        lambda dtype: state_space_problem(48, 64, 1, 128, 4, dtype, bias=True),
    ),
    "state-space": (
        state_space,
        reference_state_space,
        lambda dtype: state_space_problem(6, 20, 3, 24, 4, dtype, bias=False, limits=(0.1, 2.0)),
    ),
}
EACH = pytest.mark.parametrize("sizes", SIZES)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_are_those_of_the_reference(sizes: str, dtype: torch.dtype) -> None:
    op, reference, problem = SIZES[sizes]
    tolerance = max(2e-4, torch.finfo(dtype).eps)
    check(op, reference, problem(dtype).to(CUDA), MIXED, tolerance)


@EACH
def test_chunks_have_the_bits_of_the_whole(sizes: str) -> None:
    op, _, problem = SIZES[sizes]
    check_chunks(op, problem(torch.bfloat16).to(CUDA), (17, 1, 3, 31, 1))


@EACH
def test_a_second_run_has_the_same_bits(sizes: str) -> None:
    """States are read and written in place by programs that run at the same time."""
    op, _, problem = SIZES[sizes]
    made = problem(torch.bfloat16).to(CUDA)
    expected = run(op, made, MIXED)
    for _ in range(20):
        found = run(op, made, MIXED)
        assert torch.equal(found.out, expected.out)
        for one, other in zip(found.states, expected.states, strict=True):
            assert torch.equal(one[1:], other[1:])


@EACH
def test_a_captured_call_follows_the_sequences(sizes: str) -> None:
    """Launches depend on shapes alone, so a replay serves steps of other lengths and slots."""
    op, _, problem = SIZES[sizes]
    made = problem(torch.bfloat16).to(CUDA)
    decodes: list[Row] = [(1, (0, slot, 0, 0)) for slot in range(1, len(MIXED) + 1)]
    starts, slots = (tensor.to(CUDA) for tensor in step_tensors(decodes))
    states = tuple(state.clone() for state in made.states)

    def call() -> Tensor:
        return op(*made.tokens, *made.weights, *states, starts, slots, *made.options)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for rows in (MIXED, decodes, [(80, (1, 1, 2, 40)), *[(0, (0, 0, 0, 0))] * (len(MIXED) - 1)]):
        for target, source in zip((starts, slots), step_tensors(rows), strict=True):
            target.copy_(source)
        for target, source in zip(states, made.states, strict=True):
            target.copy_(source)
        result.fill_(torch.nan)
        graph.replay()
        num_tokens = int(starts[-1])
        expected = run(op, made, rows, padding=len(result) - num_tokens)
        assert torch.equal(result, expected.out)
        for one, other in zip(states, expected.states, strict=True):
            assert torch.equal(one[1:], other[1:])
