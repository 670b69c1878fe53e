"""Counts the bytes and operations of expert kernels, for tokens routed to random experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ostinato.benchmarks.gpu.without_device.lowering import Launch, own_launch

__all__ = ("fused_experts_launches", "read_weights")


def read_weights(weight: Tensor, num_tokens: int, slots: int) -> int:
    """Bytes of the matrices [experts, N, K] that random tokens are routed to, on average."""
    num_experts = len(weight)
    return round(weight.nbytes * (1 - (1 - slots / num_experts) ** num_tokens))


def fused_experts_launches(args: tuple[Any, ...], result: Tensor) -> Iterator[Launch]:
    """The four kernels of a call of `fused_experts` (ops/fused/triton_expert_kernels.py).

    Args:
        args: the arguments of the op.
        result: the result of the op.
    """
    x, output_weight, _, residual, _, _, router, _, gate_up, down, slots = args[:11]
    (num_tokens, width), pairs, (num_experts, size, inner) = x.shape, len(x) * slots, down.shape
    name = f"{size} x {width}, residual"
    read = x.nbytes + output_weight.nbytes + residual.nbytes
    yield own_launch(name, read, result.nbytes, 2 * x.shape[0] * output_weight.numel())

    logits, lists = 4 * num_tokens * num_experts, 4 * (pairs + num_experts)
    read = result.nbytes + router.nbytes + logits
    written = result.nbytes + logits + 4 * pairs + lists
    name = f"router, {num_experts} x {size}"
    yield own_launch(name, read, written, 2 * num_tokens * router.numel())

    itemsize, products = x.element_size(), 4 * pairs * size
    read = result.nbytes + read_weights(gate_up, num_tokens, slots) + lists
    name = f"experts, {2 * inner} x {size}, {args[-1]}"
    yield own_launch(name, read, pairs * inner * itemsize, 4 * pairs * size * inner)

    read = pairs * inner * itemsize + read_weights(down, num_tokens, slots) + lists
    read += products + 4 * pairs + result.nbytes
    name = f"experts, {size} x {inner}, sum, residual"
    yield own_launch(name, read, products + result.nbytes, 2 * pairs * size * inner)
