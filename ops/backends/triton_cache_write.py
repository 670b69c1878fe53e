"""The Triton kernel that writes a step's keys and values into the paged KV cache."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ("write_kv_kernel",)


@triton.jit
def _to_cache(tile, dtype: tl.constexpr):
    """Rounded to the cache's dtype; values beyond the range of 8 bits become its largest."""
    if dtype == tl.float8e4nv:
        tile = tl.clamp(tile.to(tl.float32), -448.0, 448.0)
    return tile.to(dtype)


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["query_start_loc", "slot_mapping"],
)
def write_kv_kernel(
    out,  # [T, H, D] contiguous: its padding rows are zeroed
    k,  # [T, NUM_KV_HEADS, D]
    v,
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, D] contiguous
    v_cache,
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (token, block of KV heads): store its keys and values in the cache.

    The attention kernel does not write rows of `out` that belong to no sequence. They are zeroed
    here, which saves a launch over the whole of `out`.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    ok = (head < NUM_KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    slot = tl.load(slot_mapping + token)
    num_tokens = tl.load(query_start_loc + num_seqs)
    keys = tl.load(
        k + token * k_stride_token + head[:, None] * k_stride_head + column[None, :], mask=ok
    )
    values = tl.load(
        v + token * v_stride_token + head[:, None] * v_stride_head + column[None, :], mask=ok
    )
    row = (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = row[:, None] * HEAD_DIM + column[None, :]
    tl.store(k_cache + target, _to_cache(keys, k_cache.dtype.element_ty), mask=ok)
    tl.store(v_cache + target, _to_cache(values, v_cache.dtype.element_ty), mask=ok)
    if token >= num_tokens:
        zeros = tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty)
        for member in range(GROUP):
            tile = (token * NUM_KV_HEADS + head)[:, None] * GROUP + member
            tl.store(out + tile * HEAD_DIM + column[None, :], zeros, mask=ok)
