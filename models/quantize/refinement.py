"""Improves a rounded matrix for the activations of a text: scales and integers in turns.

`refine` lowers the squared error of products. With the integers given, the best scales of a row
solve a small linear system. With the scales given, one column after the other gets its best
integers while all others stay, as in QuantEase (arXiv:2309.01885). A step that would raise a row's
error is not taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.models.quantize.rounding import BLOCK, Rounded

__all__ = ("refine",)

_ROUNDS = 4
# The system also keeps each scale near its previous value. This is the weight of that term, as a
# fraction of the mean of the system's diagonal.
_PULL = 1e-4
_MOST_CHANGE = 2.0  # a scale changes by at most this factor
_SYSTEM_VALUES = 1 << 22  # values of the systems that are solved at once


def refine(rounded: Rounded, target: Tensor, hessian: Tensor, dtype: torch.dtype) -> Rounded:
    """Lower the error `(w - t) H (w - t)^T` of each row w; t is its target, H the Hessian.

    Args:
        rounded: a matrix [N, K].
        target: [N, K] float32, the weights that it stands for.
        hessian: [K, K] float32, the damped mean of x x^T over the calibration text.
        dtype: the dtype of stored scales.
    """
    for _ in range(_ROUNDS):
        rounded = _better_scales(rounded, target, hessian, dtype)
        rounded = _better_integers(rounded, target, hessian)
    return rounded


def _better_scales(
    rounded: Rounded, target: Tensor, hessian: Tensor, dtype: torch.dtype
) -> Rounded:
    grid = rounded.grid
    units = rounded.values.float() - grid.spread(target.shape[1])[1]
    scales = grid.scales.clone()
    wanted = target @ hessian
    num_rows = max(1, _SYSTEM_VALUES // scales.shape[1] ** 2)
    for rows in torch.arange(len(target)).split(num_rows):
        scales[rows] = _solved(units[rows], wanted[rows], scales[rows], hessian, dtype)
    return Rounded(grid._replace(scales=scales), rounded.values)


def _solved(
    units: Tensor, wanted: Tensor, scales: Tensor, hessian: Tensor, dtype: torch.dtype
) -> Tensor:
    """The scales s [R, groups] with the least error `s^T A s - 2 b^T s`.

    A (`system`) has `u_i H u_j^T` for the units u_i and u_j of any two groups, where H is the
    Hessian. b (`right`) has the products of `wanted` and the units of each group.

    Args:
        units: [R, K] the integers without their zero points.
        wanted: [R, K] target times Hessian.
        scales: [R, groups] the previous scales.
        hessian: [K, K] float32.
        dtype: the dtype of stored scales.
    """
    num_rows, groups = scales.shape
    system = torch.empty(num_rows, groups, groups, dtype=torch.float64)
    size = units.shape[1] // groups
    for group in range(groups):
        columns = slice(group * size, (group + 1) * size)
        products = (units[:, columns] @ hessian[columns]) * units
        system[:, group] = products.view(num_rows, groups, size).sum(2)
    right = (wanted * units).view(num_rows, groups, size).sum(2).double()
    diagonal = system.diagonal(dim1=1, dim2=2)
    pull = diagonal.mean(1, keepdim=True) * _PULL + torch.finfo(torch.float32).tiny
    pulled = system + torch.diag_embed(pull.expand_as(diagonal))
    before = scales.double()
    found = torch.linalg.solve(pulled, right + pull * before).to(dtype).double()
    allowed = (found >= before / _MOST_CHANGE) & (found <= before * _MOST_CHANGE)
    found = torch.where(allowed, found, before)

    def error(tried: Tensor) -> Tensor:
        return ((system @ tried[:, :, None])[:, :, 0] * tried - 2 * right * tried).sum(1)

    is_better = error(found) < error(before)
    return torch.where(is_better[:, None], found, before).float()


def _better_integers(rounded: Rounded, target: Tensor, hessian: Tensor) -> Rounded:
    grid, columns = rounded.grid, target.shape[1]
    scales, zeros = grid.spread(columns)
    values = rounded.values.float()
    left = (target - rounded.restored()) @ hessian  # half of the negative gradient of the error
    diagonal = hessian.diagonal()
    for begin in range(0, columns, BLOCK):
        block = slice(begin, min(begin + BLOCK, columns))
        near, within = left[:, block].clone(), hessian[block, block]
        changes = torch.empty_like(near)
        for column in range(block.start, block.stop):
            scale, zero = scales[:, column], zeros[:, column]
            place = column - begin
            now = (values[:, column] - zero) * scale
            value = grid.nearest(now + near[:, place] / diagonal[column], scale, zero)
            change = (value - values[:, column]) * scale
            values[:, column] = value
            near -= change[:, None] * within[place]
            changes[:, place] = change
        left -= changes @ hessian[block]
    return Rounded(grid, values.to(torch.uint8))
