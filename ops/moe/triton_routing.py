"""Triton kernels for experts: `ostinato::route`, and the order of (token, slot) pairs by expert.

A pair is a token and one of its slots: a token with k experts has k pairs.

In torch each of these two computations is a dozen small kernels. They take longer than the matrix
products of a small step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = (
    "choose_experts",
    "expert_order",
    "expert_order_kernel",
    "launch_route",
    "num_pair_tiles",
    "pairs_of_tile",
    "route_kernel",
)

# Up to this many pairs are ordered by counting, which compares each pair with all others. If there
# are more, torch sorts them.
_MOST_COUNTED = 8192
_PAIRS, _OTHERS = 32, 128  # pairs of a program, and pairs that it compares them with at a time
_LEAST_SUM = tl.constexpr(1e-20)  # as in ops/moe/routing.py


@triton.jit
def choose_experts(
    values,  # [M, BLOCK_E] float32: logits; -inf beyond the experts
    bias,  # pointer to [NUM_EXPERTS] float32, or None
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two, at least TOP_K
):
    """The experts [M, BLOCK_K] int32 that `route` chooses for M tokens, and their weights."""
    lane = tl.arange(0, BLOCK_E)
    is_open = (lane < NUM_EXPERTS)[None, :] & tl.full([BLOCK_M, BLOCK_E], 1, tl.int1)
    scores = values
    if SCORING == "softmax":
        scores = tl.exp(values - tl.max(values, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-values))
    choice = values
    if bias is not None:
        choice = scores + tl.load(bias + lane, mask=lane < NUM_EXPERTS, other=0.0)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    in_use = slot < TOP_K
    # Above 0 if the token gets NaN weights.
    wrong = tl.sum((values != values).to(tl.int32), 1)
    chosen = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    taken = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for k in range(TOP_K):
        greatest = tl.max(tl.where(is_open, choice, float("-inf")), 1)
        is_best = is_open & (choice == greatest[:, None])
        best = tl.min(tl.where(is_best, lane[None, :], BLOCK_E), 1)
        wrong += tl.where(best == BLOCK_E, 1, 0)  # no number was left to choose
        is_best = lane[None, :] == best[:, None]
        score = tl.sum(tl.where(is_best, scores, 0.0), 1)
        chosen = tl.where(slot == k, best[:, None], chosen)
        taken = tl.where(slot == k, score[:, None], taken)
        is_open = is_open & (lane[None, :] != best[:, None])
    if SCORING == "top_softmax":
        taken = tl.where(in_use, taken, float("-inf"))
        taken = tl.exp(taken - tl.max(taken, 1)[:, None])
        taken = taken / tl.sum(taken, 1)[:, None]
    if RENORMALIZE:
        taken = taken / (tl.sum(tl.where(in_use, taken, 0.0), 1) + _LEAST_SUM)[:, None]
    taken = taken * scale
    wrong += tl.sum((in_use & (taken != taken)).to(tl.int32), 1)
    is_wrong = (wrong > 0)[:, None]
    return tl.where(is_wrong, slot, chosen), tl.where(is_wrong, float("nan"), taken)


@triton.jit(do_not_specialize=["scale"])
def route_kernel(
    logits,  # [T, NUM_EXPERTS]
    bias,  # [NUM_EXPERTS] float32, or None
    ids,  # [T, TOP_K] int32
    weights,  # [T, TOP_K] float32
    logits_stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two, at least NUM_EXPERTS
    BLOCK_K: tl.constexpr,  # power of two, at least TOP_K
):
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_E)[None, :]
    row = logits + token * logits_stride
    values = tl.load(row + lane, mask=lane < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    chosen, taken = choose_experts(
        values, bias, scale, NUM_EXPERTS, TOP_K, SCORING, RENORMALIZE, 1, BLOCK_E, BLOCK_K
    )
    slot = tl.arange(0, BLOCK_K)[None, :]
    target = token * TOP_K + slot
    tl.store(ids + target, chosen, mask=slot < TOP_K)
    tl.store(weights + target, taken, mask=slot < TOP_K)


def launch_route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`route` (ops/moe/routing.py) without groups of experts.

    Raises:
        ValueError: the rows of the logits are not contiguous.
    """
    num_tokens, num_experts = logits.shape
    ids = logits.new_empty((num_tokens, top_k), dtype=torch.int32)
    weights = logits.new_empty((num_tokens, top_k), dtype=torch.float32)
    if num_tokens == 0:
        return ids, weights
    if logits.stride(1) != 1:
        raise ValueError(f"route: logits with strides {logits.stride()} need contiguous rows")
    constants: dict[str, Any] = {
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "SCORING": scoring,
        "RENORMALIZE": renormalize,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_K": triton.next_power_of_2(top_k),
        "num_warps": 1,  # the registers of one warp hold the scores of a token
    }
    route_kernel[(num_tokens,)](
        logits,
        None if bias is None else bias.contiguous(),
        ids,
        weights,
        # A single row may have any stride. Triton would compile the kernel again for some strides.
        logits.stride(0) if num_tokens > 1 else num_experts,
        scale,
        **constants,
    )
    return ids, weights


@triton.jit(do_not_specialize=["num_pairs"])
def expert_order_kernel(
    ids,  # [P] int32, the expert of each pair
    order,  # [P] int64
    ends,  # [NUM_EXPERTS] int64
    num_pairs,  # P
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """For each of BLOCK items: the position of a pair in the order, or the end of an expert.

    A pair's position is the number of pairs before it: all pairs of lower experts, and the earlier
    pairs of the same expert. An expert's end is one past the position of its last pair.
    """
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = item < num_pairs
    is_expert = (item >= num_pairs) & (item < num_pairs + NUM_EXPERTS)
    expert = tl.load(ids + item, mask=is_pair, other=0)
    key = tl.where(is_pair, expert * num_pairs + item, (item - num_pairs + 1) * num_pairs)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, OTHERS):
        other = start + tl.arange(0, OTHERS)
        others = tl.load(ids + other, mask=other < num_pairs, other=NUM_EXPERTS)
        others = others * num_pairs + other
        place += tl.sum((others[None, :] < key[:, None]).to(tl.int32), 1)
    tl.store(order + place, item.to(tl.int64), mask=is_pair)
    tl.store(ends + item - num_pairs, place.to(tl.int64), mask=is_expert)


@triton.jit
def pairs_of_tile(
    tile,
    order,
    ends,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two, at least NUM_EXPERTS
    BLOCK_M: tl.constexpr,
):
    """The pairs of a tile of a grouped product; `expert_order` returned `order` and `ends`.

    Returns:
        The expert of the pairs (NUM_EXPERTS or more if the tile has no pairs), the pairs [BLOCK_M],
        and which entries are pairs [BLOCK_M].
    """
    lane = tl.arange(0, BLOCK_E)
    end = tl.load(ends + lane, mask=lane < NUM_EXPERTS, other=0)
    begin = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < NUM_EXPERTS), other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M  # of each expert
    before = tl.cumsum(tiles, 0) <= tile
    expert = tl.sum(before.to(tl.int32))
    first = tl.sum(tl.where(lane == expert, begin, 0))
    first += (tile - tl.sum(tl.where(before, tiles, 0))) * BLOCK_M
    place = first + tl.arange(0, BLOCK_M)
    is_pair = place < tl.sum(tl.where(lane == expert, end, 0))
    return expert, tl.load(order + place, mask=is_pair, other=0), is_pair


def num_pair_tiles(num_pairs: int, num_experts: int, block: int) -> int:
    """Programs that cover the tiles of `block` pairs of all experts (`pairs_of_tile`).

    Every expert can end with a tile that is not full. There are never more tiles than pairs.
    """
    return min(num_pairs, triton.cdiv(num_pairs, block) + num_experts)


def expert_order(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The pairs of tokens and slots, sorted by expert and then by number.

    Args:
        ids: [T, k] int32, the experts of each token. They are not checked.
        num_experts: the number of experts.

    Returns:
        The pairs (token * k + slot) [T * k] int64, and where each expert's pairs end [num_experts]
        int64.
    """
    flat = ids.reshape(-1)
    num_pairs = flat.numel()
    if num_pairs > _MOST_COUNTED:
        by_expert, order = flat.sort(stable=True)
        experts = torch.arange(num_experts, dtype=by_expert.dtype, device=ids.device)
        return order, torch.searchsorted(by_expert, experts, right=True)
    order = flat.new_empty(num_pairs, dtype=torch.int64)
    ends = flat.new_empty(num_experts, dtype=torch.int64)
    constants: dict[str, Any] = {"NUM_EXPERTS": num_experts, "BLOCK": _PAIRS, "OTHERS": _OTHERS}
    expert_order_kernel[(triton.cdiv(num_pairs + num_experts, _PAIRS),)](
        flat,
        order,
        ends,
        num_pairs,
        **constants,
    )
    return order, ends
