"""The Triton kernels of `ostinato::add_adapters` on CUDA.

`shrink_kernel` multiplies rows by A of their adapters, and `expand_kernel` multiplies the results
by B and adds them to y. A program has a block of rows. It takes the adapters of its rows one after
the other, and multiplies all its rows by each. So a block costs as much as it has adapters, and a
launch does not depend on which adapters a step has: a captured graph serves all steps.

`shrink_kernel` divides K among programs, because a step of few rows has too few blocks to fill a
GPU. `expand_kernel` adds the sums of the parts in ascending order. So results are the same in every
run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.adapters.add_adapters import PANEL

__all__ = (
    "add_adapters_on_cuda",
    "expand_constants",
    "expand_kernel",
    "shrink_constants",
    "shrink_kernel",
)

_ROWS = 16  # rows of a program; the least that matrix units take
_MOST_RANKS = 64  # ranks of a program of `shrink_kernel`
# Ranks that `expand_kernel` multiplies at once. The registers have no room for more.
_ADDED_RANKS = 16
_MOST_PARTS = 16  # parts of K
_PART = 256  # the least columns in a part


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x,  # [T, K]
    slots,  # [T, 1] int32
    a,  # [L, OUTPUTS, R, K]
    ranks,  # [L, OUTPUTS] int32
    scales,  # [L, OUTPUTS] float32
    hidden,  # [PARTS, T, OUTPUTS, R] float32
    num_rows,
    x_stride,
    K: tl.constexpr,
    R: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PART: tl.constexpr,  # columns of a part
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for a block of rows, a projection and a block of ranks, and a part of K."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) % OUTPUTS
    first_rank = tl.program_id(1) // OUTPUTS * BLOCK_R
    part = tl.program_id(2)
    rank = first_rank + tl.arange(0, BLOCK_R)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    result = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    waiting = slot
    current = tl.cast(tl.max(waiting, 0), tl.int64)
    while current >= 0:
        place = current * OUTPUTS + output
        num_ranks = tl.load(ranks + place)
        if first_rank < num_ranks:
            matrix = a + place * R * K
            total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for first in range(part * PART, min((part + 1) * PART, K), BLOCK_K):
                k = first + tl.arange(0, BLOCK_K)
                inside = k < min((part + 1) * PART, K)
                values = tl.load(
                    x + rows[:, None].to(tl.int64) * x_stride + k[None, :],
                    mask=(slot == current)[:, None] & inside[None, :],
                    other=0.0,
                )
                weights = tl.load(
                    matrix + rank[None, :].to(tl.int64) * K + k[:, None],
                    mask=(rank < num_ranks)[None, :] & inside[:, None],
                    other=0.0,
                )
                total = tl.dot(values, weights, total, input_precision="ieee")
            total *= tl.load(scales + place)
            result = tl.where((slot == current)[:, None], total, result)
        waiting = tl.where(waiting == current, -1, waiting)
        current = tl.cast(tl.max(waiting, 0), tl.int64)
    to = ((part * num_rows + rows[:, None]).to(tl.int64) * OUTPUTS + output) * R + rank[None, :]
    tl.store(hidden + to, result, mask=(slot >= 0)[:, None] & (rank < R)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    y,  # [T, N]
    slots,  # [T, 1] int32
    b,  # [L, ceil(N / BLOCK_N), R, BLOCK_N]
    ranks,  # [L, OUTPUTS] int32
    bounds,  # [OUTPUTS + 1] int32
    hidden,  # [PARTS, T, OUTPUTS, R] float32
    num_rows,
    y_stride,
    N: tl.constexpr,
    R: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program for a block of rows and a block of columns."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    added = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    waiting = slot
    current = tl.cast(tl.max(waiting, 0), tl.int64)
    while current >= 0:
        is_own = slot == current
        for output in range(OUTPUTS):
            begin, end = tl.load(bounds + output), tl.load(bounds + output + 1)
            num_ranks = tl.load(ranks + current * OUTPUTS + output)
            mine = (columns >= begin) & (columns < end)
            if tl.max(mine.to(tl.int32), 0) == 0:
                num_ranks = 0
            for first_rank in range(0, num_ranks, BLOCK_R):
                rank = first_rank + tl.arange(0, BLOCK_R)
                inside = rank < num_ranks
                numbers = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for part in range(PARTS):
                    row = (part * num_rows + rows[:, None]).to(tl.int64)
                    numbers += tl.load(
                        hidden + (row * OUTPUTS + output) * R + rank[None, :],
                        mask=is_own[:, None] & inside[None, :],
                        other=0.0,
                    )
                panel = current * tl.cdiv(N, BLOCK_N) + tl.program_id(1)
                weights = tl.load(
                    b + (panel * R + rank[:, None]) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :],
                    mask=inside[:, None] & mine[None, :],
                    other=0.0,
                )
                added = tl.dot(numbers, weights.to(tl.float32), added, input_precision="ieee")
        waiting = tl.where(waiting == current, -1, waiting)
        current = tl.cast(tl.max(waiting, 0), tl.int64)
    place = y + rows[:, None].to(tl.int64) * y_stride + columns[None, :]
    is_changed = (slot >= 0)[:, None] & (columns < N)[None, :]
    values = tl.load(place, mask=is_changed, other=0.0).to(tl.float32) + added
    tl.store(place, values.to(y.dtype.element_ty), mask=is_changed)


def shrink_constants(in_features: int, max_rank: int, outputs: int) -> dict[str, Any]:
    """The constants of `shrink_kernel`."""
    parts = max(1, min(_MOST_PARTS, in_features // _PART))
    block_k = 64
    part = -(-in_features // parts)
    return {
        "K": in_features,
        "R": max_rank,
        "OUTPUTS": outputs,
        "PART": -(-part // block_k) * block_k,
        "BLOCK_T": _ROWS,
        "BLOCK_R": max(16, min(_MOST_RANKS, triton.next_power_of_2(max_rank))),
        "BLOCK_K": block_k,
        "num_warps": 4,
    }


def expand_constants(
    out_features: int, in_features: int, max_rank: int, outputs: int
) -> dict[str, Any]:
    """The constants of `expand_kernel`."""
    return {
        "N": out_features,
        "R": max_rank,
        "OUTPUTS": outputs,
        "PARTS": _num_parts(in_features, max_rank, outputs),
        "BLOCK_T": _ROWS,
        "BLOCK_R": _ADDED_RANKS,
        "BLOCK_N": PANEL,
        "num_warps": 4,
        "num_stages": 1,
    }


def add_adapters_on_cuda(
    y: Tensor,
    x: Tensor,
    slots: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    bounds: Tensor,
) -> None:
    """`add_adapters` (add_adapters.py) by two launches."""
    num_rows, in_features = x.shape
    _, outputs, max_rank, _ = a.shape
    out_features = y.shape[1]
    shrink = shrink_constants(in_features, max_rank, outputs)
    expand = expand_constants(out_features, in_features, max_rank, outputs)
    parts = expand["PARTS"]
    hidden = torch.empty((parts, num_rows, outputs, max_rank), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(num_rows, _ROWS)
    shrink_kernel[(blocks, outputs * triton.cdiv(max_rank, shrink["BLOCK_R"]), parts)](
        x, slots, a, ranks, scales, hidden, num_rows, x.stride(0), **shrink
    )
    expand_kernel[(blocks, triton.cdiv(out_features, expand["BLOCK_N"]))](
        y, slots, b, ranks, bounds, hidden, num_rows, y.stride(0), **expand
    )


def _num_parts(in_features: int, max_rank: int, outputs: int) -> int:
    return -(-in_features // shrink_constants(in_features, max_rank, outputs)["PART"])
