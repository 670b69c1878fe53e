"""The Triton kernel of `w8a8_moe_linear` on CUDA: a grouped product of operands of 8 bits.

Pairs of tokens and slots are sorted and given to programs as in ops/moe/triton_moe_linear.py, and
multiplied as in triton_w8a8_linear.py. Not yet verified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.moe.triton_moe_linear import combine_slots
from ostinato.ops.moe.triton_routing import expert_order, num_pair_tiles, pairs_of_tile
from ostinato.ops.w8a8.round_rows import InputScales
from ostinato.ops.w8a8.triton_round_rows import round_rows_on_cuda
from ostinato.ops.w8a8.triton_w8a8_linear import (
    Operands,
    check_operands,
    multiply_rounded_tile,
    w8a8_tile_constants,
)

__all__ = ("w8a8_experts_constants", "w8a8_experts_kernel", "w8a8_moe_on_cuda")


@triton.jit
def w8a8_experts_kernel(
    x,  # [T, K], or [T * SLOTS, K]
    x_scales,  # [the same rows, INPUT_GROUPS] float32
    weight,  # [experts, N, K]
    scales,  # [experts, groups, N] float32
    bias,  # [experts, N] or None
    order,  # [T * SLOTS] int64: pairs (token * SLOTS + slot) sorted by expert
    ends,  # [experts] int64: where each expert's pairs end in `order`
    out,  # [T * SLOTS, N]
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    INPUT_GROUPS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
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
        groups: tl.constexpr = (K + GROUP - 1) // GROUP
        skipped = expert.to(tl.int64)
        sums = multiply_rounded_tile(
            x, x_scales, row, is_pair, weight + skipped * N * K, scales + skipped * groups * N,
            column, 0, (K + BLOCK_K - 1) // BLOCK_K,
            N, K, GROUP, IS_GROUPED, INPUT_GROUPS, IS_FLOAT, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if bias is not None:
            added = tl.load(bias + expert * N + column, mask=column < N, other=0.0)
            sums += added.to(tl.float32)[:, None]
        stored = (column < N)[:, None] & is_pair[None, :]
        target = out + pair[None, :] * N + column[:, None]
        tl.store(target, sums.to(out.dtype.element_ty), mask=stored)


def w8a8_experts_constants(operands: Operands, num_pairs: int, num_experts: int) -> dict[str, Any]:
    """The kernel's constants. The tile is that for the mean number of pairs of an expert."""
    mean = -(-num_pairs // num_experts)
    if operands.groups > 1:  # the sums of a tile of 128 pairs would not fit the registers
        mean = min(mean, 64)
    return w8a8_tile_constants(operands, mean) | {
        "NUM_EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
    }


def w8a8_moe_on_cuda(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    inputs: InputScales,
    powers: bool,
) -> Tensor:
    """`w8a8_moe_linear` (ops/w8a8/w8a8_linear.py); ids are not checked.

    Raises:
        ValueError: a dtype, shape or stride is not supported.
    """
    num_tokens, slots = ids.shape
    num_experts, out_features, in_features = weight.shape
    operands = Operands(out_features, in_features, group_size, inputs, weight.dtype)
    check_operands(x, weight, scales, operands)
    pairs = num_tokens * slots
    dtype = x.dtype if routing_weights is None else torch.float32
    products = x.new_empty((pairs, out_features), dtype=dtype)
    if pairs:
        rounded, x_scales = round_rows_on_cuda(
            x, weight.dtype, inputs, group_size, input_scale, powers=powers
        )
        order, ends = expert_order(ids, num_experts)
        constants = w8a8_experts_constants(operands, pairs, num_experts)
        constants |= {"SLOTS": slots, "IS_SHARED": x.shape[0] == num_tokens}
        tiles = num_pair_tiles(pairs, num_experts, constants["BLOCK_M"])
        w8a8_experts_kernel[(tiles, triton.cdiv(out_features, constants["BLOCK_N"]))](
            rounded,
            x_scales,
            weight,
            scales,
            None if bias is None else bias.contiguous(),
            order,
            ends,
            products,
            **constants,
        )
    if routing_weights is None:
        return products
    return combine_slots(products, routing_weights, residual, slots, x.dtype)
