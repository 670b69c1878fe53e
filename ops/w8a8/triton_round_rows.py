"""The Triton kernels that round activations to 8 bits (ops/w8a8/round_rows.py)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.w8a8.round_rows import LARGEST, LEAST, InputScales

__all__ = (
    "groups_constants",
    "round_groups_kernel",
    "round_rows_on_cuda",
    "round_whole_rows_kernel",
    "rows_constants",
)

_COLUMNS = 8192  # columns that a program of `round_whole_rows_kernel` holds at once
_GROUPED = 2048  # columns of a program of `round_groups_kernel`
_INFINITY = tl.constexpr(float("inf"))
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a float32 to a whole number


@triton.jit
def _magnitudes(x):
    """Magnitudes in which a NaN is an infinity."""
    size = tl.abs(x)
    return tl.where(size < _INFINITY, size, _INFINITY)


@triton.jit
def _computed_scale(most, MOST: tl.constexpr, LEAST: tl.constexpr, POWERS: tl.constexpr):
    scale = tl.div_rn(tl.maximum(most, LEAST), tl.zeros_like(most) + MOST)
    if POWERS:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _rounded(x, scale, finite, MOST: tl.constexpr, IS_FLOAT: tl.constexpr):
    """`x / scale`, clipped and rounded to the 8-bit type. The arguments' shapes broadcast."""
    value = tl.div_rn(x, tl.zeros_like(x) + scale)
    value = tl.minimum(tl.maximum(value, -MOST), MOST)
    value = tl.where(finite, value, 0.0)
    return value.to(tl.float8e4nv) if IS_FLOAT else (value + _TO_WHOLE - _TO_WHOLE).to(tl.int8)


@triton.jit
def round_whole_rows_kernel(
    out,  # [T, K]
    scales,  # [T, 1]
    x,  # [T, K]
    given,  # [GIVEN] float32, whose largest number is the scale, or None
    x_stride,
    K: tl.constexpr,
    GIVEN: tl.constexpr,
    PADDED: tl.constexpr,  # power of two, at least GIVEN
    IS_FLOAT: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    POWERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + offsets
        part = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitudes(part))
    most = tl.max(largest, 0)
    finite = most < _INFINITY
    if given is not None:
        index = tl.arange(0, PADDED)
        scale = tl.max(tl.load(given + index, mask=index < GIVEN, other=0.0), 0)
    else:
        scale = _computed_scale(most, MOST, LEAST, POWERS)
    for start in range(0, K, BLOCK):
        k = start + offsets
        part = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(out + row * K + k, _rounded(part, scale, finite, MOST, IS_FLOAT), mask=k < K)
    tl.store(scales + row, tl.where(finite, scale, float("nan")))


@triton.jit
def round_groups_kernel(
    out,  # [T, K]
    scales,  # [T, groups]
    x,  # [T, K]
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # columns; a power of two
    IS_FLOAT: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    POWERS: tl.constexpr,
    BLOCK: tl.constexpr,  # groups
):
    """One program for each row and BLOCK groups of it."""
    row = tl.program_id(0).to(tl.int64)
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    part = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    most = tl.max(_magnitudes(part), 1)
    finite = most < _INFINITY
    scale = _computed_scale(most, MOST, LEAST, POWERS)
    values = _rounded(part, scale[:, None], finite[:, None], MOST, IS_FLOAT)
    tl.store(out + row * K + k, values, mask=k < K)
    place = scales + row * groups + group
    tl.store(place, tl.where(finite, scale, float("nan")), mask=group < groups)


def rows_constants(
    in_features: int, dtype: torch.dtype, num_given: int, *, powers: bool
) -> dict[str, Any]:
    """The constants of `round_whole_rows_kernel`."""
    block = min(_COLUMNS, triton.next_power_of_2(in_features))
    constants = {"K": in_features, "GIVEN": num_given, "BLOCK": block}
    constants["PADDED"] = triton.next_power_of_2(max(1, num_given))
    return constants | _shared(dtype, powers) | {"num_warps": 8 if block > 2048 else 4}


def groups_constants(
    in_features: int, group_size: int, dtype: torch.dtype, *, powers: bool
) -> dict[str, Any]:
    """The constants of `round_groups_kernel`."""
    groups = triton.next_power_of_2(-(-in_features // group_size))
    block = min(groups, max(1, _GROUPED // group_size))
    constants = {"K": in_features, "GROUP": group_size, "BLOCK": block}
    return constants | _shared(dtype, powers) | {"num_warps": 4}


def _shared(dtype: torch.dtype, powers: bool) -> dict[str, Any]:
    is_float = dtype == torch.float8_e4m3fn
    return {"IS_FLOAT": is_float, "MOST": LARGEST[dtype], "LEAST": LEAST, "POWERS": powers}


def round_rows_on_cuda(
    x: Tensor,
    dtype: torch.dtype,
    inputs: InputScales,
    group_size: int,
    input_scale: Tensor | None,
    *,
    powers: bool,
) -> tuple[Tensor, Tensor]:
    """`round_rows` (ops/w8a8/round_rows.py) for x with contiguous rows and any row stride."""
    num_rows, in_features = x.shape
    out = torch.empty((num_rows, in_features), dtype=dtype, device=x.device)
    groups = -(-in_features // group_size) if inputs is InputScales.group else 1
    scales = x.new_empty((num_rows, groups), dtype=torch.float32)
    if num_rows == 0:
        return out, scales
    # A single row may have any stride. Triton would compile the kernel again for some strides.
    x_stride = x.stride(0) if num_rows > 1 else in_features
    if inputs is InputScales.group:
        constants = groups_constants(in_features, group_size, dtype, powers=powers)
        grid = (num_rows, triton.cdiv(groups, constants["BLOCK"]))
        round_groups_kernel[grid](out, scales, x, x_stride, **constants)
        return out, scales
    given = input_scale if inputs is InputScales.static else None
    count = 0 if given is None else given.numel()
    constants = rows_constants(in_features, dtype, count, powers=powers)
    round_whole_rows_kernel[(num_rows,)](out, scales, x, given, x_stride, **constants)
    return out, scales
