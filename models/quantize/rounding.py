"""Rounds a matrix to integers with a scale for each group of a row.

`round_to_nearest` rounds each weight by itself. `round_by_hessian` is GPTQ (Frantar et al.,
arXiv:2210.17323): it rounds one column after the other. After each column it changes the columns
that are not rounded yet, so that the products with the activations of the calibration text change
least.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = (
    "BLOCK",
    "Grid",
    "Rounded",
    "choose_grid",
    "damped",
    "round_by_hessian",
    "round_to_nearest",
)

BLOCK = 128
"""Columns of a block. After a block is rounded, all later columns are corrected at once."""

_SHRUNK = tuple(1.0 - 0.04 * step for step in range(12))  # fractions of a range that are tried
_DAMPING = 0.01  # added to the Hessian's diagonal, as a fraction of its mean


class Grid(NamedTuple):
    """The scales and zero points of a matrix [N, K]. They define the possible weights."""

    bits: int
    group_size: int
    scales: Tensor  # [N, groups] float32, rounded to the stored dtype
    zeros: Tensor  # [N, groups] float32, the integers that stand for zero

    def spread(self, columns: int) -> tuple[Tensor, Tensor]:
        """Scales and zeros [N, K]."""
        group = torch.arange(columns) // self.group_size
        return self.scales[:, group], self.zeros[:, group]

    def nearest(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """The nearest integers from 0 to 2**bits - 1."""
        return (torch.round(values / scales) + zeros).clamp(0, (1 << self.bits) - 1)


class Rounded(NamedTuple):
    """A matrix as integers."""

    grid: Grid
    values: Tensor  # [N, K] uint8

    def restored(self) -> Tensor:
        """The weights that the integers stand for, float32."""
        scales, zeros = self.grid.spread(self.values.shape[1])
        return (self.values.float() - zeros) * scales


def choose_grid(
    weight: Tensor,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    *,
    symmetric: bool,
    importance: Tensor | None = None,
) -> Grid:
    """The scales and zero points of a matrix.

    Without `importance` a grid spans all values of its group, and zero. With `importance` a few
    narrower grids are tried too, and the grid with the least weighted squared error is taken.

    Args:
        weight: [N, K] float32.
        bits: the size of an integer.
        group_size: columns that share a scale; it divides K.
        dtype: the dtype of stored scales.
        symmetric: zero is the middle of the integers.
        importance: [K] float32, the weight of each column in that error.
    """
    rows, columns = weight.shape
    groups = weight.view(rows, columns // group_size, group_size)
    weights = None if importance is None else importance.view(-1, group_size)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for part in (1.0,) if weights is None else _SHRUNK:
        scales, zeros = _grid_of(low * part, high * part, bits, dtype, symmetric=symmetric)
        if weights is None:
            return Grid(bits, group_size, scales, zeros)
        tried = Grid(bits, group_size, scales, zeros)
        spread = scales[..., None], zeros[..., None]
        restored = (tried.nearest(groups, *spread) - spread[1]) * spread[0]
        error = ((restored - groups).square() * weights).sum(2)
        if best is not None:
            better = error < best[0]
            error = torch.where(better, error, best[0])
            scales = torch.where(better, scales, best[1])
            zeros = torch.where(better, zeros, best[2])
        best = error, scales, zeros
    assert best is not None, "one grid is tried"
    return Grid(bits, group_size, best[1], best[2])


def _grid_of(
    low: Tensor, high: Tensor, bits: int, dtype: torch.dtype, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    most = float((1 << bits) - 1)
    scales = torch.maximum(-low, high) * 2 / most if symmetric else (high - low) / most
    least = torch.finfo(dtype).tiny
    scales = scales.clamp(min=max(least, 1e-6)).to(dtype).float()
    if symmetric:
        return scales, torch.full_like(scales, float(1 << (bits - 1)))
    return scales, torch.round(-low / scales).clamp(1, most)


def round_to_nearest(weight: Tensor, grid: Grid) -> Rounded:
    """Round every weight of [N, K] to its nearest integer."""
    values = grid.nearest(weight, *grid.spread(weight.shape[1]))
    return Rounded(grid, values.to(torch.uint8))


def round_by_hessian(weight: Tensor, grid: Grid, hessian: Tensor) -> Rounded:
    """GPTQ. Columns with large activations are rounded first. Each column keeps its group.

    Args:
        weight: [N, K] float32.
        grid: the grid of the same matrix.
        hessian: [K, K] float32, the damped mean of x x^T over the calibration text.
    """
    columns = weight.shape[1]
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    scales, zeros = (each[:, order] for each in grid.spread(columns))
    inverse = _inverse_factor(hessian[order][:, order])
    left = weight[:, order].clone()
    values = torch.empty_like(left)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = torch.empty(weight.shape[0], end - begin)
        for column in range(begin, end):
            scale, zero = scales[:, column], zeros[:, column]
            value = grid.nearest(left[:, column], scale, zero)
            values[:, column] = value
            error = (left[:, column] - (value - zero) * scale) / inverse[column, column]
            left[:, column:end] -= error[:, None] * inverse[column, column:end]
            errors[:, column - begin] = error
        left[:, end:] -= errors @ inverse[begin:end, end:]
    return Rounded(grid, values[:, order.argsort()].to(torch.uint8))


def damped(hessian: Tensor) -> Tensor:
    """A Hessian that can be inverted, even if it comes from few tokens."""
    mean = float(hessian.diagonal().mean())
    return hessian + torch.eye(len(hessian)) * (_DAMPING * mean if mean > 0 else 1.0)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, computed in float64."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian.double()))
    return torch.linalg.cholesky(inverse, upper=True).float()
