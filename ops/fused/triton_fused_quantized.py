"""The Triton kernels of `ostinato::fused_quantized_linear`.

The products are those of ops/gpu_quantized/triton_quantized_linear.py: without matrix units for up
to 4 rows, with them for more. What is around a product is that of triton_epilogue.py.

If programs divide K, each stores its sums, then adds 1 to the counter of its tile. The program that
is last reads all sums in ascending order of K and finishes the tile. So the result does not depend
on which program is last.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.fused.fused_linear import FUSED_DTYPES
from ostinato.ops.fused.fused_quantized import COUNTERS_OF_PRODUCT
from ostinato.ops.fused.triton_epilogue import finish_tile, is_last_of, norm_factor
from ostinato.ops.gpu_quantized.packed_bytes import (
    check_operands,
    format_constants,
    typed_views,
)
from ostinato.ops.gpu_quantized.triton_quantized_linear import (
    FEW_ROWS,
    Launch,
    multiply_few,
    multiply_tile,
    parts_of_columns,
    steps_of_part,
    tile_constants,
    units_of_part,
)
from ostinato.ops.linear.packed_linear import PANEL
from ostinato.ops.quantized_reference import QuantFormat

__all__ = (
    "few_rows_fused_kernel",
    "few_rows_fused_launch",
    "launch_quantized",
    "many_rows_fused_kernel",
    "many_rows_fused_launch",
)


@triton.jit
def _finish(
    out, scaled, new_squares, parts, counters, bias, squares, residual, norm_weight, acc, acc_up,
    row, column, num_rows, residual_stride, eps, N: tl.constexpr, K: tl.constexpr,
    ACTIVATION: tl.constexpr, SQUARES: tl.constexpr, BLOCK_S: tl.constexpr,
    IS_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finish a tile, or store this program's sums if others of the tile are not done yet."""
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    num_parts = tl.num_programs(2)
    is_last = num_parts == 1
    if IS_SPLIT:  # noqa: SIM102 - known when the kernel is compiled
        if num_parts > 1:
            width: tl.constexpr = N if ACTIVATION == "" else 2 * N
            ok = (row < num_rows)[:, None] & (column < N)[None, :]
            place = row.to(tl.int64)[:, None] * width + column[None, :]
            size = num_rows.to(tl.int64) * width
            mine = parts + tl.program_id(2) * size + place
            tl.store(mine, acc, mask=ok)
            if ACTIVATION != "":
                tl.store(mine + N, acc_up, mask=ok)
            is_last = is_last_of(num_parts, counters + tl.program_id(1) * num_tiles + tile)
            if is_last:
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for part in range(num_parts):
                    source = parts + part * size + place
                    acc += tl.load(source, mask=ok, other=0.0)
                    if ACTIVATION != "":
                        acc_up += tl.load(source + N, mask=ok, other=0.0)
    if is_last:
        factor = norm_factor(squares, row, num_rows, eps, K, SQUARES, BLOCK_S, BLOCK_M)
        finish_tile(
            out, scaled, new_squares, bias, residual, norm_weight, acc, acc_up, squares, factor,
            row, column, num_rows, residual_stride, tile, num_tiles, N, ACTIVATION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "eps"])
def few_rows_fused_kernel(
    out,  # [T, N] contiguous
    scaled,  # [T, N] contiguous, out * norm_weight, or None
    new_squares,  # [T, column tiles] float32, sums of the squares of out; None as `scaled` is
    parts,  # [SPLIT, T, N or 2 N] float32, or None
    counters,  # [column tiles] int32 zeros, or None as `parts` is
    x,  # [T, K]
    words,  # the weight as int32
    factors,  # the weight in the dtype of its scales
    order,  # [K] int32 or None
    bias,  # [N] or [2 N], or None
    squares,  # [T, SQUARES] float32, whose sum divides the products, or None
    residual,  # [T, N] or None
    norm_weight,  # [N]; None as `scaled` is
    num_rows,  # T
    x_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    HEADER: tl.constexpr,
    UNIT: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two, at least SQUARES
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,  # 1, 2 or 4, at least num_rows
    BLOCK_N: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """One program for each block of columns of the result and each part of K."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    row_ok = row < num_rows
    width: tl.constexpr = N if ACTIVATION == "" else 2 * N
    begin, end = units_of_part(K, UNIT, SPLIT, BLOCK_U)
    acc = multiply_few(
        x, row, row_ok, x_stride, words, factors, order, column, begin, end,
        width, K, KIND, BITS, GROUP, SYMMETRIC, HEADER, UNIT, PANEL_BYTES, ROWS, BLOCK_N, BLOCK_U,
    )  # fmt: skip
    acc_up = acc
    if ACTIVATION != "":
        acc_up = multiply_few(
            x, row, row_ok, x_stride, words, factors, order, column + N, begin, end, width, K,
            KIND, BITS, GROUP, SYMMETRIC, HEADER, UNIT, PANEL_BYTES, ROWS, BLOCK_N, BLOCK_U,
        )  # fmt: skip
    _finish(
        out, scaled, new_squares, parts, counters, bias, squares, residual, norm_weight, acc,
        acc_up, row, column, num_rows, residual_stride, eps, N, K, ACTIVATION, SQUARES, BLOCK_S,
        SPLIT > 1, ROWS, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "eps"])
def many_rows_fused_kernel(
    out,  # [T, N] contiguous
    scaled,  # [T, N] contiguous, out * norm_weight, or None
    new_squares,  # [T, column tiles] float32, sums of the squares of out; None as `scaled` is
    parts,  # [parts, T, N or 2 N] float32, or None
    counters,  # [row tiles * column tiles] int32 zeros, or None as `parts` is
    x,  # [T, K]
    words,  # the weight as int32
    factors,  # the weight in the dtype of its scales
    order,  # [K] int32 or None
    bias,  # [N] or [2 N], or None
    squares,  # [T, SQUARES] float32, whose sum divides the products, or None
    residual,  # [T, N] or None
    norm_weight,  # [N]; None as `scaled` is
    num_rows,  # T
    x_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    HEADER: tl.constexpr,
    UNIT: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two, at least SQUARES
    IS_SPLIT: tl.constexpr,  # there may be parts; their number is no constant: it depends on T
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for each block of columns of the result, block of rows and part of K."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_ok = row < num_rows
    width: tl.constexpr = N if ACTIVATION == "" else 2 * N
    first, last = steps_of_part(K, GROUP, BLOCK_K)
    sums = multiply_tile(
        x, row * x_stride, row_ok, words, factors, order, column, first, last, width, K, KIND,
        BITS, GROUP, SYMMETRIC, HEADER, UNIT, PANEL_BYTES, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    acc = tl.trans(sums)
    acc_up = acc
    if ACTIVATION != "":
        sums = multiply_tile(
            x, row * x_stride, row_ok, words, factors, order, column + N, first, last, width, K,
            KIND, BITS, GROUP, SYMMETRIC, HEADER, UNIT, PANEL_BYTES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc_up = tl.trans(sums)
    _finish(
        out, scaled, new_squares, parts, counters, bias, squares, residual, norm_weight, acc,
        acc_up, row, column, num_rows, residual_stride, eps, N, K, ACTIVATION, SQUARES, BLOCK_S,
        IS_SPLIT, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def few_rows_fused_launch(
    form: QuantFormat, num_rows: int, out_features: int, in_features: int, activation: str
) -> Launch:
    """The launch of `few_rows_fused_kernel`, without the sums of squares.

    Args:
        form: the format of the weight.
        num_rows: T, at most 4.
        out_features: N, columns of the result.
        in_features: K.
        activation: its name in the kernel; empty = none.
    """
    shared = _shared_constants(form, out_features, in_features, activation)
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


def many_rows_fused_launch(
    form: QuantFormat,
    num_rows: int,
    out_features: int,
    in_features: int,
    activation: str,
    dtype: torch.dtype,
) -> Launch:
    """The launch of `many_rows_fused_kernel`, without the sums of squares.

    Args:
        form, num_rows, out_features, in_features, activation: as for `few_rows_fused_launch`.
        dtype: that of x.
    """
    tile = tile_constants(form, num_rows, dtype)
    # Twice as many tiles need half as many parts. Parts are written and read in float32.
    if tile["BLOCK_M"] == 64 or activation:
        tile["BLOCK_N"] = min(tile["BLOCK_N"], 64)
    constants = _shared_constants(form, out_features, in_features, activation) | tile
    tiles, rows = -(-out_features // tile["BLOCK_N"]), -(-num_rows // tile["BLOCK_M"])
    most = -(-in_features // (2 * tile["BLOCK_K"]))
    # Whether there may be parts does not depend on T: each tile is compiled once.
    constants["IS_SPLIT"] = parts_of_columns(tiles, most) > 1
    return Launch((tiles, rows, parts_of_columns(tiles * rows, most)), constants)


def _shared_constants(
    form: QuantFormat, out_features: int, in_features: int, activation: str
) -> dict[str, Any]:
    width = out_features * (2 if activation else 1)
    constants = format_constants(form, width, in_features)
    return constants | {"N": out_features, "ACTIVATION": activation}


def launch_quantized(
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
    """`fused_quantized_linear` with the kernels; arguments as for the op.

    Raises:
        ValueError: a dtype, shape or stride is not supported, or there are too few counters.
    """
    num_rows, in_features = x.shape
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    _check(x, weight, form, out_features * (2 if activation else 1), residual)
    sizes = (form, num_rows, out_features, in_features, activation)
    if num_rows <= FEW_ROWS:
        kernel, launch = few_rows_fused_kernel, few_rows_fused_launch(*sizes)
    else:
        kernel, launch = many_rows_fused_kernel, many_rows_fused_launch(*sizes, x.dtype)
    tiles, row_tiles, split = launch.grid
    own = counters[number * COUNTERS_OF_PRODUCT : (number + 1) * COUNTERS_OF_PRODUCT]
    if split > 1 and tiles * row_tiles > len(own):
        raise ValueError(
            f"fused_quantized_linear: {len(counters)} counters hold no {tiles * row_tiles} for "
            f"call {number}; give {(number + 1) * COUNTERS_OF_PRODUCT} or more"
        )
    out = x.new_empty((num_rows, out_features))
    scales_rows = norm_weight is not None
    scaled = out.new_empty((num_rows, out_features if scales_rows else 0))
    new_squares = out.new_empty((num_rows, tiles if scales_rows else 0), dtype=torch.float32)
    if num_rows == 0:
        return out, scaled, new_squares
    width = out_features * (2 if activation else 1)
    parts = x.new_empty((split if split > 1 else 0, num_rows, width), dtype=torch.float32)
    num_squares = 1 if squares is None else squares.shape[1]
    norm: dict[str, Any] = {"SQUARES": num_squares, "BLOCK_S": triton.next_power_of_2(num_squares)}
    kernel[launch.grid](
        out,
        scaled if scales_rows else None,
        new_squares if scales_rows else None,
        parts,
        own,
        x,
        *typed_views(weight, form),
        order,
        bias,
        squares,
        residual,
        norm_weight,
        num_rows,
        # A single row may have any stride. Triton would compile the kernel again for some strides.
        x.stride(0) if num_rows > 1 else in_features,
        residual.stride(0) if residual is not None and num_rows > 1 else out_features,
        eps,
        **launch.constants | norm,
    )
    return out, scaled, new_squares


def _check(
    x: Tensor, weight: Tensor, form: QuantFormat, width: int, residual: Tensor | None
) -> None:
    if x.dtype not in FUSED_DTYPES:
        raise ValueError(f"fused_quantized_linear: x is {x.dtype}; it must be bfloat16 or float32")
    check_operands(x, weight, form, width, x.shape[1])
    if residual is not None and residual.stride(-1) != 1:
        raise ValueError(
            f"fused_quantized_linear: the residual has strides {residual.stride()}; its rows must "
            "be contiguous; call .contiguous() on it"
        )
