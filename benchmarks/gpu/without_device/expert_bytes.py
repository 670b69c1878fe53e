"""Counts the bytes and operations of expert kernels, for tokens routed to random experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ostinato.benchmarks.gpu.without_device.kernels import OwnLaunch
from ostinato.benchmarks.gpu.without_device.lowering import Launch, own_launch

__all__ = ("fused_experts_launches", "read_weights")


def read_weights(weight: Tensor, num_tokens: int, slots: int) -> int:
    """Bytes of the matrices [experts, N, K] that random tokens are routed to, on average."""
    num_experts = len(weight)
    return round(weight.nbytes * (1 - (1 - slots / num_experts) ** num_tokens))


def fused_experts_launches(
    args: tuple[Any, ...], result: Tensor, kernels: list[OwnLaunch]
) -> Iterator[Launch]:
    """This project's kernels in a call of `fused_experts` (ops/fused/triton_expert_kernels.py).

    Args:
        args: the arguments of the op.
        result: the result of the op.
        kernels: what the call launches. cuBLAS computes the output projection if none of them does.
    """
    x, output_weight, _, residual, _, _, router, _, gate_up, down, slots = args[:11]
    (num_tokens, width), pairs, (num_experts, size, inner) = x.shape, len(x) * slots, down.shape
    flop = 2 * num_tokens * output_weight.numel(), 2 * num_tokens * router.numel()
    projection = x.nbytes + output_weight.nbytes + residual.nbytes
    logits, lists = 4 * num_tokens * num_experts, 4 * (pairs + num_experts)
    routed = result.nbytes + 4 * pairs + lists
    if kernels[0].name == "output_router_kernel":
        # Each program stores a part of all logits; programs read all parts, and those of groups.
        tiles = kernels[0].constants["TILES"]
        parts = (tiles + -(-tiles // kernels[0].constants["GROUP"])) * logits
        name = f"{size} x {width}, residual, router, {num_experts} x {size}"
        read = projection + router.nbytes + parts
        yield own_launch(name, read, result.nbytes + routed + parts, sum(flop))
    else:
        adds = kernels[0].name == "router_kernel"
        if not adds:
            name = f"{size} x {width}, residual"
            yield own_launch(name, projection, result.nbytes, flop[0])
        read = result.nbytes + router.nbytes + logits + residual.nbytes * adds
        name = "residual, " * adds + f"router, {num_experts} x {size}"
        yield own_launch(name, read, routed + logits + result.nbytes * adds, flop[1])

    itemsize, products = x.element_size(), 4 * pairs * size
    read = result.nbytes + read_weights(gate_up, num_tokens, slots) + lists
    name = f"experts, {2 * inner} x {size}, {args[-2]}"
    yield own_launch(name, read, pairs * inner * itemsize, 4 * pairs * size * inner)

    read = pairs * inner * itemsize + read_weights(down, num_tokens, slots) + lists
    read += products + 4 * pairs + result.nbytes
    name = f"experts, {size} x {inner}, sum, residual"
    yield own_launch(name, read, products + result.nbytes, 2 * pairs * size * inner)
