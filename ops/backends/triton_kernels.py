"""Triton kernels of paged attention: one kernel for any mix of prefill and decode.

The kernels read every length from device memory, so a captured CUDA graph serves any batch that
fits its shapes. `triton_work_list` divides a launch into items: (sequence, KV head, query tile, KV
partition).

Sources of the algorithms: FlashAttention-2 (Dao, 2023) for the online softmax, Flash-Decoding (Dao
et al., 2023) for split-KV, PagedAttention (Kwon et al., 2023) for the block table, FlashInfer (Ye
et al., 2024) and vLLM's unified Triton kernel for packing the query heads of a group in one tile.

Legend: M rows of a query tile, N keys of a KV tile, D elements of a head of queries and keys, Dv of
a head of values, S sequences, P KV partitions, H query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.backends.triton_work_list import (
    first_seen,
    first_tile,
    following_item,
    partition_size,
    work_items,
)
from ostinato.ops.fused.early_start import wait_for_previous_kernel

__all__ = ("attention_kernel",)

_LOG2_E = tl.constexpr(1.4426950408889634)
# A masked logit is finite, because -inf would give inf - inf for a row that sees no key of a tile.
# Such a row gets finite weights without meaning. Its next visible key, or the combination of
# partitions, multiplies them by exactly 0.
_MASKED = tl.constexpr(-1.0e38)

# These tensors may begin anywhere.
_UNALIGNED = ["query_start_loc", "seq_lens", "block_table", "taken"]


@triton.jit
def _load_tile(pointers, rows_ok, columns_ok, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A [N, D] tile; masked elements are read as 0."""
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(pointers, mask=rows_ok[:, None] & columns_ok[None, :], other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=rows_ok[:, None], other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(pointers, mask=columns_ok[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _logits(dots, scale, SOFT_CAP: tl.constexpr):
    """Scaled (and capped) logits in units of log2, so that the softmax is one exp2."""
    if SOFT_CAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right even where exp overflows.
        doubled = tl.exp2(dots * (scale * (2.0 * _LOG2_E / SOFT_CAP)))
        logits = (SOFT_CAP * _LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
    else:
        logits = dots * (scale * _LOG2_E)
    return logits


@triton.jit
def _cache_rows(
    table, start, end, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """For each key of the tile, its row in a cache of the shape [rows, D], at KV head 0: [N] int64.

    `_attend` gets caches that are already advanced to its KV head.
    """
    key = start + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one block
        block = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
    return block.to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE) + key % BLOCK_SIZE


@triton.jit
def _attend(
    state,
    queries,  # [M, D]
    position,  # [M] position of each row in its sequence
    last_seen,  # [M] the last key that each row sees
    k_head,  # the cache, advanced to this KV head
    v_head,
    table,  # the sequence's row of the block table
    begin,  # the KV range is [begin, end); begin is a multiple of BLOCK_N
    end,
    lowest,  # the first key that a row of the tile sees
    scale,
    slopes,  # [M] ALiBi slopes in units of log2, or None
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr,  # False where every row sees every key of the range
):
    """Fold the keys [begin, end) into the running softmax: (acc [M, Dv], peak [M], total [M])."""
    acc, peak, total = state
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    offset = tl.arange(0, BLOCK_N)
    masked: tl.constexpr = CAUSAL or WINDOW != 0
    # Block ids are loaded one tile ahead. If they were loaded in the iteration that uses them, the
    # software pipeline would have only one tile in flight.
    rows = _cache_rows(table, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        key = start + offset
        known = (key >= lowest) & (key < end)
        tile = rows[:, None] * HEAD_DIM + column[None, :]
        value_tile = rows[:, None] * VALUE_DIM + value_column[None, :]
        rows = _cache_rows(table, start + BLOCK_N, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N)
        keys = _load_tile(k_head + tile, known, column < HEAD_DIM, masked, BLOCK_D != HEAD_DIM)
        dots = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        logits = _logits(dots, scale, SOFT_CAP)
        if slopes is not None:
            logits += slopes[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if CAUSAL:
            logits = tl.where(key[None, :] <= last_seen[:, None], logits, _MASKED)
        if WINDOW > 0:  # `first_seen` would take registers that some tiles do not have
            logits = tl.where(key[None, :] > position[:, None] - WINDOW, logits, _MASKED)
        if WINDOW < 0:
            logits = tl.where(
                key[None, :] >= first_seen(position, WINDOW)[:, None], logits, _MASKED
            )
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(logits - new_peak[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        # Rows past the context may hold NaN, and 0 * NaN is NaN: they are read as 0.
        values = _load_tile(
            v_head + value_tile, known, value_column < VALUE_DIM, masked, BLOCK_V != VALUE_DIM
        )
        acc = tl.dot(
            weights.to(queries.dtype), values.to(queries.dtype), acc, input_precision="ieee"
        )
        peak = new_peak
    return acc, peak, total


@triton.jit
def _join_partitions(
    partial_out,
    partial_lse,
    slot,  # [M] index of the first partition of each row
    row_ok,  # [M]
    num_parts,
    column,  # [C] elements of the result
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    JOINED: tl.constexpr,  # partitions that are read at a time
):
    """Columns [M, C] of a tile's result from all partitions, in their order."""
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    peak = tl.full([BLOCK_M], _MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, num_parts, JOINED):
        part = first + tl.arange(0, JOINED)
        present = row_ok[:, None] & (part < num_parts)[None, :]
        place = slot[:, None] + part[None, :]
        lse = tl.load(partial_lse + place, mask=present, other=_MASKED)  # [M, P]
        partial = tl.load(
            partial_out + place[:, :, None] * VALUE_DIM + column[None, None, :],
            mask=present[:, :, None] & (column < VALUE_DIM)[None, None, :],
            other=0.0,
        )  # [M, P, C]
        new_peak = tl.maximum(peak, tl.max(lse, 1))
        decay = tl.exp2(peak - new_peak)
        weights = tl.where(present, tl.exp2(lse - new_peak[:, None]), 0.0)
        acc = acc * decay[:, None] + tl.sum(partial * weights[:, :, None], 1)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
    return acc / tl.where(row_ok, total, 1.0)[:, None]


@triton.jit
def _attend_item(
    pointers,  # (out, partial_out, partial_lse, arrivals, q, k_cache, v_cache)
    strides,  # (q_stride_token, q_stride_head)
    table,  # the sequence's row of the block table
    begin,  # the sequence's first query row
    query_len,  # its number of query rows
    seq_len,  # its number of keys
    kv_head,
    local,  # index of the tile; with several partitions, of the partition
    split_row,  # the row of partial results for the sequence's first query row
    scale,
    alibi_slopes,  # [H] float32 or None
    sinks,  # [H] float32 or None
    visible_ends,  # [T] int32 or None
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MIN_PART_TILES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    JOINED: tl.constexpr,
):
    """One query tile of one KV head against one range of keys: read, attend, store.

    The program that writes the last of several partitions joins them. No result depends on which
    program that is.
    """
    out, partial_out, partial_lse, arrivals, q, k_cache, v_cache = pointers
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    # The last tile has the most keys, so it starts first.
    tile = 0 if MAX_PARTS > 1 else tl.cdiv(query_len, BLOCK_Q) - 1 - local
    member = row // GROUP  # token within the tile
    token = tile * BLOCK_Q + member
    row_ok = (member < BLOCK_Q) & (token < query_len)
    head = kv_head * GROUP + row % GROUP
    first_row = (begin + tile * BLOCK_Q).to(tl.int64)
    source = (member * strides[0] + head * strides[1])[:, None] + column[None, :]
    queries = _load_tile(
        q + first_row * strides[0] + source, row_ok, column < HEAD_DIM, True, BLOCK_D != HEAD_DIM
    )

    context = seq_len - query_len + tile * BLOCK_Q  # position of the tile's first token
    first = first_tile(context, WINDOW, BLOCK_N)
    lowest = first_seen(context, WINDOW)
    last = tl.minimum(context + BLOCK_Q, seq_len)
    last_seen = context + member
    if visible_ends is not None:
        ends = tl.load(visible_ends + first_row + member, mask=row_ok, other=0)
        last_seen = tl.maximum(last_seen, ends - 1)
        last = tl.minimum(tl.maximum(last, tl.max(ends)), seq_len)
    num_parts = 1
    if MAX_PARTS > 1:
        part_size = partition_size(first, seq_len, BLOCK_N, MAX_PARTS, MIN_PART_TILES)
        num_parts = tl.cdiv(seq_len - first, part_size)
        first += local * part_size
        last = tl.minimum(first + part_size, last)
    peak = tl.full([BLOCK_M], _MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        # The first partition counts the sink. With MAX_PARTS == 1, each tile is a first partition.
        is_first = MAX_PARTS == 1 or local == 0
        peak = tl.where(is_first, tl.load(sinks + head) * _LOG2_E, _MASKED)
        total = tl.where(is_first, 1.0, total)
    state = (tl.zeros([BLOCK_M, BLOCK_V], tl.float32), peak, total)
    slopes = None if alibi_slopes is None else tl.load(alibi_slopes + head) * _LOG2_E
    k_head = k_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    v_head = v_cache + kv_head * (BLOCK_SIZE * VALUE_DIM)
    if MAX_PARTS == 1 and WINDOW == 0:  # long queries: most keys lie below the diagonal
        diagonal = (context + 1) // BLOCK_N * BLOCK_N
        state = _attend(
            state, queries, context + member, last_seen, k_head, v_head, table, first, diagonal,
            lowest, scale, slopes, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP,
            BLOCK_N, BLOCK_D, BLOCK_V, False,
        )  # fmt: skip
        first = diagonal
    acc, peak, total = _attend(
        state, queries, context + member, last_seen, k_head, v_head, table, first, last,
        lowest, scale, slopes, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP,
        BLOCK_N, BLOCK_D, BLOCK_V, True,
    )  # fmt: skip

    acc = acc / total[:, None]
    value_column = tl.arange(0, BLOCK_V)
    stored = row_ok[:, None] & (value_column < VALUE_DIM)[None, :]
    target_row = (member * NUM_HEADS + head) * VALUE_DIM
    out += first_row * (NUM_HEADS * VALUE_DIM)
    if num_parts == 1:
        target = target_row[:, None] + value_column[None, :]
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=stored)
    else:
        slot = ((split_row + token) * NUM_HEADS + head).to(tl.int64) * MAX_PARTS
        tl.store(partial_lse + slot + local, peak + tl.log2(total), mask=row_ok)
        partial = partial_out + slot[:, None] * VALUE_DIM + value_column[None, :]
        tl.store(partial + local * VALUE_DIM, acc, mask=stored)
        tl.debug_barrier()  # the whole partition is written before it is counted
        before = tl.atomic_add(arrivals + split_row * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
        if before == num_parts - 1:
            tl.debug_barrier()
            for start in range(0, BLOCK_V, BLOCK_C):
                some = start + tl.arange(0, BLOCK_C)
                joined = _join_partitions(
                    partial_out, partial_lse, slot, row_ok, num_parts, some,
                    VALUE_DIM, BLOCK_M, BLOCK_C, JOINED,
                )  # fmt: skip
                tl.store(
                    out + (target_row[:, None] + some[None, :]),
                    joined.to(out.dtype.element_ty),
                    mask=row_ok[:, None] & (some < VALUE_DIM)[None, :],
                )


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=_UNALIGNED)
def attention_kernel(
    out,  # [T, H, Dv] contiguous
    partial_out,  # [split rows, H, P, Dv] float32, used where a sequence has several partitions
    partial_lse,  # [split rows, H, P] float32, log2 of the softmax denominator
    arrivals,  # [T, NUM_KV_HEADS] int32 zeros; at a sequence's first split row: partitions written
    taken,  # [1] int32 zero: items that programs took after their first one, if TAKES
    q,  # [T, H, D]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, D] contiguous
    v_cache,  # like k_cache, of Dv elements
    query_start_loc,  # [S+1] int32
    seq_lens,  # [S] int32
    block_table,  # [S, B] int32
    alibi_slopes,  # [H] float32 or None
    sinks,  # [H] float32 or None
    visible_ends,  # [T] int32 or None
    num_seqs,
    table_stride,
    q_stride_token,
    q_stride_head,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MIN_QUERY: tl.constexpr,  # sequences with fewer query rows belong to another launch
    MAX_QUERY: tl.constexpr,  # so do sequences with more query rows
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two, at least D
    BLOCK_V: tl.constexpr,  # power of two, at least Dv
    MAX_PARTS: tl.constexpr,  # above 1 only where MAX_QUERY rows fit one tile
    MIN_PART_TILES: tl.constexpr,
    BLOCK_C: tl.constexpr,  # columns and
    JOINED: tl.constexpr,  # partitions that are read at a time when partitions are joined
    TAKES: tl.constexpr,  # programs take items from a counter; False = every n-th item
    EARLY: tl.constexpr,
):
    """Attention of every sequence with MIN_QUERY <= query rows <= MAX_QUERY.

    A tile holds BLOCK_M // GROUP consecutive tokens times the GROUP heads that share a KV head.
    """
    wait_for_previous_kernel(EARLY)
    done = 0  # items and split rows of the sequences before this chunk
    split_done = 0
    item = tl.program_id(0)
    for first_seq in range(0, num_seqs, BLOCK_S):
        items, split_rows = work_items(
            query_start_loc, seq_lens, first_seq, num_seqs,
            MIN_QUERY, MAX_QUERY, BLOCK_M // GROUP, BLOCK_N, WINDOW, MAX_PARTS, MIN_PART_TILES,
            BLOCK_S,
        )  # fmt: skip
        ends = tl.cumsum(items)
        chunk_end = done + tl.sum(items) * NUM_KV_HEADS
        while item < chunk_end:
            # Taken before the work on this item, which hides the time of the atomic addition.
            following = following_item(item, taken, TAKES)
            kv_head = (item - done) % NUM_KV_HEADS
            index = (item - done) // NUM_KV_HEADS
            before = ends <= index
            seq = first_seq + tl.sum(before.to(tl.int32))
            begin = tl.load(query_start_loc + seq)
            _attend_item(
                (out, partial_out, partial_lse, arrivals, q, k_cache, v_cache),
                (q_stride_token, q_stride_head),
                block_table + seq.to(tl.int64) * table_stride,
                begin,
                tl.load(query_start_loc + seq + 1) - begin,
                tl.load(seq_lens + seq),
                kv_head,
                index - tl.max(tl.where(before, ends, 0)),
                split_done + tl.sum(tl.where(before, split_rows, 0)),
                scale,
                alibi_slopes, sinks, visible_ends,
                NUM_KV_HEADS, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, MAX_PARTS, MIN_PART_TILES,
                BLOCK_C, JOINED,
            )  # fmt: skip
            item = following
        done = chunk_end
        split_done += tl.sum(split_rows)
