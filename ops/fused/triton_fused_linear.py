"""The Triton kernels of `ostinato::fused_linear` and of its companions, for few rows.

A program computes BLOCK_N columns of the result for a tile of rows. It reads its rows of W once, so
the launch reads little more than W. An RMS norm before a product is computed in two parts, because
the scale of a row is a factor on the sums of that row:

    norm(x) @ W.T = ((x * norm_weight) @ W.T) / rms(x)

The first kernel writes x * norm_weight and sums of the squares of x. It is the kernel of the
product that computes x (`linear_and_scale`), or one of its own (`scale_rows`). The kernel of the
product with W adds these sums, and divides by their root mean square.

`norm_linear` takes any number of rows. More than `most_rows` run a whole norm and cuBLAS.

A column's sum runs over K in an order that depends on K, on the dtype and on the tile. There are
two tiles: for up to 16 rows and for more. So the other rows of a step can change the bits of a row
only by their number, which chooses the tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.fused.early_start import prefetch, starts_early, wait_for_previous_kernel
from ostinato.ops.fused.fused_linear import FUSED_DTYPES, most_rows
from ostinato.ops.fused.linear_tiles import choose_tile, device_limits, linear_constants
from ostinato.ops.fused.triton_epilogue import finish_tile, norm_factor

__all__ = (
    "fused_linear_kernel",
    "launch",
    "launch_linear_and_scale",
    "launch_norm_linear",
    "launch_scale_rows",
    "linear_by_cublas",
    "norm_rows_constants",
    "norm_rows_kernel",
    "prefetch_rows",
    "scale_rows_kernel",
    "weight_tile",
)

_SCALED = 1024  # columns of a program of `scale_rows_kernel`


@triton.jit
def weight_tile(weight, column, k, K: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr):  # fmt: skip
    """A [BLOCK_N, BLOCK_K] tile of W. Elements outside of W are read as 0."""
    pointers = weight + column[:, None].to(tl.int64) * K + k[None, :]
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(column < N)[:, None] & (k < K)[None, :], other=0.0)
    return tile


@triton.jit
def prefetch_rows(weight, column, K: tl.constexpr, N: tl.constexpr, PREFETCHED: tl.constexpr):
    """Prefetch the first PREFETCHED elements of rows of W."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    line = tl.arange(0, PREFETCHED // LINE if PREFETCHED > LINE else 1) * LINE % K
    prefetch(weight + (column % N)[:, None].to(tl.int64) * K + line[None, :])


@triton.jit(do_not_specialize=["num_rows", "eps"])
def fused_linear_kernel(
    out,  # [T, N] contiguous
    scaled,  # [T, N] contiguous, out * norm_weight, or None
    new_squares,  # [T, column tiles] float32, sums of the squares of out; None as `scaled` is
    x,  # [T, K]
    weight,  # [N, K] contiguous; [2 N, K] with an activation
    bias,  # [N] or [2 N], or None
    squares,  # [T, SQUARES] float32, whose sum divides the products, or None
    residual,  # [T, N], or None
    norm_weight,  # [N]; None as `scaled` is
    num_rows,  # T
    x_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two, at least SQUARES
    PREFETCHED: tl.constexpr,  # elements of each row of W, a power of two
    EARLY: tl.constexpr,
):
    """One program for each row tile and column tile of the result."""
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if EARLY:
        # The previous kernel does not write the weights, so their first tiles are loaded into the
        # device's cache while it ends.
        prefetch_rows(weight, column, K, N, PREFETCHED)
        if ACTIVATION != "":
            prefetch_rows(weight + N * K, column, K, N, PREFETCHED)
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < num_rows
    wide_row = row.to(tl.int64)
    factor = norm_factor(squares, row, num_rows, eps, K, SQUARES, BLOCK_S, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = x + wide_row[:, None] * x_stride + k[None, :]
        if K % BLOCK_K == 0:
            tile = tl.load(rows, mask=row_ok[:, None], other=0.0)
        else:
            tile = tl.load(rows, mask=row_ok[:, None] & (k < K)[None, :], other=0.0)
        columns = weight_tile(weight, column, k, K, N, BLOCK_N, BLOCK_K)
        acc = tl.dot(tile, tl.trans(columns), acc, input_precision="ieee")
        if ACTIVATION != "":
            columns = weight_tile(weight + N * K, column, k, K, N, BLOCK_N, BLOCK_K)
            acc_up = tl.dot(tile, tl.trans(columns), acc_up, input_precision="ieee")
    finish_tile(
        out, scaled, new_squares, bias, residual, norm_weight, acc, acc_up, squares, factor, row,
        column, num_rows, residual_stride, tl.program_id(1), tl.num_programs(1), N, ACTIVATION,
    )  # fmt: skip


@triton.jit
def scale_rows_kernel(
    scaled,  # [T, K] contiguous
    squares,  # [T, programs of a row] float32
    counters,  # [CLEARED] int32, set to zeros for later kernels, or None
    x,  # [T, K]
    norm_weight,  # [K]
    x_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEARED: tl.constexpr,  # 0 or a power of two
    EARLY: tl.constexpr,
):
    """One program for each row and BLOCK columns of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < K
    scale = tl.load(norm_weight + column, mask=ok, other=0.0).to(tl.float32)
    wait_for_previous_kernel(EARLY)
    if CLEARED:  # noqa: SIM102 - known when the kernel is compiled
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(counters + tl.arange(0, CLEARED), tl.zeros([CLEARED], tl.int32))
    wide = tl.load(x + row * x_stride + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(scaled + row * K + column, (wide * scale).to(scaled.dtype.element_ty), mask=ok)
    tl.store(squares + row * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide, 0))


@triton.jit(do_not_specialize=["eps"])
def norm_rows_kernel(
    normal,  # [T, K] contiguous
    counters,  # [CLEARED] int32, set to zeros for later kernels
    x,  # [T, K]
    norm_weight,  # [K]
    x_stride,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least K
    CLEARED: tl.constexpr,  # power of two
    EARLY: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < K
    scale = tl.load(norm_weight + column, mask=ok, other=0.0).to(tl.float32)
    wait_for_previous_kernel(EARLY)
    if tl.program_id(0) == 0:
        tl.store(counters + tl.arange(0, CLEARED), tl.zeros([CLEARED], tl.int32))
    wide = tl.load(x + row * x_stride + column, mask=ok, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
    tl.store(
        normal + row * K + column, (wide * factor * scale).to(normal.dtype.element_ty), mask=ok
    )


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    """`fused_linear` with the kernel; arguments as for the op.

    Raises:
        ValueError: the dtype is not one of `FUSED_DTYPES`, or a tensor does not fit `fused_linear`.
    """
    return _launch(x, weight, bias, squares, eps, activation, residual, None)[0]


def launch_linear_and_scale(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_and_scale` with the kernel; arguments and errors as for the op."""
    return _launch(x, weight, bias, None, 0.0, "", residual, norm_weight)


def launch_scale_rows(
    x: Tensor, norm_weight: Tensor, num_counters: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`scale_rows_and_clear` with the kernel; arguments and errors as for the op.

    With `num_counters=0` nothing is cleared.
    """
    _check_rows("x", x)
    num_rows, size = x.shape
    block = min(_SCALED, triton.next_power_of_2(size))
    scaled = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    squares = x.new_empty((num_rows, triton.cdiv(size, block)), dtype=torch.float32)
    counters = x.new_empty(num_counters, dtype=torch.int32)
    if num_rows:
        early = starts_early(x.device)
        constants: dict[str, Any] = {"K": size, "BLOCK": block, "CLEARED": num_counters}
        constants |= {"EARLY": early, "launch_pdl": early}
        scale_rows_kernel[squares.shape](
            scaled,
            squares,
            counters if num_counters else None,
            x,
            norm_weight,
            x.stride(0) if num_rows > 1 else size,
            **constants,
        )
    return scaled, squares, counters


def norm_rows_constants(size: int, num_counters: int, *, early: bool) -> dict[str, Any]:
    """The constants of `norm_rows_kernel` for rows of `size` values, launch options included."""
    block = triton.next_power_of_2(size)
    return {
        "K": size,
        "BLOCK": block,
        "CLEARED": num_counters,
        "EARLY": early,
        "launch_pdl": early,
        "num_warps": 4 if block <= 2048 else 8,
    }


def launch_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    num_counters: int,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` on CUDA; arguments and errors as for the op."""
    num_rows, size = x.shape
    if num_rows <= most_rows(x.dtype):
        scaled, squares, counters = launch_scale_rows(x, norm_weight, num_counters)
        return launch(scaled, weight, bias, squares, eps, "", None), counters
    counters = x.new_empty(num_counters, dtype=torch.int32)
    normal = x.new_empty((num_rows, size))
    constants = norm_rows_constants(size, num_counters, early=starts_early(x.device))
    norm_rows_kernel[(num_rows,)](normal, counters, x, norm_weight, x.stride(0), eps, **constants)
    return linear_by_cublas(normal, weight, bias), counters


def linear_by_cublas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ W.T [K, N] + bias, one launch."""
    if bias is None:
        return torch.mm(x, weight.t())
    return torch.addmm(bias, x, weight.t())


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and what `linear_and_scale` returns besides it; empty without `norm_weight`."""
    _check(x, weight, residual)
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // (2 if activation else 1)
    sizes = (out_features, in_features, x.element_size())
    tile = choose_tile(num_rows, *sizes, is_gated=bool(activation), **device_limits(x.device))
    grid = (triton.cdiv(num_rows, tile.block_m), triton.cdiv(out_features, tile.block_n))
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    scales = norm_weight is not None
    scaled = out.new_empty((num_rows, out_features if scales else 0))
    new_squares = out.new_empty((num_rows, grid[1] if scales else 0), dtype=torch.float32)
    if num_rows == 0:
        return out, scaled, new_squares
    fused_linear_kernel[grid](
        out,
        scaled if scales else None,
        new_squares if scales else None,
        x,
        weight,
        bias,
        squares,
        residual,
        norm_weight,
        num_rows,
        # A single row may have any stride. Triton would compile the kernel again for some strides.
        x.stride(0) if num_rows > 1 else in_features,
        residual.stride(0) if residual is not None and num_rows > 1 else out_features,
        eps,
        **linear_constants(
            tile,
            out_features,
            in_features,
            activation,
            num_squares=1 if squares is None else squares.shape[1],
            early=starts_early(x.device),
        ),
    )
    return out, scaled, new_squares


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if x.dtype not in FUSED_DTYPES or weight.dtype != x.dtype:
        raise ValueError(
            f"fused_linear: x is {x.dtype} and the weight {weight.dtype}; both must be bfloat16 or "
            "float32"
        )
    _check_rows("x", x)
    _check_rows("the weight", weight)
    if residual is not None:
        _check_rows("the residual", residual)
    if not weight.is_contiguous():
        raise ValueError(f"fused_linear: the weight has strides {weight.stride()}, must be dense")


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.stride(1) != 1:
        raise ValueError(
            f"fused_linear: {name} has strides {tensor.stride()}, its rows must be contiguous; "
            "call .contiguous() on it"
        )
