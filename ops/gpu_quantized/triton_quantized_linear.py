"""The Triton kernels of `quantized_linear` on CUDA.

Activations keep their dtype. A weight, before it is multiplied by its scale, is exact in that
dtype, so no weight is rounded. The products of some columns of one group are added in float32.
Their sum is multiplied by the group's scale and added to the result, also in float32.

`few_rows_kernel` is for steps of at most 4 rows. It does not use matrix units: every weight is read
and widened once and multiplied by all rows. `many_rows_kernel` gives the weights to the matrix
units as the left operand, and the rows of x as the right one. The right operand may be narrower
than the left one, so a step of few rows needs less padding. If the result has too few tiles to fill
the GPU, programs also divide K, and `add_parts_kernel` adds their sums in ascending order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.gpu_quantized.packed_bytes import (
    check_operands,
    format_constants,
    typed_views,
)
from ostinato.ops.gpu_quantized.triton_values import (
    factors_of,
    one_value,
    unit_base,
    unit_values,
    unit_words,
)
from ostinato.ops.linear.packed_linear import PANEL
from ostinato.ops.quantized_reference import QuantFormat

__all__ = (
    "FEW_ROWS",
    "Launch",
    "add_parts_kernel",
    "few_rows_kernel",
    "few_rows_launch",
    "many_rows_kernel",
    "many_rows_launch",
    "multiply_few",
    "multiply_tile",
    "parts_of_columns",
    "quantized_linear_on_cuda",
    "steps_of_part",
    "tile_constants",
    "units_of_part",
)

FEW_ROWS = 4
"""The most rows that the kernel without matrix units multiplies."""
_PROGRAMS = 264  # fill a GPU of 132 multiprocessors twice
_ADDED = 1024  # columns that a program of `add_parts_kernel` sums


class Launch(NamedTuple):
    """The grid of a launch and the constants of its kernel."""

    grid: tuple[int, int, int]
    constants: dict[str, Any]  # with num_warps and num_stages


@triton.jit
def _source_columns(order, k, K: tl.constexpr):
    """The columns of x that are multiplied by columns k of the weight."""
    if order is not None:
        k = tl.load(order + k, mask=k < K, other=0)
    return k


@triton.jit
def multiply_few(
    x, row, row_ok, x_stride, words, factors, order, column, begin, end,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, HEADER: tl.constexpr, UNIT: tl.constexpr, PANEL_BYTES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """The product of up to 4 rows of x and rows of the matrix, for the units [begin, end) of K.

    Args:
        row: [ROWS] rows of x.
        row_ok: [ROWS] which of these rows exist.
        column: [BLOCK_N] rows of the matrix.

    Returns:
        [ROWS, BLOCK_N] float32
    """
    sums = tl.zeros([ROWS, BLOCK_N, BLOCK_U], tl.float32)
    wide_column = column[:, None]
    for start in range(begin, end, BLOCK_U):
        unit = (start + tl.arange(0, BLOCK_U))[None, :]
        mask = (wide_column // 32 < (N + 31) // 32) & (unit < end)
        base = unit_base(wide_column, unit, GROUP, HEADER, UNIT, BITS, PANEL_BYTES)
        scale, zero = factors_of(factors, base, wide_column, mask, KIND, BITS, SYMMETRIC)
        word = unit_words(words, base, wide_column, unit, mask, GROUP, HEADER, UNIT)
        products = tl.zeros([ROWS, BLOCK_N, BLOCK_U], tl.float32)
        added = tl.zeros([ROWS, 1, BLOCK_U], tl.float32)
        for i in tl.static_range(UNIT):
            value = one_value(word, (i % 4) * 8 + (i // 4) * 4, zero, KIND, BITS)
            k = unit * UNIT + i
            source = _source_columns(order, k, K)
            inside = row_ok[:, None, None] & ((k < K) & (unit < end))[None, :, :]
            pointers = x + row[:, None, None] * x_stride + source[None, :, :]
            wide = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            products += value[None, :, :] * wide
            if KIND == "minimums":
                added += wide
        sums += products * scale[None, :, :]
        if KIND == "minimums":
            sums -= added * zero[None, :, :]
    return tl.sum(sums, 2)


@triton.jit
def units_of_part(K: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr, BLOCK_U: tl.constexpr):
    """The units [begin, end) of K that a program of `few_rows_kernel` multiplies."""
    units: tl.constexpr = (K + 7) // 8 * 8 // UNIT
    per_part: tl.constexpr = ((units + SPLIT - 1) // SPLIT + BLOCK_U - 1) // BLOCK_U * BLOCK_U
    begin = tl.program_id(2) * per_part
    return begin, tl.minimum(begin + per_part, units)


@triton.jit
def steps_of_part(K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The steps [first, last) of K that a program of `many_rows_kernel` multiplies."""
    steps: tl.constexpr = (K + GROUP - 1) // GROUP * ((GROUP + BLOCK_K - 1) // BLOCK_K)
    per_part = tl.cdiv(steps, tl.num_programs(2))
    first = tl.program_id(2) * per_part
    return first, tl.minimum(first + per_part, steps)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    out,  # [SPLIT, T, N] float32, or [T, N]
    x,  # [T, K]
    words,  # the weight as int32
    factors,  # the weight in the dtype of its scales
    order,  # [K] int32 or None
    bias,  # [N] or None
    residual,  # [T, N] or None
    num_rows,
    x_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    HEADER: tl.constexpr,
    UNIT: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,  # 1, 2 or 4, at least num_rows
    BLOCK_N: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """One program for each block of columns of the result and each part of K."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    row_ok = row < num_rows
    begin, end = units_of_part(K, UNIT, SPLIT, BLOCK_U)
    total = multiply_few(
        x, row, row_ok, x_stride, words, factors, order, column, begin, end,
        N, K, KIND, BITS, GROUP, SYMMETRIC, HEADER, UNIT, PANEL_BYTES, ROWS, BLOCK_N, BLOCK_U,
    )  # fmt: skip
    stored = row_ok[:, None] & (column < N)[None, :]
    if SPLIT == 1:
        if bias is not None:
            more = tl.load(bias + column, mask=column < N, other=0.0)
            total += more.to(tl.float32)[None, :]
        if residual is not None:
            before = residual + row[:, None] * residual_stride + column[None, :]
            total += tl.load(before, mask=stored, other=0.0).to(tl.float32)
    target = out + (tl.program_id(2) * num_rows + row[:, None]) * N + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def multiply_tile(
    x, x_row, row_ok, words, factors, order, column, first, last,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, HEADER: tl.constexpr, UNIT: tl.constexpr, PANEL_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of rows of x and rows of the matrix, for the steps [first, last) of K.

    A step is BLOCK_K columns of one group.

    Args:
        x_row: [BLOCK_M] where the rows of x begin.
        row_ok: [BLOCK_M] which of these rows exist.
        column: [BLOCK_N] rows of the matrix.

    Returns:
        [BLOCK_N, BLOCK_M] float32
    """
    steps: tl.constexpr = (GROUP + BLOCK_K - 1) // BLOCK_K  # of a group
    wide_column = column[:, None]
    panel_ok = wide_column // 32 < (N + 31) // 32
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first, last):
        group_k = step // steps * GROUP
        within = (step % steps) * BLOCK_K
        depth = within + tl.arange(0, BLOCK_K)
        k = group_k + depth
        source = _source_columns(order, k, K)
        right = tl.load(
            x + x_row[None, :] + source[:, None],
            mask=row_ok[None, :] & ((depth < GROUP) & (k < K))[:, None],
            other=0.0,
        )
        local = within // UNIT + tl.arange(0, BLOCK_K // UNIT)
        unit = (group_k // UNIT + local)[None, :]
        unit_ok = ((local < GROUP // UNIT) & (group_k + local * UNIT < (K + 7) // 8 * 8))[None, :]
        first_unit = tl.zeros_like(wide_column) + group_k // UNIT
        base = unit_base(wide_column, first_unit, GROUP, HEADER, UNIT, BITS, PANEL_BYTES)
        scale, zero = factors_of(factors, base, wide_column, panel_ok, KIND, BITS, SYMMETRIC)
        values = unit_values(
            words, base, wide_column, unit, zero, panel_ok & unit_ok,
            GROUP, HEADER, UNIT, KIND, BITS,
        )  # fmt: skip
        left = tl.reshape(values, [BLOCK_N, BLOCK_K]).to(right.dtype)
        sums += tl.dot(left, right, input_precision="ieee") * scale
        if KIND == "minimums":
            sums -= zero * tl.sum(right.to(tl.float32), 0)[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def many_rows_kernel(
    out,  # [parts, T, N] float32, or [T, N]
    x,  # [T, K]
    words,  # the weight as int32
    factors,  # the weight in the dtype of its scales
    order,  # [K] int32 or None
    bias,  # [N] or None
    residual,  # [T, N] or None
    num_rows,
    x_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    HEADER: tl.constexpr,
    UNIT: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # the number of parts is no constant, because it depends on T
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for each block of columns of the result, block of rows and part of K."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_ok = row < num_rows
    first, last = steps_of_part(K, GROUP, BLOCK_K)
    sums = multiply_tile(
        x, row * x_stride, row_ok, words, factors, order, column, first, last,
        N, K, KIND, BITS, GROUP, SYMMETRIC, HEADER, UNIT, PANEL_BYTES, BLOCK_M, BLOCK_N, BLOCK_K,
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


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def add_parts_kernel(
    parts,  # [num_parts, T, N] float32
    bias,  # [N] or None
    residual,  # [T, N] or None
    out,  # [T, N]
    num_parts,
    num_rows,
    residual_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program for each row and BLOCK_N columns: the sum over the parts of K."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    total = tl.zeros([BLOCK_N], tl.float32)
    for part in range(num_parts):
        place = (part * num_rows + row) * N + column
        total += tl.load(parts + place, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        before = residual + row * residual_stride + column
        total += tl.load(before, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=inside)


def few_rows_launch(
    form: QuantFormat, num_rows: int, out_features: int, in_features: int
) -> Launch:
    """The launch of `few_rows_kernel`: small tiles, because each program has all rows."""
    shared = format_constants(form, out_features, in_features)
    block_u = min(16, triton.next_power_of_2(-(-in_features // shared["UNIT"])))
    tiles = -(-out_features // PANEL)
    split = parts_of_columns(tiles, -(-in_features // (shared["UNIT"] * block_u)))
    constants = shared | {
        "SPLIT": split,
        "ROWS": triton.next_power_of_2(num_rows),
        "BLOCK_N": PANEL,
        "BLOCK_U": block_u,
        "num_warps": 4,
        "num_stages": 3,
    }
    return Launch((tiles, 1, split), constants)


def many_rows_launch(
    form: QuantFormat, num_rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> Launch:
    """The launch of `many_rows_kernel`.

    Args:
        form: the format of the weight.
        num_rows: T.
        out_features: N.
        in_features: K.
        dtype: that of x.
    """
    constants = format_constants(form, out_features, in_features) | tile_constants(
        form, num_rows, dtype
    )
    tiles = -(-out_features // constants["BLOCK_N"])
    rows = -(-num_rows // constants["BLOCK_M"])
    split = parts_of_columns(tiles * rows, -(-in_features // (2 * constants["BLOCK_K"])))
    return Launch((tiles, rows, split), constants | {"IS_SPLIT": split > 1})


def tile_constants(form: QuantFormat, num_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """The constants of `multiply_tile` for `num_rows` rows of one matrix."""
    # A step lies in one group. The matrix units multiply at least 16 columns.
    power = form.group_size & -form.group_size
    block_k = min(128, max(16, power))
    if dtype == torch.float32:  # multiplied without tensor cores
        tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": min(32, block_k)}
        return tile | {"num_warps": 4, "num_stages": 2}
    block_m = next((size for size in (16, 32, 64) if num_rows <= size), 128)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 128 if block_m >= 64 else 64,
        "BLOCK_K": min(64, block_k) if block_m == 128 else block_k,
        "num_warps": 8 if block_m >= 64 else 4,
        "num_stages": 3,
    }


def parts_of_columns(tiles: int, most: int) -> int:
    """How many parts of K, at most `most`, a launch of `tiles` tiles needs to fill the GPU."""
    return max(1, min(8, most, _PROGRAMS // tiles))


def quantized_linear_on_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None,
    order: Tensor | None,
    form: QuantFormat,
) -> Tensor:
    """`quantized_linear` (ops/quantized.py) without rounding the activations.

    Raises:
        ValueError: a dtype, shape or stride is not supported.
    """
    num_rows, in_features = x.shape
    check_operands(x, weight, form, out_features, in_features)
    if residual is not None and residual.stride(-1) != 1:
        raise ValueError(
            f"quantized_linear: the residual has strides {residual.stride()}; its rows must be "
            "contiguous"
        )
    dtype = torch.float32 if float32_output else x.dtype
    out = x.new_empty((num_rows, out_features), dtype=dtype)
    if num_rows == 0:
        return out
    if num_rows <= FEW_ROWS:
        kernel, launch = few_rows_kernel, few_rows_launch(form, num_rows, out_features, in_features)
    else:
        kernel = many_rows_kernel
        launch = many_rows_launch(form, num_rows, out_features, in_features, x.dtype)
    split = launch.grid[2]
    sums = out
    if split > 1:
        sums = x.new_empty((split, num_rows, out_features), dtype=torch.float32)
    # A single row may have any stride. Triton would compile the kernel again for some strides.
    x_stride = x.stride(0) if num_rows > 1 else in_features
    residual_stride = residual.stride(0) if residual is not None and num_rows > 1 else out_features
    kernel[launch.grid](
        sums,
        x,
        *typed_views(weight, form),
        order,
        bias,
        residual,
        num_rows,
        x_stride,
        residual_stride,
        **launch.constants,
    )
    if split > 1:
        block = min(_ADDED, triton.next_power_of_2(out_features))
        last: dict[str, Any] = {"N": out_features, "BLOCK_N": block, "num_warps": 4}
        add_parts_kernel[(num_rows, triton.cdiv(out_features, block))](
            sums, bias, residual, out, split, num_rows, residual_stride, **last
        )
    return out
