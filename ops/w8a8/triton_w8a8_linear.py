"""The Triton kernel of `w8a8_linear` on CUDA: both operands have 8 bits.

The matrix units multiply floats (e4m3) or integers. Sums of integers are exact. Sums of floats are
added in float32 after at most 128 products, because the matrix units of compute capability 9.0 keep
fewer bits. The sum of a group is multiplied by its scales, and groups are added in float32.

As in ops/gpu_quantized/, weights are the left operand, so a step of few rows needs less padding. If
the result has too few tiles to fill the GPU, programs also divide K.

Large steps over e4m3 matrices with a scale for each row run `torch._scaled_mm`. On an H200 the
products agree with plain torch. Whole bfloat16 models with such matrices are not yet verified on
hardware.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.gpu_quantized.triton_quantized_linear import (
    Launch,
    add_parts_kernel,
    parts_of_columns,
)
from ostinato.ops.w8a8.round_rows import InputScales
from ostinato.ops.w8a8.triton_round_rows import round_rows_on_cuda

__all__ = (
    "Operands",
    "check_operands",
    "fits_scaled_mm",
    "multiply_rounded_tile",
    "scaled_mm",
    "w8a8_linear_kernel",
    "w8a8_linear_launch",
    "w8a8_linear_on_cuda",
    "w8a8_tile_constants",
)

_ADDED = 1024  # columns that a program of `add_parts_kernel` sums
_SCALED_MM_ROWS = 64  # steps of more rows run `torch._scaled_mm` where it fits


class Operands(NamedTuple):
    """What the kernels' constants depend on."""

    out_features: int
    in_features: int
    group_size: int  # columns of the weight that share a scale; in_features = all
    inputs: InputScales
    dtype: torch.dtype  # of both operands

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "N": self.out_features,
            "K": self.in_features,
            "GROUP": self.group_size,
            "IS_GROUPED": self.groups > 1,
            "INPUT_GROUPS": self.groups if self.inputs is InputScales.group else 1,
            "IS_FLOAT": self.dtype == torch.float8_e4m3fn,
        }


@triton.jit
def multiply_rounded_tile(
    x, x_scales, x_row, row_ok, weight, scales, column, first, last,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, IS_GROUPED: tl.constexpr,
    INPUT_GROUPS: tl.constexpr, IS_FLOAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of rows of x and rows of the matrix, for the steps [first, last) of K.

    A step is BLOCK_K columns of one group.

    Args:
        x_row: [BLOCK_M] int64 rows of x.
        row_ok: [BLOCK_M] which of these rows exist.
        weight: [N, K]
        scales: [groups, N] float32
        column: [BLOCK_N] rows of the matrix.

    Returns:
        [BLOCK_N, BLOCK_M] float32
    """
    column_ok = column < N
    wide_column = column.to(tl.int64)[:, None]
    if IS_GROUPED or IS_FLOAT:
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for step in range(first, last):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        left_ok = column_ok[:, None]
        right_ok = row_ok[None, :]
        if K % BLOCK_K != 0:
            left_ok = left_ok & (k < K)[None, :]
            right_ok = right_ok & (k < K)[:, None]
        zero = 0.0 if IS_FLOAT else 0
        left = tl.load(weight + wide_column * K + k[None, :], mask=left_ok, other=zero)
        right = tl.load(x + x_row[None, :] * K + k[:, None], mask=right_ok, other=zero)
        if IS_FLOAT:
            product = tl.dot(left, right, max_num_imprecise_acc=BLOCK_K)
        else:
            product = tl.dot(left, right, out_dtype=tl.int32)
        if IS_GROUPED:
            group = step * BLOCK_K // GROUP
            scale = tl.load(scales + group * N + column, mask=column_ok, other=0.0)
            scaled = product.to(tl.float32) * scale[:, None]
            if INPUT_GROUPS > 1:
                place = x_scales + x_row * INPUT_GROUPS + group
                scaled *= tl.load(place, mask=row_ok, other=0.0)[None, :]
            sums += scaled
        else:
            sums += product
    result = sums.to(tl.float32)
    if not IS_GROUPED:
        result *= tl.load(scales + column, mask=column_ok, other=0.0)[:, None]
    if INPUT_GROUPS == 1:
        result *= tl.load(x_scales + x_row, mask=row_ok, other=0.0)[None, :]
    return result


@triton.jit(do_not_specialize=["num_rows"])
def w8a8_linear_kernel(
    out,  # [parts, T, N] float32, or [T, N]
    x,  # [T, K]
    x_scales,  # [T, INPUT_GROUPS] float32
    weight,  # [N, K]
    scales,  # [groups, N] float32
    bias,  # [N] or None
    residual,  # [T, N] or None
    num_rows,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    INPUT_GROUPS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # the number of parts is no constant, because it depends on T
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for each block of columns of the result, block of rows and part of K."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_ok = row < num_rows
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    per_part = tl.cdiv(steps, tl.num_programs(2))
    first = tl.program_id(2) * per_part
    last = tl.minimum(first + per_part, steps)
    sums = multiply_rounded_tile(
        x, x_scales, row, row_ok, weight, scales, column, first, last,
        N, K, GROUP, IS_GROUPED, INPUT_GROUPS, IS_FLOAT, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    stored = (column < N)[:, None] & row_ok[None, :]
    if not IS_SPLIT:
        if bias is not None:
            more = tl.load(bias + column, mask=column < N, other=0.0)
            sums += more.to(tl.float32)[:, None]
        if residual is not None:
            before = residual + row[None, :] * residual_stride + column[:, None]
            sums += tl.load(before, mask=stored, other=0.0).to(tl.float32)
    part = tl.program_id(2).to(tl.int64)
    target = out + (part * num_rows + row[None, :]) * N + column[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=stored)


def w8a8_tile_constants(operands: Operands, num_rows: int) -> dict[str, Any]:
    """The constants of `multiply_rounded_tile` for `num_rows` rows of one matrix."""
    block_m = next((size for size in (16, 32, 64) if num_rows <= size), 128)
    size = operands.group_size if operands.groups > 1 else 128  # a step lies in one group
    return operands.constants | {
        "BLOCK_M": block_m,
        "BLOCK_N": 128 if block_m >= 64 else 64,
        "BLOCK_K": min(128, size),
        "num_warps": 8 if block_m >= 64 else 4,
        "num_stages": 3 if block_m >= 64 else 4,
    }


def w8a8_linear_launch(operands: Operands, num_rows: int) -> Launch:
    """The launch of `w8a8_linear_kernel`."""
    constants = w8a8_tile_constants(operands, num_rows)
    tiles = -(-operands.out_features // constants["BLOCK_N"])
    rows = -(-num_rows // constants["BLOCK_M"])
    steps = -(-operands.in_features // constants["BLOCK_K"])
    split = parts_of_columns(tiles * rows, -(-steps // 2))
    return Launch((tiles, rows, split), constants | {"IS_SPLIT": split > 1})


def fits_scaled_mm(operands: Operands, num_rows: int, out_dtype: torch.dtype) -> bool:
    """Whether `torch._scaled_mm` multiplies a step of this size. It depends on shapes alone."""
    is_float = operands.dtype == torch.float8_e4m3fn
    is_by_row = operands.groups == 1 and operands.inputs is not InputScales.group
    is_aligned = operands.out_features % 16 == 0 and operands.in_features % 16 == 0
    is_wanted = num_rows > _SCALED_MM_ROWS and out_dtype == torch.bfloat16
    return is_float and is_by_row and is_aligned and is_wanted


def scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """The product by `torch._scaled_mm` in bfloat16. The residual is added to the rounded product.

    Args:
        x: [T, K] float8_e4m3fn
        x_scales: [T, 1] float32
        weight: [N, K] float8_e4m3fn
        scales: [1, N] float32
        bias: [N] bfloat16, or None.
        residual: [T, N] bfloat16, or None.
    """
    product = torch._scaled_mm(x, weight.t(), x_scales, scales, bias=bias, out_dtype=torch.bfloat16)
    return product if residual is None else product.add_(residual)


def check_operands(x: Tensor, weight: Tensor, scales: Tensor, operands: Operands) -> None:
    """Check the arguments of the kernels in this folder.

    Raises:
        ValueError: a dtype, shape or stride is not supported.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x is {x.dtype}; it must be bfloat16, float16 or float32")
    if x.stride(-1) != 1:
        raise ValueError(f"x has strides {x.stride()}; its rows must be contiguous")
    size = operands.group_size
    if operands.groups > 1 and (size < 32 or size & (size - 1)):
        raise ValueError(f"groups have {size} columns, not a power of two of at least 32")
    expected = (operands.out_features, operands.in_features)
    if tuple(weight.shape[-2:]) != expected or not weight.is_contiguous():
        raise ValueError(
            f"the weight has shape {tuple(weight.shape)} and strides {weight.stride()}; it must be "
            f"contiguous {expected}"
        )
    expected = (operands.groups, operands.out_features)
    if tuple(scales.shape[-2:]) != expected or not scales.is_contiguous():
        raise ValueError(
            f"the scales have shape {tuple(scales.shape)} and strides {scales.stride()}; they must "
            f"be contiguous {expected}"
        )


def w8a8_linear_on_cuda(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    float32_output: bool,
    group_size: int,
    inputs: InputScales,
    powers: bool,
) -> Tensor:
    """`w8a8_linear` (ops/w8a8/w8a8_linear.py).

    Raises:
        ValueError: a dtype, shape or stride is not supported.
    """
    num_rows, in_features = x.shape
    operands = Operands(len(weight), in_features, group_size, inputs, weight.dtype)
    check_operands(x, weight, scales, operands)
    if residual is not None and residual.stride(-1) != 1:
        raise ValueError(
            f"w8a8_linear: the residual has strides {residual.stride()}; its rows must be "
            "contiguous"
        )
    dtype = torch.float32 if float32_output else x.dtype
    out = x.new_empty((num_rows, len(weight)), dtype=dtype)
    if num_rows == 0:
        return out
    rounded, x_scales = round_rows_on_cuda(
        x, weight.dtype, inputs, group_size, input_scale, powers=powers
    )
    if fits_scaled_mm(operands, num_rows, dtype):
        return scaled_mm(rounded, x_scales, weight, scales, bias, residual)
    launch = w8a8_linear_launch(operands, num_rows)
    split = launch.grid[2]
    sums = out
    if split > 1:
        sums = x.new_empty((split, num_rows, len(weight)), dtype=torch.float32)
    residual_stride = residual.stride(0) if residual is not None and num_rows > 1 else len(weight)
    w8a8_linear_kernel[launch.grid](
        sums,
        rounded,
        x_scales,
        weight,
        scales,
        bias,
        residual,
        num_rows,
        residual_stride,
        **launch.constants,
    )
    if split > 1:
        block = min(_ADDED, triton.next_power_of_2(len(weight)))
        last: dict[str, Any] = {"N": len(weight), "BLOCK_N": block, "num_warps": 4}
        add_parts_kernel[(num_rows, triton.cdiv(len(weight), block))](
            sums, bias, residual, out, split, num_rows, residual_stride, **last
        )
    return out
