"""The Triton kernel of an output projection and the router after it, for up to 16 rows.

A program computes some columns of the projection, with the residual. They are the whole result of
these columns, so it also computes their part of the router's logits, and the sums of their squares:

    logits = norm(hidden) @ R.T = ((hidden * norm_weight) @ R.T) / rms(hidden)

The parts are added in ascending order. The last program of each group of `GROUP` column tiles adds
the parts of the group, and the last of these programs adds those of the groups. It divides the
logits by the root mean square, chooses the experts of all tokens and lists their pairs. With one
level of groups, one program would read all parts while the others wait.

With more rows, the parts of all logits would be larger than what one program reads in the time of a
launch. `router_kernel` (triton_expert_kernels.py) routes these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ostinato.ops.fused.early_start import wait_for_previous_kernel
from ostinato.ops.fused.fused_linear import TILE_ROWS
from ostinato.ops.fused.linear_tiles import choose_tile, device_limits
from ostinato.ops.fused.triton_epilogue import is_last_of
from ostinato.ops.fused.triton_expert_kernels import append_pairs, clear_slots
from ostinato.ops.fused.triton_fused_linear import prefetch_rows, weight_tile

__all__ = (
    "OutputRouterLaunch",
    "counters_of_output_router",
    "output_router_kernel",
    "output_router_launch",
)

# Parts that a program reads at once. With 128 experts their values take 128 registers of a thread.
# The stages of the projection let one program run on a multiprocessor anyway, and fewer parts at
# once would need more rounds through memory.
_GROUP = 8
_LEAST_TILE = 32  # columns of the narrowest tile of the projection


class OutputRouterLaunch(NamedTuple):
    """The grid of a launch, the constants of the kernel, and the parts that it stores."""

    grid: tuple[int]
    constants: dict[str, Any]
    num_parts: int


@triton.jit
def _store_rows(hidden, scaled, bias, residual, norm_weight, acc, row, row_ok, column, column_ok,
                residual_stride, D: tl.constexpr):  # fmt: skip
    """Store a tile of the projection plus the residual, as it is and times `norm_weight`.

    Returns the latter [BLOCK_M, BLOCK_N], and [BLOCK_M] sums of the squares of the former.
    """
    inside = row_ok[:, None] & column_ok[None, :]
    if bias is not None:
        acc += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    before = residual + row[:, None] * residual_stride + column[None, :]
    acc += tl.load(before, mask=inside, other=0.0).to(tl.float32)
    result = acc.to(hidden.dtype.element_ty)
    target = row[:, None] * D + column[None, :]
    tl.store(hidden + target, result, mask=inside)
    wide = tl.where(inside, result.to(tl.float32), 0.0)
    norm = tl.load(norm_weight + column, mask=column_ok, other=0.0).to(tl.float32)
    normal = (wide * norm[None, :]).to(result.dtype)
    tl.store(scaled + target, normal, mask=inside)
    return normal, tl.sum(wide * wide, 1)


@triton.jit
def _add_parts(logits, sums, parts, squares, first, end, place, ok, row, row_ok, num_rows,
               NUM_EXPERTS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Add the parts [first, first + GROUP) below `end` to logits and to sums of squares."""
    for step in tl.static_range(GROUP):  # type: ignore[misc] - Triton unrolls it, Python may not
        part = row * 0 + first + step
        is_part, wide_part = part < end, part.to(tl.int64)
        source = parts + wide_part[:, None] * (num_rows * NUM_EXPERTS) + place
        logits += tl.load(source, mask=ok & is_part[:, None], other=0.0)
        sums += tl.load(squares + wide_part * num_rows + row, mask=row_ok & is_part, other=0.0)
    return logits, sums


@triton.jit(do_not_specialize=["num_rows", "eps", "scale"])
def output_router_kernel(
    hidden,  # [T, D] contiguous
    scaled,  # [T, D] contiguous, hidden * norm_weight
    factors,  # [T] float32, 1 / the root mean square of hidden
    routing_weights,  # [T, TOP_K] float32
    members,  # [NUM_EXPERTS, T] int32: the pairs (token * TOP_K + slot) of each expert
    counters,  # int32 zeros: the pairs of each expert, groups that are done, tiles of each group
    slots_done,  # [T, DOWN_TILES] int32, cleared for `down_kernel`
    parts,  # [TILES + groups, T, NUM_EXPERTS] float32, intermediate
    squares,  # [TILES + groups, T] float32, intermediate
    x,  # [T, K]
    weight,  # [D, K] contiguous
    bias,  # [D], or None
    residual,  # [T, D]
    router,  # [NUM_EXPERTS, D] contiguous
    norm_weight,  # [D]
    score_bias,  # [NUM_EXPERTS] float32, or None
    num_rows,  # T
    x_stride,
    residual_stride,
    eps,
    scale,
    D: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUNDS: tl.constexpr,  # logits are rounded to the dtype of x
    DOWN_TILES: tl.constexpr,
    BLOCK_C: tl.constexpr,  # power of two, at least DOWN_TILES
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two, at least NUM_EXPERTS
    BLOCK_S: tl.constexpr,  # power of two, at least TOP_K
    TILES: tl.constexpr,  # programs
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each column tile of the projection."""
    tile = tl.program_id(0)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if EARLY:
        prefetch_rows(weight, column, K, D, BLOCK_K)
    wait_for_previous_kernel(EARLY)
    row = tl.arange(0, BLOCK_M)
    row_ok, column_ok = row < num_rows, column < D
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = x + row[:, None] * x_stride + k[None, :]
        left = tl.load(rows, mask=row_ok[:, None] & (k < K)[None, :], other=0.0)
        right = weight_tile(weight, column, k, K, D, BLOCK_N, BLOCK_K)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    normal, sums = _store_rows(hidden, scaled, bias, residual, norm_weight, acc, row, row_ok,
                               column, column_ok, residual_stride, D)  # fmt: skip
    if tile == 0:
        clear_slots(slots_done, row, row_ok, DOWN_TILES, BLOCK_C, BLOCK_M)

    lane = tl.arange(0, BLOCK_E)
    matrix = tl.load(
        router + lane[:, None] * D + column[None, :],
        mask=(lane < NUM_EXPERTS)[:, None] & column_ok[None, :],
        other=0.0,
    )
    logits = tl.dot(normal, tl.trans(matrix), input_precision="ieee")
    size = num_rows.to(tl.int64) * NUM_EXPERTS
    place = row[:, None] * NUM_EXPERTS + lane[None, :]
    ok = row_ok[:, None] & (lane < NUM_EXPERTS)[None, :]
    tl.store(parts + tile * size + place, logits, mask=ok)
    tl.store(squares + tile * num_rows + row, sums, mask=row_ok)

    groups: tl.constexpr = (TILES + GROUP - 1) // GROUP
    group = tile // GROUP
    first = group * GROUP
    counter = counters + NUM_EXPERTS + 1 + group
    if is_last_of(tl.minimum(GROUP, TILES - first), counter):
        logits = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        sums = tl.zeros([BLOCK_M], tl.float32)
        logits, sums = _add_parts(logits, sums, parts, squares, first, TILES, place, ok, row,
                                  row_ok, num_rows, NUM_EXPERTS, GROUP)  # fmt: skip
        tl.store(parts + (TILES + group) * size + place, logits, mask=ok)
        tl.store(squares + (TILES + group) * num_rows + row, sums, mask=row_ok)
        if is_last_of(groups, counters + NUM_EXPERTS):
            logits = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
            sums = tl.zeros([BLOCK_M], tl.float32)
            for start in range(TILES, TILES + groups, GROUP):
                logits, sums = _add_parts(logits, sums, parts, squares, start, TILES + groups,
                                          place, ok, row, row_ok, num_rows, NUM_EXPERTS,
                                          GROUP)  # fmt: skip
            factor = tl.rsqrt(sums / D + eps)
            tl.store(factors + row, factor, mask=row_ok)
            logits = logits * factor[:, None]
            if ROUNDS:
                logits = logits.to(x.dtype.element_ty).to(tl.float32)
            append_pairs(
                routing_weights, members, counters, logits, score_bias, row, num_rows, scale,
                NUM_EXPERTS, TOP_K, SCORING, RENORMALIZE, BLOCK_M, BLOCK_E, BLOCK_S,
            )  # fmt: skip


def counters_of_output_router(num_experts: int, size: int) -> int:
    """The most counters that a launch for rows of `size` values needs."""
    return num_experts + 1 + triton.cdiv(triton.cdiv(size, _LEAST_TILE), _GROUP)


def output_router_launch(
    size: int,
    in_features: int,
    router: dict[str, Any],
    itemsize: int,
    device: torch.device,
) -> OutputRouterLaunch:
    """The launch of `output_router_kernel`.

    Args:
        size: D, columns of the projection.
        in_features: K.
        router: the constants of `router_kernel`.
        itemsize: bytes of an element of x.
        device: the device of x.
    """
    limits = device_limits(device)
    tile = choose_tile(TILE_ROWS[0], size, in_features, itemsize, is_gated=False, **limits)
    tiles = triton.cdiv(size, tile.block_n)
    constants = router | {
        "D": size,
        "K": in_features,
        "BLOCK_M": tile.block_m,
        "BLOCK_E": max(16, router["BLOCK_E"]),  # columns of a product
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "TILES": tiles,
        "GROUP": _GROUP,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    return OutputRouterLaunch((tiles,), constants, tiles + triton.cdiv(tiles, _GROUP))
