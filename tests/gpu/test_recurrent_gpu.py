"""The kernels of recurrent layers on a device: results, bits of chunks, captured replays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from ostinato.ops.recurrent.delta_rule import gated_delta_rule
from ostinato.ops.recurrent.short_conv import gated_short_conv
from ostinato.ops.recurrent.state_space import state_space as state_space_op
from tests.ops.recurrent.recurrent_problems import (
    DECODES,
    MIXED,
    NUM_ROWS,
    NUM_SLOTS,
    Problem,
    SequenceStep,
    check,
    check_chunks,
    delta_rule,
    short_conv,
    state_space,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
RUN = {
    "gated_delta_rule": gated_delta_rule,
    "gated_short_conv": gated_short_conv,
    "state_space": state_space_op,
}
INFINITY = float("inf")
# The sizes of Qwen3.5-4B, LFM2-1.2B and Granite-4-tiny, and sizes that are no powers of two. Rows
# of models are aligned.
SIZES = {
    "qwen3.5-4b": partial(delta_rule, heads=(16, 32), dims=(128, 128), gap=8),
    "delta": partial(delta_rule, heads=(2, 6), dims=(40, 72), width=3),
    "lfm2-1.2b": partial(short_conv, channels=2048, gap=8),
    "short-conv": partial(short_conv, channels=200, width=5, has_bias=True),
    "granite-4-tiny": partial(
        state_space, heads=(48, 1), dims=(64, 128), limits=(0.0, INFINITY), gap=8
    ),
    "state-space": partial(
        state_space, heads=(6, 3), dims=(20, 24), has_bias=False, limits=(0.1, 2.0)
    ),
}
EACH = pytest.mark.parametrize("sizes", SIZES)


def problem_of(sizes: str, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return SIZES[sizes](NUM_ROWS, NUM_SLOTS, dtype=dtype, seed=1).to(CUDA)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_are_those_of_the_reference(sizes: str, dtype: torch.dtype) -> None:
    problem = problem_of(sizes, dtype)
    check(problem, RUN[problem.op], max(2e-4, torch.finfo(dtype).eps))


@EACH
def test_chunks_have_the_bits_of_the_whole(sizes: str) -> None:
    problem = problem_of(sizes)
    check_chunks(problem, RUN[problem.op], (17, 1, 3, 31, 1))


@EACH
def test_a_second_run_has_the_same_bits(sizes: str) -> None:
    """States are read and written in place by programs that run at the same time."""
    problem = problem_of(sizes)
    step = problem.step(MIXED, slice(0, sum(each.tokens for each in MIXED)))
    expected = step.run(RUN[problem.op])
    for _ in range(20):
        assert step.run(RUN[problem.op]).equals(expected)


@EACH
def test_a_captured_call_follows_the_sequences(sizes: str) -> None:
    """Launches depend on shapes alone, so a replay serves steps of other lengths and slots."""
    problem = problem_of(sizes)
    static = problem.step(DECODES)
    static = static.having(**{name: static[name].clone() for name in ("conv_state", "state")})

    def call() -> Tensor:
        return RUN[problem.op](*(static.arguments[name] for name in static.names))

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    absent = [SequenceStep(0, 0, 0)] * (len(MIXED) - 1)
    for sequences in (MIXED, DECODES, [SequenceStep(80, 1, 1, 2, 40), *absent]):
        step = problem.step(sequences)
        for name in ("query_start_loc", "state_slots", "conv_state", "state"):
            static[name].copy_(step[name])
        result.fill_(torch.nan)
        graph.replay()
        expected = step.run(RUN[problem.op])
        assert torch.equal(result, expected.out)
        assert expected.equals(replace(expected, **{n: static[n] for n in ("conv_state", "state")}))
