"""Normalisation: `ostinato::rms_norm` and `layer_norm` on CPUs, plain torch on other devices.

On a GPU, plain torch is fastest, because Inductor fuses it with its neighbours. On a CPU, each
function is one op with a C++ kernel (ops/native/rows/elementwise.cpp). So a first start does not
compile C++ from Inductor, which would take ten seconds. Until the kernels are loaded, these ops run
as plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.register import by_device, register_op

__all__ = ("layer_norm", "plain_rms_norm", "rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Divide the last dimension by its root mean square, computed in float32, and scale it.

    Args:
        x: [T, D], last dimension contiguous.
        weight: [D], in x's dtype or in float32. With a float32 weight the normalised value is
            scaled before it is rounded to x's dtype.
        eps: added to the mean square.
        residual: [T, D] in x's dtype, added to the result; None = nothing.

    Returns:
        [T, D] in x's dtype (Zhang and Sennrich 2019, arXiv:1910.07467). A CPU rounds once. Other
        devices round after each operation, as in the training of the models.
    """
    return _rms_norm(x, weight, eps, residual)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Mean and variance normalisation of the last dimension (Ba et al. 2016, arXiv:1607.06450).

    Args:
        x: [T, D], last dimension contiguous.
        weight: [D], in x's dtype.
        bias: [D], in x's dtype.
        eps: added to the variance.

    Returns:
        [T, D] in x's dtype, computed in float32.
    """
    return _layer_norm(x, weight, bias, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`rms_norm` of any shape in plain torch."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled = (wide.to(weight.dtype) * weight).to(x.dtype)
    return scaled if residual is None else scaled + residual


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


def _layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


_rms_norm = by_device(
    register_op("rms_norm", {"CompositeExplicitAutograd": plain_rms_norm}, fake=_rms_norm_fake),
    plain_rms_norm,
)
_layer_norm = by_device(
    register_op(
        "layer_norm", {"CompositeExplicitAutograd": _plain_layer_norm}, fake=_layer_norm_fake
    ),
    _plain_layer_norm,
)
