"""How activations become 8-bit numbers: the formula in plain torch.

A row of x, or each group of its columns, gets one scale, the largest magnitude divided by the
largest 8-bit number. The rounded numbers are `x / scale`. They are floats (e4m3) or integers,
whichever the weight holds. With a stored scale (`static`), values beyond the range are clipped.

The Triton kernels of triton_round_rows.py compute the same bits.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ("LARGEST", "LEAST", "InputScales", "round_rows")

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The 8-bit types and their largest numbers."""
LEAST = 1e-10
"""A largest magnitude below this number counts as this number, so that no scale is zero."""


class InputScales(StrEnum):
    """Which part of x has a scale of its own."""

    row = "row"  # a row of x
    group = "group"  # as many columns of a row as a group of the weight has
    static = "static"  # none: the checkpoint states one scale for all of x


def round_rows(
    x: Tensor,
    dtype: torch.dtype,
    inputs: InputScales,
    group_size: int,
    input_scale: Tensor | None,
    *,
    powers: bool,
) -> tuple[Tensor, Tensor]:
    """Round activations to 8 bits.

    Args:
        x: [T, K].
        dtype: float8_e4m3fn or int8.
        inputs: which part of x has a scale.
        group_size: columns of a group.
        input_scale: float32 of any shape, of which the largest number is the scale; for `static`.
        powers: computed scales are rounded up to powers of two.

    Returns:
        [T, K] in `dtype`, and the scales, float32 [T, 1] or [T, groups]. The scale of a row or
        group with an infinity or a NaN is NaN.
    """
    num_rows, in_features = x.shape
    size = group_size if inputs is InputScales.group else in_features
    groups = -(-in_features // size)
    parts = pad(x.float(), (0, groups * size - in_features)).view(num_rows, groups, size)
    magnitude = parts.abs()
    # a NaN is not less than infinity
    most = torch.where(magnitude < torch.inf, magnitude, torch.inf).amax(2)
    if inputs is InputScales.static:
        assert input_scale is not None, "the checkpoint has a scale"
        scales = input_scale.amax().float().expand(num_rows, 1)
    else:
        scales = most.clamp(min=LEAST) / LARGEST[dtype]
        if powers:
            bits = scales.view(torch.int32)
            scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    finite = most < torch.inf
    largest = LARGEST[dtype]
    whole = (parts / scales[:, :, None]).clamp(-largest, largest)
    whole = torch.where(finite[:, :, None], whole, 0.0)
    if dtype == torch.int8:
        whole = whole.round()
    values = whole.view(num_rows, -1)[:, :in_features].to(dtype)
    return values, torch.where(finite, scales, torch.nan)
