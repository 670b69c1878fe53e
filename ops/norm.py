"""Normalisation: `ostinato::rms_norm` and `layer_norm` on CPUs, plain torch on other devices.

On a GPU, plain torch is fastest, because Inductor fuses it with its neighbours. On a CPU, each
function is one op with a C++ kernel (ops/native/rows). So a first start does not
compile C++ from Inductor, which would take ten seconds. Until the kernels are loaded, these ops run
as plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.register import by_device, register_op

__all__ = (
    "layer_norm",
    "plain_rms_norm",
    "plain_scale_by_squares",
    "plain_square_sums",
    "rms_norm",
    "scale_by_squares",
    "square_sums",
)


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


def square_sums(q: Tensor, k: Tensor) -> Tensor:
    """The sums of the squares of the rows of two matrices, computed in float32.

    Args:
        q: [T, Dq], last dimension contiguous.
        k: [T, Dk] in q's dtype, last dimension contiguous.

    Returns:
        [T, 2] float32, contiguous: the sums of q, the sums of k.
    """
    return _square_sums(q, k)


def scale_by_squares(
    x: Tensor, weight: Tensor, squares: Tensor, column: int, count: int, eps: float
) -> Tensor:
    """`rms_norm` of a part of each row, whose root mean square comes from the sum of all squares.

    Args:
        x: [T, D], last dimension contiguous: the part.
        weight: [D], as for `rms_norm`.
        squares: [T, C] float32.
        column: which column of `squares` has the sum of the squares of x's whole rows.
        count: elements of a whole row.
        eps: added to the mean square.

    Returns:
        [T, D] in x's dtype, rounded as by `rms_norm`.
    """
    return _scale_by_squares(x, weight, squares, column, count, eps)


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


def plain_square_sums(q: Tensor, k: Tensor) -> Tensor:
    """`square_sums` in plain torch."""
    return torch.stack((q.float().square().sum(-1), k.float().square().sum(-1)), 1)


def plain_scale_by_squares(
    x: Tensor, weight: Tensor, squares: Tensor, column: int, count: int, eps: float
) -> Tensor:
    """`scale_by_squares` in plain torch."""
    wide = x.float() * torch.rsqrt(squares[:, column, None] / count + eps)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


def _square_sums_fake(q: Tensor, k: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], 2), dtype=torch.float32)


def _scale_fake(
    x: Tensor, weight: Tensor, squares: Tensor, column: int, count: int, eps: float
) -> Tensor:
    return x.new_empty(x.shape)


def _layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


_rms_norm = by_device(
    register_op("rms_norm", {"CompositeExplicitAutograd": plain_rms_norm}, fake=_rms_norm_fake),
    plain_rms_norm,
)
_square_sums = by_device(
    register_op(
        "square_sums", {"CompositeExplicitAutograd": plain_square_sums}, fake=_square_sums_fake
    ),
    plain_square_sums,
)
_scale_by_squares = by_device(
    register_op(
        "scale_by_squares", {"CompositeExplicitAutograd": plain_scale_by_squares}, fake=_scale_fake
    ),
    plain_scale_by_squares,
)
_layer_norm = by_device(
    register_op(
        "layer_norm", {"CompositeExplicitAutograd": _plain_layer_norm}, fake=_layer_norm_fake
    ),
    _plain_layer_norm,
)
