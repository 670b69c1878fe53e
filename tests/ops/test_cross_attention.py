"""Cross attention over written caches against unpaged attention, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.attention import load_backend
from ostinato.ops.cross_attention import (
    CrossBackend,
    cross_attention,
    write_cross_cache,
)
from tests.ops.cross_problems import attend, check_cross, cross_problem
from tests.ops.kernel_checks import EACH_LEVEL, name_of, ops_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def functions_of(level: str) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Attending and writing, of one instruction set or of the reference."""
    if level == "reference":
        run = partial(_reference, cross_attention)
        return run, partial(write_cross_cache, backend="reference")
    ops = ops_of("core", level, attend="cross_attention", write="paged_attention")

    def run_level(*arguments: Tensor) -> Tensor:
        return ops.attend(*arguments, "cpu")

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        none = torch.zeros(1, dtype=torch.int32)
        starts, plan = torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
        more = (1.0, 0, 0.0, None, None, "cpu")
        ops.write(k, k, v, k_cache, v_cache, starts, none, none[None], slots, plan, None, *more)

    return run_level, write


def _reference(op: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    *tensors, scale = arguments
    return op(*tensors, scale=scale, backend="reference")


@pytest.mark.parametrize("level", ["reference", *EACH_LEVEL])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_each_row_sees_its_window_and_no_other(level: str, dtype: torch.dtype) -> None:
    run, write = functions_of(level)

    @given(
        st.integers(1, 9),
        st.lists(st.integers(1, 700), min_size=1, max_size=4),
        st.sampled_from([(1, 1), (4, 4), (6, 2)]),
        st.booleans(),
        st.integers(0, 99),
    )
    @settings(max_examples=15, deadline=None)
    def check(
        num_rows: int, lengths: list[int], heads: tuple[int, int], in_bytes: bool, seed: int
    ) -> None:
        problem = cross_problem(
            num_rows=num_rows,
            lengths=lengths,
            heads=heads,
            dtype=dtype,
            cache_dtype=torch.int8 if in_bytes else dtype,
            seed=seed,
        )
        check_cross(run, write, problem)

    check()


@pytest.mark.parametrize("level", EACH_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_bits_of_a_row_depend_on_its_window_alone(level: str, dtype: torch.dtype) -> None:
    """A row has the same bits with other rows of its window, with other windows, and alone."""
    run, write = functions_of(level)
    problem = cross_problem(
        num_rows=12, lengths=[700, 300], heads=(4, 2), dtype=dtype, cache_dtype=dtype
    )
    together = attend(run, write, problem)
    before = torch.get_num_threads()
    try:
        for row in range(12):
            torch.set_num_threads(1 + row % 2)
            one = slice(row, row + 1)
            alone = problem._replace(
                q=problem.q[one],
                seq_lens=problem.seq_lens[one],
                block_table=problem.block_table[one],
            )
            assert torch.equal(together[one], attend(run, write, alone))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_the_kernel_refuses_blocks_and_lengths_outside_of_the_cache(level: str) -> None:
    run, write = functions_of(level)
    problem = cross_problem(
        num_rows=2, lengths=[40], heads=(2, 2), dtype=torch.float32, cache_dtype=torch.float32
    )
    bad_table = problem.block_table.clone()
    bad_table[1, 2] = 99
    cases = {
        r"block_table\[1, 2\] = 99 is outside": problem._replace(block_table=bad_table),
        r"seq_lens\[0\] = 0 must be in": problem._replace(seq_lens=problem.seq_lens * 0),
        r"seq_lens\[0\] = 80 must be in": problem._replace(seq_lens=problem.seq_lens * 2),
        "must have one dtype": problem._replace(q=problem.q.half()),
    }
    for text, case in cases.items():
        with pytest.raises(ValueError, match=text):
            attend(run, write, case)


def test_backends_say_whether_they_attend_across() -> None:
    for name in ("cpu", "reference", "triton", "flashinfer"):
        assert isinstance(load_backend(name), CrossBackend) == (name != "flashinfer")
