"""The C++ kernels of the recurrent ops against their references, and bits that batches and chunks
leave alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.native.abi import SymbolicSize
from ostinato.ops.native.cpu_graph import CpuGraph
from ostinato.ops.native.instruction_sets import detect_isa
from ostinato.ops.native.library import load
from tests.ops.kernel_checks import EACH_LEVEL, name_of, ops_of
from tests.ops.recurrent.recurrent_problems import (
    OPS,
    Problem,
    Result,
    SequenceStep,
    delta_rule,
    sequence_steps,
    short_conv,
    state_space,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Sizes that are whole vectors on every level, and others.
SIZES: dict[str, list[dict[str, object]]] = {
    "gated_delta_rule": [
        {},
        {"heads": (2, 2), "dims": (128, 128)},
        {"heads": (1, 3), "dims": (20, 33), "width": 2},
        {"heads": (3, 6), "dims": (7, 5), "width": 1},
    ],
    "gated_short_conv": [
        {},
        {"channels": 300, "has_bias": True},
        {"channels": 7, "width": 5},
        {"channels": 130, "width": 1},
    ],
    "state_space": [
        {},
        {"heads": (6, 1), "dims": (64, 128), "has_bias": False},
        {"heads": (3, 3), "dims": (5, 19), "width": 2},
        {"heads": (2, 1), "dims": (70, 256), "width": 1},
    ],
}


def kernel(op: str, isa: str) -> Callable[..., Tensor]:
    return ops_of("recurrent", isa, run=op).run


def assert_close(actual: Result, expected: Result, dtype: torch.dtype) -> None:
    """The inputs that are kept are the same; the rest differs by rounding."""
    assert torch.equal(actual.conv_state[1:], expected.conv_state[1:])
    assert actual.out.is_contiguous()
    rounding = 0.0 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.out, expected.out, atol=2e-4, rtol=1e-4 + rounding)
    torch.testing.assert_close(actual.state[1:], expected.state[1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("op", OPS)
def test_kernels_compute_what_the_references_do(op: str, dtype: torch.dtype, isa: str) -> None:
    run = kernel(op, isa)

    @given(
        step=sequence_steps(),
        size=st.sampled_from(SIZES[op]),
        padding=st.integers(0, 3),
        seed=st.integers(0, 999),
    )
    @settings(max_examples=25, deadline=None)
    def check(
        step: tuple[list[SequenceStep], int], size: dict[str, object], padding: int, seed: int
    ) -> None:
        sequences, num_slots = step
        num_rows = sum(each.tokens for each in sequences) + padding
        problem = OPS[op](num_rows, num_slots, dtype=dtype, seed=seed, **size).step(sequences)
        actual = problem.run(run)
        assert_close(actual, problem.run(), dtype)
        assert not actual.out[num_rows - padding :].any()

    check()


def whole_and_parts(op: str, size: dict[str, object], dtype: torch.dtype) -> tuple[Problem, int]:
    """A step of one sequence that reads slot 1 and writes slot 2, and its number of tokens."""
    tokens = 150
    problem = OPS[op](tokens, 12, dtype=dtype, seed=3, **size)
    return problem.step([SequenceStep(tokens, 1, 2)]), tokens


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    ("op", "size"), [(op, size) for op, sizes in SIZES.items() for size in sizes[:3]]
)
def test_bits_do_not_depend_on_chunks(
    op: str, size: dict[str, object], dtype: torch.dtype, isa: str
) -> None:
    run = kernel(op, isa)
    problem, tokens = whole_and_parts(op, size, dtype)
    whole = problem.run(run)
    for lengths in ([1] * tokens, [64, 65, 21], [3, 1, 145, 1]):
        results: list[Result] = []
        begin, current, read = 0, problem, 1
        for length in lengths:
            rows = torch.arange(begin, begin + length)
            results.append(current.step([SequenceStep(length, read, 2)], rows).run(run))
            current, begin, read = problem.after(results[-1]), begin + length, 2
        out = torch.cat([result.out for result in results])
        assert replace(results[-1], out=out).equals(whole)


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize(("op", "size"), [(op, sizes[0]) for op, sizes in SIZES.items()])
def test_a_checkpoint_is_the_state_of_a_step_that_ends_there(
    op: str, size: dict[str, object], isa: str
) -> None:
    run = kernel(op, isa)
    problem, tokens = whole_and_parts(op, size, torch.bfloat16)
    whole = problem.run(run)
    for after in (1, 2, 64, 149):
        result = problem.step([SequenceStep(tokens, 1, 2, 3, after)]).run(run)
        part = problem.step([SequenceStep(after, 1, 3)], torch.arange(after)).run(run)
        assert torch.equal(result.out, whole.out)
        assert result.keeps(2, whole)
        assert result.keeps(3, part)


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_other_sequences_and_threads(
    op: str, isa: str, set_threads: Callable[[int], None]
) -> None:
    run = kernel(op, isa)
    # With many sequences, the heads of a group are one work item.
    sequences = [SequenceStep(1 + 13 * (index % 3), index % 2, 2 + index) for index in range(24)]
    tokens = sum(each.tokens for each in sequences)
    problem = OPS[op](tokens, 30, dtype=torch.bfloat16, **SIZES[op][1]).step(sequences)
    set_threads(1)
    together = problem.run(run)
    for threads in (2, 3, 16):
        set_threads(threads)
        assert problem.run(run).equals(together)
    begin = 0
    for each in sequences:
        rows = torch.arange(begin, begin + each.tokens)
        alone = problem.step([each], rows).run(run)
        assert torch.equal(alone.out, together.out[rows])
        assert alone.keeps(each.write, together)
        begin += each.tokens


@pytest.mark.parametrize("op", OPS)
def test_a_step_of_padding_writes_nothing(op: str) -> None:
    problem = OPS[op](3, 4).step([SequenceStep(0, 0, 0), SequenceStep(0, 9, 9, 9, 9)])
    result = problem.run(kernel(op, detect_isa()))
    assert not result.out.any()
    assert result.equals(Result(result.out, problem["conv_state"], problem["state"]))


def replayed(problem: Problem) -> Result:
    """The call in a CPU graph. Its states are constants, as the caches of a model are."""
    load("recurrent")
    graph = CpuGraph()
    inputs = (*problem.per_row, "query_start_loc", "state_slots")
    symbols = dict.fromkeys(problem.per_row, SymbolicSize.tokens)
    symbols |= {"query_start_loc": SymbolicSize.seqs_and_one, "state_slots": SymbolicSize.seqs}
    tensors = {name: problem[name].contiguous() for name in inputs}
    # The caches are views, as those of a layer are views of the memory of all layers.
    caches = {
        name: torch.stack((problem[name], problem[name]))[1] for name in ("conv_state", "state")
    }
    slots = {
        name: graph.input(tensor.dtype, (symbols[name], *tensor.shape[1:]))
        for name, tensor in tensors.items()
    }
    constants = {
        name: graph.constant(value) if isinstance(value, Tensor) else value
        for name, value in {**problem.arguments, **caches}.items()
        if name not in inputs
    }
    op = getattr(torch.ops.ostinato, problem.op).default
    [result] = graph.call(op, [{**constants, **slots}[name] for name in problem.names])
    graph.set_result(result)
    addresses = (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors.values()))
    num_rows, num_seqs = len(problem[inputs[0]]), len(problem["state_slots"])
    out = torch.empty_like(problem.run().out)
    graph.replay(num_rows, num_seqs, num_seqs, addresses, out)
    return Result(out, **caches)


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_graph_replays_the_calls(op: str) -> None:
    sequences = [SequenceStep(5, 1, 2, 3, 4), SequenceStep(1, 4, 4), SequenceStep(0, 0, 0)]
    problem = OPS[op](8, 6, dtype=torch.bfloat16).step(sequences)
    assert replayed(problem).equals(problem.run(kernel(op, detect_isa())))


SLOTS = [
    ([SequenceStep(1, 4, 1)], r"state_slots\[0, 0\] = 4 must be in \[0, 4\)"),
    ([SequenceStep(1, 1, 1), SequenceStep(1, 2, -1)], r"state_slots\[1, 1\] = -1 must be"),
    ([SequenceStep(3, 1, 1, 7, 1)], r"state_slots\[0, 2\] = 7 must be"),
    ([SequenceStep(3, 1, 1, 2, 3)], r"state_slots\[0, 3\] = 3 must be in \[1, 3\)"),
    ([SequenceStep(3, 1, 1, 2, 0)], r"state_slots\[0, 3\] = 0 must be in \[1, 3\)"),
    ([SequenceStep(1, 1, 2), SequenceStep(1, 1, 2)], "slot 2 is written twice"),
    ([SequenceStep(2, 1, 2, 2, 1)], "slot 2 is written twice"),
    ([SequenceStep(1, 1, 1), SequenceStep(1, 1, 2)], "slot 1 is read by one sequence and written"),
    ([SequenceStep(5, 1, 1)], r"query_start_loc\[1\] = 5 must be in \[0, 4\]"),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("sequences", "text"), SLOTS)
def test_wrong_slots_are_named(op: str, sequences: list[SequenceStep], text: str) -> None:
    with pytest.raises(ValueError, match=f"{op}: {text}"):
        OPS[op](4, 4).step(sequences).run(kernel(op, detect_isa()))


CHANGES: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("gated_delta_rule", "qkvz", lambda x: x[:, 1:], r"qkvz must be \[T, 320\]"),
    ("gated_delta_rule", "qkvz", lambda x: x.double(), "qkvz must be float32, bfloat16 or"),
    ("gated_delta_rule", "gates", lambda x: x.half(), r"gates must be \[T, 8\]"),
    ("gated_delta_rule", "gates", lambda x: x[1:], "gates has 3 rows and qkvz has 4"),
    ("gated_delta_rule", "conv_weight", lambda x: x[1:], r"conv_weight must be contiguous \[192"),
    ("gated_delta_rule", "conv_weight", lambda x: x.repeat(1, 5), "conv_weight = 20 must be in"),
    ("gated_delta_rule", "a_log", lambda x: x.half(), "a_log must be a contiguous vector of 4"),
    ("gated_delta_rule", "dt_bias", lambda x: x[1:], "dt_bias must be a contiguous vector of 4"),
    ("gated_delta_rule", "norm_weight", lambda x: x.half(), "norm_weight must be"),
    ("gated_delta_rule", "conv_state", lambda x: x[:, 1:], r"conv_state must be \[slots, 3, 192\]"),
    ("gated_delta_rule", "state", lambda x: x[1:], "as many of them as conv_state"),
    ("gated_delta_rule", "state", lambda x: x[0], r"state must be \[slots, Hv, K, V\]"),
    ("gated_delta_rule", "state", lambda x: x.transpose(2, 3), "contiguous"),
    ("gated_delta_rule", "query_start_loc", lambda x: x.long(), "query_start_loc must be"),
    ("gated_delta_rule", "query_start_loc", lambda x: x + 1, r"query_start_loc\[0\] = 1 must be 0"),
    ("gated_delta_rule", "state_slots", lambda x: x.long(), "state_slots must be"),
    ("gated_short_conv", "bcx", lambda x: x[:, 1:], r"bcx must be \[T, 192\]"),
    ("gated_short_conv", "conv_state", lambda x: x.half(), "conv_state must be"),
    ("state_space", "projected", lambda x: x[:, 1:], r"projected must be \[T, 132\]"),
    ("state_space", "conv_bias", lambda x: x[1:], "conv_bias must be a contiguous vector of 96"),
    ("state_space", "skip", lambda x: x[1:], "skip must be a contiguous vector of 4 float32"),
    ("state_space", "norm_weight", lambda x: x[1:], "norm_weight must be"),
    ("state_space", "state", lambda x: x.half(), "state must be float32"),
]


@pytest.mark.parametrize(("op", "name", "change", "text"), CHANGES)
def test_wrong_arguments_are_named(
    op: str, name: str, change: Callable[[Tensor], Tensor], text: str
) -> None:
    problem = OPS[op](4, 4).step([SequenceStep(4, 1, 1)])
    with pytest.raises(ValueError, match=text):
        problem.having(**{name: change(problem[name])}).run(kernel(op, detect_isa()))


@pytest.mark.parametrize(
    ("problem", "change", "text"),
    [
        (delta_rule(4, 4), {"num_k_heads": 3}, "num_k_heads = 3 must divide the 4 value heads"),
        (state_space(4, 4), {"num_groups": 0}, "num_groups = 0 must divide the 4 heads"),
        (short_conv(4, 4), {"conv_weight": torch.zeros(64)}, r"conv_weight must be \[C, W\]"),
    ],
    ids=["num_k_heads", "num_groups", "conv_weight"],
)
def test_numbers_that_do_not_fit_are_named(
    problem: Problem, change: dict[str, object], text: str
) -> None:
    changed = problem.step([SequenceStep(4, 1, 1)]).having(**change)
    with pytest.raises(ValueError, match=text):
        changed.run(kernel(problem.op, detect_isa()))


def test_parameters_can_be_float32_beside_inputs_of_two_bytes() -> None:
    for op, make in OPS.items():
        problem = make(4, 4, dtype=torch.bfloat16).step([SequenceStep(4, 1, 1)])
        names = [
            name for name in ("conv_weight", "conv_bias", "norm_weight") if name in problem.names
        ]
        present = [name for name in names if problem.arguments[name] is not None]
        wide = problem.having(**{name: problem[name].float() for name in present})
        run = kernel(op, detect_isa())
        assert wide.run(run).equals(problem.run(run))
