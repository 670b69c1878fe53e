"""The Triton kernels of `ostinato::moe_linear`: a grouped matrix product, and the sum of slots.

Pairs of tokens and slots are sorted by expert on the device. A program multiplies up to BLOCK_M
pairs of one expert by BLOCK_N rows of its matrix. The grid has enough programs for every division
of the pairs among the experts. Each program finds its expert from the positions where the experts'
pairs end. So one captured graph serves every result of the router, and the host reads no result.

The slots of a token are added in their order.

Source: the grouped product over sorted tokens of MegaBlocks (Gale et al., arXiv:2211.15841).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.moe.moe_linear import TILE_MEANS
from ostinato.ops.moe.triton_routing import expert_order, num_pair_tiles, pairs_of_tile

__all__ = (
    "combine_slots",
    "combine_slots_kernel",
    "grouped_constants",
    "grouped_kernel",
    "moe_linear_on_cuda",
)

_COMBINED = 1024  # columns that a program of `combine_slots_kernel` sums


@triton.jit
def grouped_kernel(
    x,  # [T, K], or [T * SLOTS, K]
    weight,  # [NUM_EXPERTS, N, K] contiguous
    bias,  # [NUM_EXPERTS, N] or None
    order,  # [T * SLOTS] int64: pairs (token * SLOTS + slot) sorted by expert
    ends,  # [NUM_EXPERTS] int64: where each expert's pairs end in `order`
    out,  # [T * SLOTS, N]
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
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
        depth = tl.arange(0, BLOCK_K)
        matrix = weight + expert.to(tl.int64) * (N * K)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = start + depth < K
            left = tl.load(
                x + row[:, None] * x_stride + (start + depth)[None, :],
                mask=is_pair[:, None] & inside[None, :],
                other=0.0,
            )
            right = tl.load(
                matrix + column[None, :] * K + (start + depth)[:, None],
                mask=(column < N)[None, :] & inside[:, None],
                other=0.0,
            )
            sums = tl.dot(left, right, sums, input_precision="ieee")
        if bias is not None:
            added = tl.load(bias + expert * N + column, mask=column < N, other=0.0)
            sums += added.to(tl.float32)[None, :]
        stored = is_pair[:, None] & (column < N)[None, :]
        target = out + pair[:, None] * N + column[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=stored)


@triton.jit
def combine_slots_kernel(
    products,  # [T * SLOTS, N] float32
    routing_weights,  # [T, SLOTS] float32 contiguous
    residual,  # [T, N] or None
    out,  # [T, N]
    residual_stride,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program for each token and BLOCK_N columns: the weighted sum over its slots."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    total = tl.zeros([BLOCK_N], tl.float32)
    for slot in range(SLOTS):
        pair = token * SLOTS + slot
        product = tl.load(products + pair * N + column, mask=inside, other=0.0)
        total += tl.load(routing_weights + pair) * product
    if residual is not None:
        added = tl.load(residual + token * residual_stride + column, mask=inside, other=0.0)
        total += added.to(tl.float32)
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=inside)


def grouped_constants(num_pairs: int, num_experts: int, dtype: torch.dtype) -> dict[str, Any]:
    """The tile of the grouped product: about as many rows as an expert has on average.

    Args:
        num_pairs: tokens times slots.
        num_experts: the number of experts.
        dtype: of rows and weights.
    """
    if dtype == torch.float32:  # multiplied without tensor cores
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    mean = num_pairs / num_experts
    few, some = TILE_MEANS
    block_m = 16 if mean <= few else 64 if mean <= some else 128
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
        "num_warps": 8 if block_m == 128 else 4,
        "num_stages": 3,
    }


def moe_linear_on_cuda(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """`moe_linear` (ops/moe/moe_linear.py). Ids must be experts; they are not checked.

    Raises:
        ValueError: the rows of x or the weight are not contiguous.
    """
    num_tokens, slots = ids.shape
    num_experts, width, depth = weight.shape
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"moe_linear: x with strides {x.stride()} must have contiguous rows, and the weight "
            f"with strides {weight.stride()} must be contiguous"
        )
    pairs = num_tokens * slots
    dtype = x.dtype if routing_weights is None else torch.float32
    products = x.new_empty((pairs, width), dtype=dtype)
    if pairs:
        order, ends = expert_order(ids, num_experts)
        constants = grouped_constants(pairs, num_experts, x.dtype) | {
            "N": width,
            "K": depth,
            "SLOTS": slots,
            "IS_SHARED": x.shape[0] == num_tokens,
            "NUM_EXPERTS": num_experts,
            "BLOCK_E": triton.next_power_of_2(num_experts),
        }
        tiles = num_pair_tiles(pairs, num_experts, constants["BLOCK_M"])
        grouped_kernel[(tiles, triton.cdiv(width, constants["BLOCK_N"]))](
            x,
            weight,
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


def combine_slots(
    products: Tensor,
    routing_weights: Tensor,
    residual: Tensor | None,
    slots: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weighted sum over the slots of each token, plus the residual.

    Args:
        products: [T * slots, N] float32.
        routing_weights: [T, slots] float32.
        residual: [T, N] or None.
        slots: experts of a token.
        dtype: the dtype of the result.

    Returns:
        [T, N]
    """
    width = products.shape[1]
    num_tokens = len(products) // slots
    out = products.new_empty((num_tokens, width), dtype=dtype)
    if num_tokens == 0:
        return out
    block = min(_COMBINED, triton.next_power_of_2(width))
    launch: dict[str, Any] = {"N": width, "SLOTS": slots, "BLOCK_N": block, "num_warps": 4}
    combine_slots_kernel[(num_tokens, triton.cdiv(width, block))](
        products,
        routing_weights.contiguous(),
        residual,
        out,
        0 if residual is None else residual.stride(0),
        **launch,
    )
    return out
