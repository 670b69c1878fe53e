"""The launches that a call of `route` or `moe_linear` makes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.benchmarks.gpu.without_device.expert_bytes import read_weights
from ostinato.benchmarks.gpu.without_device.kernels import OwnLaunch, recorded_launches
from ostinato.benchmarks.gpu.without_device.lowering import By, Launch
from ostinato.benchmarks.gpu.without_device.model_programs import ModelPrograms, counted_ops
from ostinato.models.decoder import DecoderBlock
from ostinato.models.layers.moe import MoE
from ostinato.ops.moe.routing import route_on_cuda
from ostinato.ops.moe.triton_moe_linear import moe_linear_on_cuda

__all__ = ("EXPERT_OPS", "ExpertCall", "expert_calls")

EXPERT_OPS = ("route", "moe_linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """A call of an op of experts."""

    op: str  # one of `EXPERT_OPS`
    launches: tuple[Launch, ...]
    kernels: tuple[OwnLaunch, ...]  # the launches of this project's kernels
    ideal_bytes: int  # of a matrix product: weights, operand and result once


def expert_calls(programs: ModelPrograms, num_tokens: int, arch: int) -> list[ExpertCall]:
    """The calls of a layer's mixture of experts; none if the layer has no experts.

    This must be called inside `fake_device`.

    A step is assumed to route each token to random experts.

    Args:
        programs: the model's programs. Its first layer stands for all layers.
        num_tokens: rows of the MLP.
        arch: the compute capability as one number.
    """
    block = programs.model.layers[0]
    if not isinstance(block, DecoderBlock) or not isinstance(block.mlp, MoE):
        return []
    calls: list[ExpertCall] = []
    size = (num_tokens, programs.config.hidden_size)
    with programs.mode, torch.inference_mode():
        x = torch.empty(size, dtype=programs.dtype, device="cuda")
        with _Recording(calls, arch):
            block.mlp(x, torch.empty_like(x))
    return calls


class _Recording(TorchDispatchMode):
    def __init__(self, calls: list[ExpertCall], arch: int) -> None:
        super().__init__()
        self._calls = calls
        self._arch = arch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kernels: list[OwnLaunch]
        if func is torch.ops.ostinato.route.default:
            with recorded_launches(self._arch) as kernels, counted_ops() as others:
                result = route_on_cuda(*args)
            launches = [*others, *(_routing(args[0], *result) for _ in kernels)]
            self._add("route", launches, kernels, 0)
            return result
        if func is torch.ops.ostinato.moe_linear.default:
            with recorded_launches(self._arch) as kernels, counted_ops() as others:
                result = moe_linear_on_cuda(*args)
            launches = [*others, *_products(args, result, kernels)]
            x, ids, weight = args[:3]
            ideal = x.nbytes + read_weights(weight, *ids.shape) + result.nbytes
            self._add("moe_linear", launches, kernels, ideal)
            return result
        return func(*args, **(kwargs or {}))

    def _add(self, op: str, launches: list[Launch], kernels: list[OwnLaunch], ideal: int) -> None:
        self._calls.append(
            ExpertCall(op=op, launches=tuple(launches), kernels=tuple(kernels), ideal_bytes=ideal)
        )


def _routing(logits: Tensor, ids: Tensor, weights: Tensor) -> Launch:
    return _launch("route", logits.nbytes + ids.nbytes + weights.nbytes, 0)


def _products(args: tuple[Any, ...], result: Tensor, kernels: list[OwnLaunch]) -> Iterator[Launch]:
    """The kernels of `moe_linear`: order, product, sum of slots."""
    x, ids, weight, _, routing_weights, residual = args
    pairs, (num_experts, width, depth) = ids.numel(), weight.shape
    for kernel in kernels:
        if kernel.name == "expert_order_kernel":
            yield _launch("pairs by expert", ids.nbytes + 8 * (pairs + num_experts), 0)
        elif kernel.name == "grouped_kernel":
            itemsize = x.element_size() if routing_weights is None else 4
            written = pairs * width * itemsize
            read = x.nbytes + read_weights(weight, *ids.shape) + 8 * (pairs + num_experts)
            name = f"experts, {width} x {depth}"
            yield _launch(name, read + written, 2 * pairs * width * depth)
        else:
            read = 4 * pairs * width + 4 * pairs + (0 if residual is None else residual.nbytes)
            yield _launch("sum of slots", read + result.nbytes, 0)


def _launch(name: str, num_bytes: int, num_flop: int) -> Launch:
    return Launch(
        by=By.own,
        name=name,
        num_bytes=sympy.Integer(num_bytes),
        input_bytes=sympy.Integer(num_bytes),
        num_flop=sympy.Integer(num_flop),
    )
