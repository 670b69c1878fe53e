"""Random inputs of `cross_attention`, and its result in float64 from unpaged keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ("CrossProblem", "check_cross", "cross_problem")

BLOCK_SIZE = 16
HEAD_DIM = 32
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class CrossProblem(NamedTuple):
    q: Tensor  # [T, Hq, D]
    k: Tensor  # [N, Hkv, D], the keys of all windows, one after the other
    v: Tensor
    slots: Tensor  # [N] int64
    windows: list[int]  # [T], the window that each row reads
    lengths: list[int]  # keys of each window
    seq_lens: Tensor  # [T] int32
    block_table: Tensor  # [T, E] int32
    cache_shape: tuple[int, int, int, int]
    cache_dtype: torch.dtype
    scale: float


def cross_problem(
    *,
    num_rows: int,
    lengths: Sequence[int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    seed: int = 0,
) -> CrossProblem:
    """Windows of these lengths in random blocks, and rows that read random windows."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv = heads
    blocks_of = [-(-length // BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(blocks_of), generator=generator).add(1).split(blocks_of)
    table = torch.zeros(len(lengths), max(blocks_of), dtype=torch.int32)
    slots: list[Tensor] = []
    for window, (length, blocks) in enumerate(zip(lengths, order, strict=True)):
        table[window, : len(blocks)] = blocks
        places = torch.arange(length)
        slots.append(blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE)
    rows = torch.randint(len(lengths), (num_rows,), generator=generator)
    # Queries are cut out of a wider matrix, as in a model that projects more than queries.
    q = torch.randn(num_rows, num_heads + 2, HEAD_DIM, generator=generator).to(dtype)[:, 1:-1]
    k, v = torch.randn(2, sum(lengths), num_kv, HEAD_DIM, generator=generator).to(dtype)
    size = HEAD_DIM + (4 if cache_dtype is torch.int8 else 0)
    return CrossProblem(
        q,
        k,
        v,
        torch.cat(slots),
        rows.tolist(),
        list(lengths),
        torch.tensor(lengths, dtype=torch.int32)[rows],
        table[rows],
        (1 + sum(blocks_of), num_kv, BLOCK_SIZE, size),
        cache_dtype,
        HEAD_DIM**-0.5,
    )


def expected(problem: CrossProblem) -> Tensor:
    starts = [sum(problem.lengths[:index]) for index in range(len(problem.lengths) + 1)]
    group = problem.q.shape[1] // problem.k.shape[1]
    out = []
    for row, window in enumerate(problem.windows):
        part = slice(starts[window], starts[window + 1])
        keys, values = (x[part].double().repeat_interleave(group, 1) for x in problem[1:3])
        logits = torch.einsum("hd,khd->hk", problem.q[row].double(), keys) * problem.scale
        out.append(torch.einsum("hk,khd->hd", logits.softmax(-1), values))
    return torch.stack(out)


def attend(run: Callable[..., Tensor], write: Callable[..., None], problem: CrossProblem) -> Tensor:
    """Write the keys and values, then attend."""
    k_cache, v_cache = (
        torch.zeros(problem.cache_shape, dtype=problem.cache_dtype) for _ in range(2)
    )
    write(problem.k, problem.v, k_cache, v_cache, problem.slots)
    before = k_cache.clone(), v_cache.clone()
    out = run(problem.q, k_cache, v_cache, problem.seq_lens, problem.block_table, problem.scale)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
    return out


def check_cross(
    run: Callable[..., Tensor], write: Callable[..., None], problem: CrossProblem
) -> None:
    out = attend(run, write, problem)
    assert out.dtype is problem.q.dtype
    assert out.is_contiguous()
    error = 3e-2 if problem.cache_dtype is torch.int8 else TOLERANCES[out.dtype]
    torch.testing.assert_close(out.double(), expected(problem), atol=error, rtol=error)
