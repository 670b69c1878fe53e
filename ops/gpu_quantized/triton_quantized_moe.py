"""The Triton kernel of `quantized_moe_linear` on CUDA: a grouped product over quantised matrices.

Pairs of tokens and slots are sorted and given to programs as in ops/moe/triton_moe_linear.py, and
multiplied as in triton_quantized_linear.py. Not yet verified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.gpu_quantized.packed_bytes import (
    check_operands,
    format_constants,
    typed_views,
)
from ostinato.ops.gpu_quantized.triton_quantized_linear import multiply_tile, tile_constants
from ostinato.ops.moe.triton_moe_linear import combine_slots
from ostinato.ops.moe.triton_routing import expert_order, num_pair_tiles, pairs_of_tile
from ostinato.ops.quantized_reference import QuantFormat

__all__ = ("quantized_experts_constants", "quantized_experts_kernel", "quantized_moe_on_cuda")


@triton.jit
def quantized_experts_kernel(
    x,  # [T, K], or [T * SLOTS, K]
    words,  # the weights [experts, ...] as int32
    factors,  # the weights in the dtype of their scales
    bias,  # [experts, N] or None
    order,  # [T * SLOTS] int64: pairs (token * SLOTS + slot) sorted by expert
    ends,  # [experts] int64: where each expert's pairs end in `order`
    out,  # [T * SLOTS, N]
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    HEADER: tl.constexpr,
    UNIT: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_SHARED: tl.constexpr,  # the slots of a token have one row of x
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two, at least NUM_EXPERTS
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for each tile of pairs and each tile of columns."""
    expert, pair, is_pair = pairs_of_tile(
        tl.program_id(0), order, ends, NUM_EXPERTS, BLOCK_E, BLOCK_M
    )
    if expert < NUM_EXPERTS:
        row = pair // SLOTS if IS_SHARED else pair
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        skipped = expert.to(tl.int64) * ((N + 31) // 32 * PANEL_BYTES)  # bytes
        word_bytes: tl.constexpr = words.dtype.element_ty.primitive_bitwidth // 8
        factor_bytes: tl.constexpr = factors.dtype.element_ty.primitive_bitwidth // 8
        steps: tl.constexpr = (K + GROUP - 1) // GROUP * ((GROUP + BLOCK_K - 1) // BLOCK_K)
        sums = multiply_tile(
            x, row * x_stride, is_pair, words + skipped // word_bytes,
            factors + skipped // factor_bytes, None, column, 0, steps,
            N, K, KIND, BITS, GROUP, SYMMETRIC, HEADER, UNIT, PANEL_BYTES,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if bias is not None:
            added = tl.load(bias + expert * N + column, mask=column < N, other=0.0)
            sums += added.to(tl.float32)[:, None]
        stored = (column < N)[:, None] & is_pair[None, :]
        target = out + pair[None, :] * N + column[:, None]
        tl.store(target, sums.to(out.dtype.element_ty), mask=stored)


def quantized_experts_constants(
    form: QuantFormat,
    num_pairs: int,
    num_experts: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The kernel's constants. The tile is that for the mean number of pairs of an expert."""
    mean = -(-num_pairs // num_experts)
    return (
        format_constants(form, out_features, in_features)
        | tile_constants(form, mean, dtype)
        | {"NUM_EXPERTS": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts)}
    )


def quantized_moe_on_cuda(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    routing_weights: Tensor | None,
    residual: Tensor | None,
    form: QuantFormat,
) -> Tensor:
    """`quantized_moe_linear` (ops/moe/moe_linear.py); ids are not checked, x is not rounded.

    Raises:
        ValueError: a dtype, shape or stride is not supported.
    """
    num_tokens, slots = ids.shape
    in_features = x.shape[1]
    check_operands(x, weight, form, out_features, in_features)
    pairs = num_tokens * slots
    dtype = x.dtype if routing_weights is None else torch.float32
    products = x.new_empty((pairs, out_features), dtype=dtype)
    if pairs:
        num_experts = len(weight)
        order, ends = expert_order(ids, num_experts)
        size = (out_features, in_features)
        constants = quantized_experts_constants(form, pairs, num_experts, *size, x.dtype)
        constants |= {"SLOTS": slots, "IS_SHARED": x.shape[0] == num_tokens}
        tiles = num_pair_tiles(pairs, num_experts, constants["BLOCK_M"])
        quantized_experts_kernel[(tiles, triton.cdiv(out_features, constants["BLOCK_N"]))](
            x,
            *typed_views(weight, form),
            None if bias is None else bias.contiguous(),
            order,
            ends,
            products,
            x.stride(0),
            **constants,
        )
    if routing_weights is None:
        return products
    return combine_slots(products, routing_weights, residual, slots, x.dtype)
