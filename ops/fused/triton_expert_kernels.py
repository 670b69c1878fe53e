"""The Triton kernels of `ostinato::fused_experts`, for small steps.

    1. output projection of the attention, residual (triton_fused_linear.py); more than `most_rows`
       rows are multiplied by cuBLAS, and the next kernel adds the residual
    2. `router_kernel`: norm, logits, choice of experts, pairs of each expert
    3. `gate_up_kernel`: grouped product of gate and up, activation
    4. `down_kernel`: grouped product, weighted sum over the slots of a token, residual

Up to 16 rows have one kernel in place of the first two, `output_router_kernel`
(triton_output_router.py).

A pair is a token and one of its slots. Every expert has a list of its pairs. The order in a list
can differ between launches, which changes no result: a row of a product has the same bits wherever
it lies in a tile.

In two of the kernels (router and down) several programs compute parts of one result. Each program
stores its part, then adds 1 to a counter. The program that is last reads all parts in a fixed order
and writes the result. So the result does not depend on which program is last. A counter is zero
when its kernel begins: an earlier kernel of the layer has cleared it.

Source: the grouped product over sorted tokens of MegaBlocks (Gale et al., arXiv:2211.15841).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.fused.early_start import wait_for_previous_kernel
from ostinato.ops.fused.triton_epilogue import gated, is_last_of
from ostinato.ops.moe.triton_routing import choose_experts

__all__ = ("append_pairs", "clear_slots", "down_kernel", "gate_up_kernel", "router_kernel")


@triton.jit
def _tile(pointers, rows_ok, columns_ok, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile of rows; what lies outside reads as 0."""
    if MASK_COLUMNS:
        tile = tl.load(pointers, mask=rows_ok[:, None] & columns_ok[None, :], other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=rows_ok[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _hidden_tile(x, residual, residual_stride, row, row_ok, k, K: tl.constexpr,
                 MASK_K: tl.constexpr):  # fmt: skip
    """A tile of x plus the residual, in the dtype of x."""
    tile = _tile(x + row * K + k[None, :], row_ok, k < K, True, MASK_K)
    if residual is not None:
        before = residual + row * residual_stride + k[None, :]
        added = _tile(before, row_ok, k < K, True, MASK_K)
        tile = (tile.to(tl.float32) + added.to(tl.float32)).to(tile.dtype)
    return tile


@triton.jit
def _store_normal(normal, hidden, x, residual, residual_stride, norm_weight, factor, row, row_ok,
                  K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Normalise the rows of a row tile, and store this program's share of their columns."""
    for start in range(tl.program_id(1) * BLOCK_K, K, tl.num_programs(1) * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        ok = row_ok[:, None] & (k < K)[None, :]
        tile = _hidden_tile(x, residual, residual_stride, row, row_ok, k, K, True)
        if hidden is not None:
            tl.store(hidden + row * K + k[None, :], tile, mask=ok)
        wide = tile.to(tl.float32)
        scale = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        result = (wide * factor * scale[None, :]).to(normal.dtype.element_ty)
        tl.store(normal + row * K + k[None, :], result, mask=ok)


@triton.jit
def clear_slots(slots_done, row, row_ok, DOWN_TILES: tl.constexpr, BLOCK_C: tl.constexpr,
                BLOCK_M: tl.constexpr):  # fmt: skip
    """Set the counters of `down_kernel` for these rows to zero."""
    done = tl.arange(0, BLOCK_C)
    tl.store(slots_done + row[:, None] * DOWN_TILES + done[None, :],
             tl.zeros([BLOCK_M, BLOCK_C], tl.int32),
             mask=row_ok[:, None] & (done < DOWN_TILES)[None, :])  # fmt: skip


@triton.jit
def append_pairs(routing_weights, members, counts, values, score_bias, row, num_rows, scale,
                 NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
                 RENORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
                 BLOCK_S: tl.constexpr):  # fmt: skip
    """Choose the experts of a row tile, and append its pairs to the lists of these experts.

    `values` are [BLOCK_M, BLOCK_E] float32 logits; those beyond the experts are not read.
    """
    lane = tl.arange(0, BLOCK_E)[None, :]
    values = tl.where(lane < NUM_EXPERTS, values, float("-inf"))
    chosen, taken = choose_experts(
        values, score_bias, scale, NUM_EXPERTS, TOP_K, SCORING, RENORMALIZE, BLOCK_M, BLOCK_E,
        BLOCK_S,
    )  # fmt: skip
    slot = tl.arange(0, BLOCK_S)[None, :]
    ok = (row < num_rows)[:, None] & (slot < TOP_K)
    pair = row[:, None] * TOP_K + slot
    tl.store(routing_weights + pair, taken, mask=ok)
    index = tl.atomic_add(counts + chosen, 1, mask=ok, sem="relaxed")
    tl.store(members + chosen * num_rows + index, pair, mask=ok)


@triton.jit(do_not_specialize=["num_rows", "eps", "scale"])
def router_kernel(
    normal,  # [T, K] contiguous: the normalised rows, for the experts
    routing_weights,  # [T, TOP_K] float32
    members,  # [NUM_EXPERTS, T] int32: the pairs (token * TOP_K + slot) of each expert
    counters,  # int32 zeros: for each expert its number of pairs; for each row tile its arrivals
    slots_done,  # [T, DOWN_TILES] int32, cleared for `down_kernel`
    logits,  # [T, NUM_EXPERTS] float32, intermediate
    hidden,  # [T, K] contiguous, x + residual; None as the residual is
    x,  # [T, K] contiguous
    residual,  # [T, K], added to x before the norm, or None
    weight,  # [NUM_EXPERTS, K] contiguous
    norm_weight,  # [K]
    score_bias,  # [NUM_EXPERTS] float32, or None
    num_rows,  # T
    residual_stride,
    eps,
    scale,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUNDS: tl.constexpr,  # logits are rounded to x's dtype
    DOWN_TILES: tl.constexpr,
    BLOCK_C: tl.constexpr,  # power of two, at least DOWN_TILES
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two, at least NUM_EXPERTS
    BLOCK_S: tl.constexpr,  # power of two, at least TOP_K
    EARLY: tl.constexpr,
):
    """One program for each row tile and column tile of the logits.

    The last program of a row tile chooses the experts of its tokens.
    """
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < num_rows
    wide_row = row.to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < NUM_EXPERTS
    depth = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K // 8], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + depth
        tile = _hidden_tile(x, residual, residual_stride, wide_row, row_ok, k, K, K % BLOCK_K != 0)
        wide = tile.to(tl.float32)
        # Eight neighbours of a row lie in one thread, which so holds one sum instead of eight.
        squares += tl.sum(tl.reshape(wide * wide, [BLOCK_M, BLOCK_K // 8, 8]), 2)
        scale_k = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        tile = (wide * scale_k[None, :]).to(tile.dtype)
        columns = _tile(weight + column[:, None] * K + k[None, :], column_ok, k < K,
                        NUM_EXPERTS % BLOCK_N != 0, K % BLOCK_K != 0)  # fmt: skip
        sums = tl.dot(tile, tl.trans(columns), sums, input_precision="ieee")
    factor = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    sums = sums * factor
    if ROUNDS:
        sums = sums.to(x.dtype.element_ty).to(tl.float32)
    tl.store(logits + wide_row * NUM_EXPERTS + column[None, :], sums,
             mask=row_ok[:, None] & column_ok[None, :])  # fmt: skip

    _store_normal(
        normal, hidden, x, residual, residual_stride, norm_weight, factor, wide_row, row_ok, K,
        BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if tl.program_id(1) == 0:
        clear_slots(slots_done, row, row_ok, DOWN_TILES, BLOCK_C, BLOCK_M)

    if is_last_of(tl.num_programs(1), counters + NUM_EXPERTS + tl.program_id(0)):
        lane = tl.arange(0, BLOCK_E)[None, :]
        values = tl.load(
            logits + wide_row * NUM_EXPERTS + lane,
            mask=row_ok[:, None] & (lane < NUM_EXPERTS),
            other=0.0,
        )
        append_pairs(
            routing_weights, members, counters, values, score_bias, row, num_rows, scale,
            NUM_EXPERTS, TOP_K, SCORING, RENORMALIZE, BLOCK_M, BLOCK_E, BLOCK_S,
        )  # fmt: skip


@triton.jit
def _pairs(tile, members, counts, num_rows, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
           BLOCK_M: tl.constexpr):  # fmt: skip
    """Find the pairs of a tile.

    Returns their expert (NUM_EXPERTS or more if the tile has no pairs), [BLOCK_M] pairs, and a mask
    of the places that hold a pair.
    """
    lane = tl.arange(0, BLOCK_E)
    count = tl.load(counts + lane, mask=lane < NUM_EXPERTS, other=0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M  # of each expert
    before = tl.cumsum(tiles, 0) <= tile
    expert = tl.sum(before.to(tl.int32))
    first = (tile - tl.sum(tl.where(before, tiles, 0))) * BLOCK_M
    place = first + tl.arange(0, BLOCK_M)
    is_pair = place < tl.sum(tl.where(lane == expert, count, 0))
    pair = tl.load(members + expert * num_rows + place, mask=is_pair, other=0)
    return expert, pair, is_pair


@triton.jit(do_not_specialize=["num_rows"])
def gate_up_kernel(
    inner,  # [T * SLOTS, N] contiguous
    normal,  # [T, K] contiguous
    factors,  # [T] float32, by which the products of a token are multiplied, or None
    weight,  # [NUM_EXPERTS, 2 N, K] contiguous: gate and up
    members,  # [NUM_EXPERTS, T] int32
    counts,  # [NUM_EXPERTS] int32
    num_rows,  # T
    N: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each tile of pairs and tile of columns."""
    wait_for_previous_kernel(EARLY)
    expert, pair, is_pair = _pairs(
        tl.program_id(0), members, counts, num_rows, NUM_EXPERTS, BLOCK_E, BLOCK_M
    )
    if expert < NUM_EXPERTS:
        row = (pair // SLOTS).to(tl.int64)[:, None] * K
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        column_ok = column < N
        depth = tl.arange(0, BLOCK_K)
        matrix = weight + expert.to(tl.int64) * (2 * N * K)
        masked: tl.constexpr = K % BLOCK_K != 0
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + depth
            left = _tile(normal + row + k[None, :], is_pair, k < K, True, masked)
            source = matrix + column[:, None] * K + k[None, :]
            right = _tile(source, column_ok, k < K, N % BLOCK_N != 0, masked)
            gate = tl.dot(left, tl.trans(right), gate, input_precision="ieee")
            right = _tile(source + N * K, column_ok, k < K, N % BLOCK_N != 0, masked)
            up = tl.dot(left, tl.trans(right), up, input_precision="ieee")
        if factors is not None:
            factor = tl.load(factors + pair // SLOTS, mask=is_pair, other=0.0)[:, None]
            gate = gate * factor
            up = up * factor
        target = inner + pair.to(tl.int64)[:, None] * N + column[None, :]
        result = gated(gate, up, ACTIVATION).to(inner.dtype.element_ty)
        tl.store(target, result, mask=is_pair[:, None] & column_ok[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def down_kernel(
    out,  # [T, N] contiguous
    products,  # [T * SLOTS, N] float32, intermediate
    slots_done,  # [T, column tiles] int32 zeros
    inner,  # [T * SLOTS, K] contiguous
    weight,  # [NUM_EXPERTS, N, K] contiguous
    routing_weights,  # [T, SLOTS] float32
    residual,  # [T, N] contiguous
    members,  # [NUM_EXPERTS, T] int32
    counts,  # [NUM_EXPERTS] int32
    num_rows,  # T
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each tile of pairs and tile of columns.

    The last program of a token adds the products of the token's slots, in their order.
    """
    wait_for_previous_kernel(EARLY)
    expert, pair, is_pair = _pairs(
        tl.program_id(0), members, counts, num_rows, NUM_EXPERTS, BLOCK_E, BLOCK_M
    )
    if expert < NUM_EXPERTS:
        row = pair.to(tl.int64)[:, None]
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        column_ok = column < N
        depth = tl.arange(0, BLOCK_K)
        matrix = weight + expert.to(tl.int64) * (N * K)
        masked: tl.constexpr = K % BLOCK_K != 0
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + depth
            left = _tile(inner + row * K + k[None, :], is_pair, k < K, True, masked)
            right = _tile(
                matrix + column[:, None] * K + k[None, :],
                column_ok,
                k < K,
                N % BLOCK_N != 0,
                masked,
            )
            sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        tl.store(products + row * N + column[None, :], sums,
                 mask=is_pair[:, None] & column_ok[None, :])  # fmt: skip
        tl.debug_barrier()  # all products of this program are written before it is counted
        token = pair // SLOTS
        counter = slots_done + token * tl.num_programs(1) + tl.program_id(1)
        before = tl.atomic_add(counter, 1, mask=is_pair, sem="acq_rel")
        is_last = is_pair & (before == SLOTS - 1)
        if tl.sum(is_last.to(tl.int32)) > 0:
            tl.debug_barrier()
            stored = is_last[:, None] & column_ok[None, :]
            place = token.to(tl.int64)[:, None] * N + column[None, :]
            total = tl.load(residual + place, mask=stored, other=0.0).to(tl.float32)
            summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for slot in range(SLOTS):
                source = (token * SLOTS + slot).to(tl.int64)
                factor = tl.load(routing_weights + source, mask=is_last, other=0.0)
                product = tl.load(products + source[:, None] * N + column[None, :], mask=stored,
                                  other=0.0)  # fmt: skip
                summed += factor[:, None] * product
            tl.store(out + place, (total + summed).to(out.dtype.element_ty), mask=stored)
