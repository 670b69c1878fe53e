"""The Triton kernels that write a step's keys and values into the paged KV cache.

`write_kv_kernel` takes keys and values. `rotary_write_kernel` takes the result of the QKV
projection: it also normalises and rotates the heads, and stores the queries for the attention
kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.fused.early_start import wait_for_previous_kernel

__all__ = ("rotary_write_kernel", "write_kv_kernel")


@triton.jit
def _to_cache(tile, dtype: tl.constexpr):
    """Round a tile to the cache's dtype; values beyond the range of float8 become its largest."""
    if dtype == tl.float8e4nv:
        tile = tl.clamp(tile.to(tl.float32), -448.0, 448.0)
    return tile.to(dtype)


@triton.jit
def _clear_counters(arrivals, token, head, NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Clear the token's counters of arrived partitions; one program clears that of taken items."""
    zeros = tl.zeros([BLOCK_H], tl.int32)
    tl.store(arrivals + token * NUM_KV_HEADS + head, zeros, mask=head < NUM_KV_HEADS)
    if token + tl.program_id(1) == 0:
        tl.store(arrivals + tl.num_programs(0) * NUM_KV_HEADS, 0)


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["query_start_loc", "slot_mapping"],
)
def write_kv_kernel(
    out,  # [T, H, Dv] contiguous: its padding rows are zeroed
    arrivals,  # [T * NUM_KV_HEADS + 1] int32, cleared for the attention kernel, or None
    k,  # [T, NUM_KV_HEADS, D]
    v,  # [T, NUM_KV_HEADS, Dv]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, D] contiguous
    v_cache,  # like k_cache, of Dv elements
    query_start_loc,
    slot_mapping,  # [T] int64
    num_seqs,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each token and block of KV heads: store their keys and values in the cache.

    The attention kernel does not write rows of `out` that belong to no sequence. They are zeroed
    here, which saves a launch over the whole of `out`.
    """
    wait_for_previous_kernel(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    ok = (head < NUM_KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    value_ok = (head < NUM_KV_HEADS)[:, None] & (value_column < VALUE_DIM)[None, :]
    slot = tl.load(slot_mapping + token)
    num_tokens = tl.load(query_start_loc + num_seqs)
    keys = tl.load(
        k + token * k_stride_token + head[:, None] * k_stride_head + column[None, :], mask=ok
    )
    values = tl.load(
        v + token * v_stride_token + head[:, None] * v_stride_head + value_column[None, :],
        mask=value_ok,
    )
    row = (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = row[:, None] * HEAD_DIM + column[None, :]
    tl.store(k_cache + target, _to_cache(keys, k_cache.dtype.element_ty), mask=ok)
    target = row[:, None] * VALUE_DIM + value_column[None, :]
    tl.store(v_cache + target, _to_cache(values, v_cache.dtype.element_ty), mask=value_ok)
    if arrivals is not None:
        _clear_counters(arrivals, token, head, NUM_KV_HEADS, BLOCK_H)
    if token >= num_tokens:
        zeros = tl.zeros([BLOCK_H, BLOCK_V], out.dtype.element_ty)
        for member in range(GROUP):
            tile = (token * NUM_KV_HEADS + head)[:, None] * GROUP + member
            tl.store(out + tile * VALUE_DIM + value_column[None, :], zeros, mask=value_ok)


@triton.jit(
    do_not_specialize=["num_seqs", "eps"],
    do_not_specialize_on_alignment=["query_start_loc", "slot_mapping"],
)
def rotary_write_kernel(
    out,  # [T, NUM_HEADS, D] contiguous: its padding rows are zeroed
    arrivals,  # [T * NUM_KV_HEADS + 1] int32, cleared for the attention kernel
    q,  # [T, NUM_HEADS, D] contiguous: the rotated queries
    qkv,  # [T, (NUM_HEADS + 2 NUM_KV_HEADS) D]
    cos,  # [T, HALF] float32 contiguous, or None
    sin,
    q_weight,  # [D], the scale of each query head's RMS norm, or None
    k_weight,
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, D] contiguous
    v_cache,
    query_start_loc,
    slot_mapping,  # [T] int64
    num_seqs,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # pairs of elements that are rotated: i with i + HALF
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each token and block of heads of its row of the projection."""
    wait_for_previous_kernel(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    ok = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    row = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    stored = tl.load(row + column[None, :], mask=ok, other=0.0)
    if cos is not None:
        x = stored.to(tl.float32)
        partner = tl.where(column < HALF, column + HALF, column - HALF)
        partner = tl.where(column < 2 * HALF, partner, column)
        other = tl.load(row + partner[None, :], mask=ok, other=0.0).to(tl.float32)
        if q_weight is not None:
            factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
            x = x * factor * _weights_of(q_weight, k_weight, is_query, column, HEAD_DIM)
            other = other * factor * _weights_of(q_weight, k_weight, is_query, partner, HEAD_DIM)
        is_rotated = column < 2 * HALF
        angle = token * HALF + column % HALF
        cosine = tl.load(cos + angle, mask=is_rotated, other=1.0)[None, :]
        sine = tl.load(sin + angle, mask=is_rotated, other=0.0)
        sine = tl.where(column < HALF, -sine, sine)[None, :]
        rotated = (x * cosine + other * sine).to(stored.dtype)
        stored = tl.where(is_value[:, None], stored, rotated)
    queries = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(q + queries, stored, mask=ok & is_query[:, None])
    slot = tl.load(slot_mapping + token)
    kv_head = tl.where(is_value, head - NUM_KV_HEADS, head) - NUM_HEADS
    cached = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = cached[:, None] * HEAD_DIM + column[None, :]
    entry = _to_cache(stored, k_cache.dtype.element_ty)
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    tl.store(k_cache + target, entry, mask=ok & is_key[:, None])
    tl.store(v_cache + target, entry, mask=ok & is_value[:, None])
    _clear_counters(arrivals, token, head, NUM_KV_HEADS, BLOCK_H)
    if token >= tl.load(query_start_loc + num_seqs):
        zeros = tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty)
        tl.store(out + queries, zeros, mask=ok & is_query[:, None])


@triton.jit
def _weights_of(q_weight, k_weight, is_query, column, HEAD_DIM: tl.constexpr):
    """The norm's scale of each head's elements, float32."""
    column_ok = column < HEAD_DIM
    of_query = tl.load(q_weight + column, mask=column_ok, other=0.0).to(tl.float32)
    of_key = tl.load(k_weight + column, mask=column_ok, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
