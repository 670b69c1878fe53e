"""Launches the kernels of `ostinato::fused_experts` (triton_expert_kernels.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ostinato.ops.fused import triton_fused_linear
from ostinato.ops.fused.early_start import starts_early
from ostinato.ops.fused.fused_linear import TILE_ROWS, most_rows
from ostinato.ops.fused.triton_expert_kernels import down_kernel, gate_up_kernel, router_kernel
from ostinato.ops.fused.triton_fused_linear import linear_by_cublas
from ostinato.ops.fused.triton_output_router import (
    counters_of_output_router,
    output_router_kernel,
    output_router_launch,
)
from ostinato.ops.moe.moe_linear import TILE_MEANS
from ostinato.ops.moe.triton_routing import num_pair_tiles

__all__ = ("experts_constants", "launch_experts", "router_constants")

_ROUTED = 16  # tokens of a program of the router; tensor cores take 16 at least


class _Pairs(NamedTuple):
    """The pairs of tokens and experts that a router lists."""

    routing_weights: Tensor  # [T, slots] float32
    members: Tensor  # [experts, T] int32: the pairs (token * slots + slot) of each expert
    counts: Tensor  # int32: the number of pairs of each expert, then counters of the router
    slots_done: Tensor  # [T, column tiles of down] int32 zeros, the counters of `down_kernel`


def router_constants(
    num_experts: int,
    in_features: int,
    top_k: int,
    itemsize: int,
    down_tiles: int,
    *,
    early: bool = False,
) -> dict[str, Any]:
    """The constants of `router_kernel` without the router's options, launch options included."""
    block_k = min(512 // itemsize, max(16, triton.next_power_of_2(in_features)))
    return {
        "K": in_features,
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "DOWN_TILES": down_tiles,
        "BLOCK_C": triton.next_power_of_2(down_tiles),
        "BLOCK_M": _ROUTED,
        "BLOCK_N": 16,
        "BLOCK_K": block_k,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_S": triton.next_power_of_2(top_k),
        "EARLY": early,
        "launch_pdl": early,
        "num_warps": 4,
        "num_stages": 4,
    }


def experts_constants(
    num_pairs: int,
    num_experts: int,
    in_features: int,
    itemsize: int,
    *,
    is_gated: bool,
    early: bool = False,
) -> dict[str, Any]:
    """The tile of a grouped product: about as many rows as an expert has on average.

    Args:
        num_pairs: tokens times slots.
        num_experts: the number of experts.
        in_features: K.
        itemsize: bytes of an element of rows and weights.
        is_gated: whether a column of the result needs two columns of products.
        early: the kernel starts before the previous one has ended (ops/fused/early_start.py).
    """
    is_few = num_pairs <= TILE_MEANS[0] * num_experts
    if itemsize == 4:  # multiplied without tensor cores
        block_m, block_n, block_k = 16, 16, 64
    else:
        # One sequence has about one tile of pairs for each slot. Its tiles of columns must be so
        # narrow that all multiprocessors read.
        block_m, block_n, block_k = (16, 64, 128) if is_few else (64, 128, 64)
        block_n //= 2 if is_gated else 1
    return {
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": min(block_k, max(16, triton.next_power_of_2(in_features))),
        "EARLY": early,
        "launch_pdl": early,
        "num_warps": 4,
        "num_stages": 2 if itemsize == 4 else 4 if is_few else 3,
    }


def launch_experts(
    x: Tensor,
    output_weight: Tensor,
    output_bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    score_bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    rounds_logits: bool,
    activation: str,
    counters: Tensor,
) -> Tensor:
    """`fused_experts` with the kernels; arguments as for the op.

    Raises:
        ValueError: a dtype or stride is not as the op says, or there are too few counters.
    """
    num_rows, (num_experts, size, _) = x.shape[0], down.shape
    _check(x, router, gate_up, down, counters)
    if num_rows == 0:
        return x.new_empty((0, size))
    down_tiles = triton.cdiv(size, _tiles(num_rows * top_k, down)[1]["BLOCK_N"])
    options = {"SCORING": scoring, "RENORMALIZE": renormalize, "ROUNDS": rounds_logits}
    sizes = (num_experts, size, top_k, x.element_size(), down_tiles)
    constants = options | router_constants(*sizes, early=starts_early(x.device))
    pairs = _Pairs(
        x.new_empty((num_rows, top_k), dtype=torch.float32),
        x.new_empty((num_experts, num_rows), dtype=torch.int32),
        counters,
        x.new_empty((num_rows, down_tiles), dtype=torch.int32),
    )
    projection = (x, output_weight, output_bias, residual)
    norm = (router, norm_weight, eps, score_bias, scale)
    route = _route_in_projection if num_rows <= TILE_ROWS[0] else _route_after_projection
    hidden, normal, factors = route(pairs, *projection, *norm, constants)
    return _multiply(hidden, normal, factors, pairs, gate_up, down, activation)


def _check(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, counters: Tensor) -> None:
    for name, tensor in (("the router", router), ("gate and up", gate_up), ("down", down)):
        if not tensor.is_contiguous() or tensor.dtype != x.dtype:
            raise ValueError(
                f"fused_experts: {name} of {tensor.dtype} with strides {tensor.stride()} must be "
                f"dense and of x's dtype, {x.dtype}"
            )
    num_rows, (num_experts, size, _) = x.shape[0], down.shape
    if num_rows == 0:
        return
    needed = num_experts + triton.cdiv(num_rows, _ROUTED)
    if num_rows <= TILE_ROWS[0]:
        needed = counters_of_output_router(num_experts, size)
    if len(counters) < needed:
        raise ValueError(
            f"fused_experts: {num_experts} experts and {num_rows} rows of {size} need {needed} "
            f"counters, not {len(counters)}"
        )


def _route_in_projection(
    pairs: _Pairs,
    x: Tensor,
    output_weight: Tensor,
    output_bias: Tensor | None,
    residual: Tensor,
    router: Tensor,
    norm_weight: Tensor,
    eps: float,
    score_bias: Tensor | None,
    scale: float,
    constants: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Up to 16 rows: one kernel projects, adds the residual and routes.

    Returns hidden [T, D], the rows [T, D] times `norm_weight`, and the factors [T] float32 that
    complete the norm.
    """
    (num_rows, in_features), (num_experts, size) = x.shape, router.shape
    launch = output_router_launch(size, in_features, constants, x.element_size(), x.device)
    hidden, normal = x.new_empty((num_rows, size)), x.new_empty((num_rows, size))
    factors = x.new_empty(num_rows, dtype=torch.float32)
    output_router_kernel[launch.grid](
        hidden,
        normal,
        factors,
        *pairs,
        x.new_empty((launch.num_parts, num_rows, num_experts), dtype=torch.float32),
        x.new_empty((launch.num_parts, num_rows), dtype=torch.float32),
        x,
        output_weight,
        output_bias,
        residual,
        router,
        norm_weight,
        score_bias,
        num_rows,
        x.stride(0) if num_rows > 1 else in_features,
        residual.stride(0) if num_rows > 1 else size,
        eps,
        scale,
        **launch.constants,
    )
    return hidden, normal, factors


def _route_after_projection(
    pairs: _Pairs,
    x: Tensor,
    output_weight: Tensor,
    output_bias: Tensor | None,
    residual: Tensor,
    router: Tensor,
    norm_weight: Tensor,
    eps: float,
    score_bias: Tensor | None,
    scale: float,
    constants: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """More than 16 rows: the projection, then `router_kernel`.

    Returns hidden [T, D], the normalised rows [T, D], and no factors.
    """
    num_rows, (num_experts, size) = x.shape[0], router.shape
    added: Tensor | None = None
    if num_rows <= most_rows(x.dtype):
        rows = hidden = triton_fused_linear.launch(
            x, output_weight, output_bias, None, 0.0, "", residual
        )
    else:  # the router's kernel adds the residual
        rows, added = linear_by_cublas(x, output_weight, output_bias), residual
        hidden = x.new_empty((num_rows, size))
    normal = x.new_empty((num_rows, size))
    grid = (triton.cdiv(num_rows, _ROUTED), triton.cdiv(num_experts, constants["BLOCK_N"]))
    router_kernel[grid](
        normal,
        *pairs,
        x.new_empty((num_rows, num_experts), dtype=torch.float32),
        None if added is None else hidden,
        rows,
        added,
        router,
        norm_weight,
        score_bias,
        num_rows,
        size if added is None else added.stride(0),
        eps,
        scale,
        **constants,
    )
    return hidden, normal, None


def _multiply(
    hidden: Tensor,
    normal: Tensor,
    factors: Tensor | None,
    listed: _Pairs,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
) -> Tensor:
    """hidden [T, D] plus the experts' results [T, D] for the normalised rows [T, D].

    Args:
        factors: [T] float32, which are still to be multiplied with the rows, or None.
        listed: the pairs, as a router has written them.
        gate_up, down, activation: as for the op.
    """
    routing_weights, members, counts, slots_done = listed
    (num_rows, top_k), (num_experts, size, width) = routing_weights.shape, down.shape
    pairs = num_rows * top_k
    first, second = _tiles(pairs, down)
    tiles = num_pair_tiles(pairs, num_experts, first["BLOCK_M"])
    shared = {"SLOTS": top_k, "NUM_EXPERTS": num_experts}
    first |= {"N": width, "K": size, "ACTIVATION": activation, **shared}
    second |= {"N": size, "K": width, **shared}
    inner = normal.new_empty((pairs, width))
    gate_up_kernel[(tiles, triton.cdiv(width, first["BLOCK_N"]))](
        inner,
        normal,
        factors,
        gate_up,
        members,
        counts,
        num_rows,
        **first,
    )
    out = torch.empty_like(hidden)
    down_kernel[(tiles, slots_done.shape[1])](
        out,
        hidden.new_empty((pairs, size), dtype=torch.float32),
        slots_done,
        inner,
        down,
        routing_weights,
        hidden,
        members,
        counts,
        num_rows,
        **second,
    )
    return out


def _tiles(pairs: int, down: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tiles of gate and up, and of down."""
    num_experts, size, width = down.shape
    itemsize, early = down.element_size(), starts_early(down.device)
    return (
        experts_constants(pairs, num_experts, size, itemsize, is_gated=True, early=early),
        experts_constants(pairs, num_experts, width, itemsize, is_gated=False, early=early),
    )
