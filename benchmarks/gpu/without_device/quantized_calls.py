"""The launches of quantised matrix products: what `quantized_linear` runs on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.benchmarks.gpu.without_device.kernels import OwnLaunch, recorded_launches
from ostinato.benchmarks.gpu.without_device.lowering import Launch, own_launch
from ostinato.benchmarks.gpu.without_device.model_programs import ModelPrograms
from ostinato.models.decoder import DecoderBlock
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.layers.mlp import GatedMLP
from ostinato.models.weight_methods.grouped import QuantizedMatrix
from ostinato.ops.gpu_quantized.triton_quantized_linear import quantized_linear_on_cuda

__all__ = ("QUANTIZED_OP", "QuantizedCall", "quantized_calls")

QUANTIZED_OP = "quantized_linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCall:
    """A call of `quantized_linear`."""

    launches: tuple[Launch, ...]
    kernels: tuple[OwnLaunch, ...]
    ideal_bytes: int  # weights, operand, residual and result once


def quantized_calls(
    programs: ModelPrograms, num_tokens: int, num_rows: int, arch: int
) -> list[QuantizedCall]:
    """The quantised products of a layer in their order, inside `fake_device`.

    Args:
        programs: the model's programs. Its first layer stands for all layers.
        num_tokens: rows of the QKV projection.
        num_rows: rows of the other products; fewer than `num_tokens` in the last layer.
        arch: the compute capability as one number.
    """
    block = programs.model.layers[0]
    assert isinstance(block, DecoderBlock), f"{type(block).__name__} is not a DecoderBlock"
    attention, mlp = block.self_attn, block.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP):
        return []
    products = (
        (attention.qkv_proj, num_tokens, False),
        (attention.o_proj, num_rows, True),
        (mlp.gate_up_proj, num_rows, False),
        (mlp.down_proj, num_rows, True),
    )
    with programs.mode, torch.inference_mode():
        return [
            _call(linear, rows, programs.dtype, arch, has_residual=has_residual)
            for linear, rows, has_residual in products
            if isinstance(linear.method, QuantizedMatrix)
        ]


def _call(
    linear: LinearBase, rows: int, dtype: torch.dtype, arch: int, *, has_residual: bool
) -> QuantizedCall:
    spec, weight, method = linear.spec, linear.weights["weight"], linear.method
    assert isinstance(method, QuantizedMatrix), f"{type(method).__name__} is not quantised"
    x = torch.empty(rows, spec.in_features, dtype=dtype, device="cuda")
    residual = x.new_empty(rows, spec.out_features) if has_residual else None
    out = (spec.out_features, False, residual, linear.weights.get("order"))
    with recorded_launches(arch) as kernels:
        result = quantized_linear_on_cuda(x, weight, linear.bias, *out, method.form(spec))
    added = 0 if residual is None else residual.nbytes
    return QuantizedCall(
        launches=tuple(_launches(x, weight, result, added, kernels)),
        kernels=tuple(kernels),
        ideal_bytes=x.nbytes + weight.nbytes + added + result.nbytes,
    )


def _launches(
    x: Tensor, weight: Tensor, result: Tensor, added: int, kernels: list[OwnLaunch]
) -> Iterator[Launch]:
    """The product, and the sum of its parts if its programs divide the columns of the matrix."""
    split = kernels[0].grid[2]
    parts = 4 * split * result.numel()
    name = f"{result.shape[1]} x {x.shape[1]}, quantised"
    flop = 2 * result.numel() * x.shape[1]
    if split == 1:
        yield own_launch(name, x.nbytes + weight.nbytes + added, result.nbytes, flop)
        return
    yield own_launch(name, x.nbytes + weight.nbytes, parts, flop)
    yield own_launch("sum of parts", parts + added, result.nbytes, 0)
