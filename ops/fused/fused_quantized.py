"""The op `ostinato::fused_quantized_linear`: a quantised product and what is around it, on CUDA.

It is for quantised weights what `fused_linear` and `linear_and_scale` are for plain ones: the same
parts of a layer in one kernel. If a result has too few tiles to fill the GPU, programs also divide
K. The last program of a tile adds the sums of all programs in ascending order. It is found with a
counter, which an earlier kernel has cleared (`scale_rows_and_clear`). So no kernel that adds parts
is launched. On other devices the op runs as plain torch. Tests compare the kernels with this.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.activation import ACTIVATIONS, activate
from ostinato.ops.fused.fused_linear import plain_scaled_rows
from ostinato.ops.quantized_reference import QuantFormat, dequantize_linear_weight
from ostinato.ops.register import register_op

__all__ = (
    "COUNTERS_OF_PRODUCT",
    "fused_quantized_linear",
    "quantized_linear_and_scale",
)

COUNTERS_OF_PRODUCT = 256
"""Counters that a product may use: one for each tile, if K is divided."""


def fused_quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    form: QuantFormat,
    counters: Tensor,
    number: int,
    *,
    order: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """`activation(x @ W.T / rms + bias) + residual`, each part only if its argument is given.

    Args:
        x: [T, K] in bfloat16 or float32, last dimension contiguous.
        weight: the bytes of W [N, K] (ops/quantized.py); with an activation [2 N, K], gate and up.
        bias: [N] (or [2 N]) in x's dtype, or None.
        out_features: N.
        form: the format of the weight.
        counters: int32 zeros, at least `(number + 1) * COUNTERS_OF_PRODUCT`. On CUDA those from
            `number * COUNTERS_OF_PRODUCT` on are changed.
        number: which counters the call uses. Calls with the same counters differ in it.
        order: [K] int32, as for `quantized_linear`, or None.
        squares, eps, activation, residual: as for `fused_linear`.

    Returns:
        [T, N] contiguous, in x's dtype. On CUDA it is rounded once; plain torch rounds after each
        part.

    Raises:
        ValueError: on CUDA, a dtype, shape or stride is not as above.
    """
    kind = ACTIVATIONS[activation] if activation else ""
    around = (squares, eps, kind, residual, None)
    return _op(x, weight, bias, out_features, order, *around, counters, number, *form)[0]


def quantized_linear_and_scale(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    form: QuantFormat,
    counters: Tensor,
    number: int,
    residual: Tensor,
    norm_weight: Tensor,
    *,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_and_scale` with a quantised W; arguments, results and errors as for the two ops."""
    around = (None, 0.0, "", residual, norm_weight)
    return _op(x, weight, bias, out_features, order, *around, counters, number, *form)


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    order: Tensor | None,
    squares: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    counters: Tensor,
    number: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    width = out_features * (2 if activation else 1)
    matrix = dequantize_linear_weight(weight, form, width, x.shape[1])
    given = x if order is None else x[:, order.long()]
    result = F.linear(given.float(), matrix.float())
    if squares is not None:
        result = result * torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + eps)
    result = result.to(x.dtype) if bias is None else (result + bias).to(x.dtype)
    if activation:
        name = next(name for name, found in ACTIVATIONS.items() if found == activation)
        result = activate(result, name, gated=True)
    if residual is not None:
        result = result + residual
    if norm_weight is None:
        nothing = result.new_empty((len(x), 0))
        return result, nothing, nothing.float()
    return (result, *plain_scaled_rows(result, norm_weight))


def _on_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    kernels = import_module("ostinato.ops.fused.triton_fused_quantized")
    return kernels.launch_quantized(*arguments)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    order: Tensor | None,
    squares: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    counters: Tensor,
    number: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    result = x.new_empty((x.shape[0], out_features))
    is_scaled = norm_weight is not None
    return (
        result,
        x.new_empty((x.shape[0], out_features if is_scaled else 0)),
        x.new_empty((x.shape[0], int(is_scaled)), dtype=torch.float32),
    )


_op = register_op(
    "fused_quantized_linear",
    {"CompositeExplicitAutograd": _plain, "CUDA": _on_cuda},
    fake=_fake,
    mutates=("counters",),
)
