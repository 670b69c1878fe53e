"""The Triton kernels of `ostinato::fused_linear` and of its two companions, for few rows.

A program computes BLOCK_N columns of the result for a tile of rows. It reads its rows of W once, so
the launch reads little more than W. An RMS norm before a product is computed in two parts, because
the scale of a row is a factor on the sums of that row:

    norm(x) @ W.T = ((x * norm_weight) @ W.T) / rms(x)

The first kernel writes x * norm_weight and sums of the squares of x. It is the kernel of the
product that computes x (`linear_and_scale`), or one of its own (`scale_rows`). The kernel of the
product with W adds these sums, and divides by their root mean square.

A column's sum runs over K in an order that depends on K, on the dtype and on the tile. There are
two tiles: for up to 16 rows and for more. So the other rows of a step can change the bits of a row
only by their number, which chooses the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.fused.early_start import prefetch, starts_early, wait_for_previous_kernel
from ostinato.ops.fused.fused_linear import FUSED_DTYPES
from ostinato.ops.fused.linear_tiles import choose_tile, device_limits, linear_constants

__all__ = (
    "fused_linear_kernel",
    "gated",
    "launch",
    "launch_linear_and_scale",
    "launch_scale_rows",
    "scale_rows_kernel",
)

_SCALED = 1024  # columns of a program of `scale_rows_kernel`
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """`KIND(gate) * up` in float32."""
    if KIND == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif KIND == "quick_gelu":
        active = gate / (1.0 + tl.exp(-1.702 * gate))
    elif KIND == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # (1 + tanh(y)) / 2 = 1 - 1 / (exp(2 y) + 1), which is right even where exp overflows.
        active = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    else:
        tl.static_assert(KIND == "relu", "an activation without a kernel")
        active = tl.maximum(gate, 0.0)
    return active * up


@triton.jit
def _weights(weight, column, k, K: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr):  # fmt: skip
    """A [BLOCK_N, BLOCK_K] tile of W. Elements outside of W are read as 0."""
    pointers = weight + column[:, None].to(tl.int64) * K + k[None, :]
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(column < N)[:, None] & (k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _prefetch_rows(weight, column, K: tl.constexpr, N: tl.constexpr, PREFETCHED: tl.constexpr):
    """Prefetch the first PREFETCHED elements of rows of W."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    line = tl.arange(0, PREFETCHED // LINE if PREFETCHED > LINE else 1) * LINE % K
    prefetch(weight + (column % N)[:, None].to(tl.int64) * K + line[None, :])


@triton.jit
def _store_scaled(scaled, squares, norm_weight, result, row, column, num_rows, N: tl.constexpr):
    """Store a tile of the result times `norm_weight`, and the sums of the squares of its rows."""
    row_ok, column_ok = row < num_rows, column < N
    ok = row_ok[:, None] & column_ok[None, :]
    wide = tl.where(ok, result.to(tl.float32), 0.0)
    scale = tl.load(norm_weight + column, mask=column_ok, other=0.0).to(tl.float32)
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(scaled + place, (wide * scale[None, :]).to(result.dtype), mask=ok)
    sums_of_tile = squares + row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_of_tile, tl.sum(wide * wide, 1), mask=row_ok)


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
    cleared,  # [CLEARED] int32, set to zeros for a later kernel, or None
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
    CLEARED: tl.constexpr,  # 0 or a power of two
    PREFETCHED: tl.constexpr,  # elements of each row of W, a power of two
    EARLY: tl.constexpr,
):
    """One program for each row tile and column tile of the result."""
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if EARLY:
        # The previous kernel does not write the weights, so their first tiles are loaded into the
        # device's cache while it ends.
        _prefetch_rows(weight, column, K, N, PREFETCHED)
        if ACTIVATION != "":
            _prefetch_rows(weight + N * K, column, K, N, PREFETCHED)
    wait_for_previous_kernel(EARLY)
    if CLEARED:  # noqa: SIM102 - known when the kernel is compiled
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(cleared + tl.arange(0, CLEARED), tl.zeros([CLEARED], tl.int32))
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok, column_ok = row < num_rows, column < N
    wide_row = row.to(tl.int64)
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if squares is not None:
        part = tl.arange(0, BLOCK_S)
        sums = tl.load(
            squares + wide_row[:, None] * SQUARES + part[None, :],
            mask=row_ok[:, None] & (part < SQUARES)[None, :],
            other=0.0,
        )
        factor = tl.rsqrt(tl.sum(sums, 1) / K + eps)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = x + wide_row[:, None] * x_stride + k[None, :]
        if K % BLOCK_K == 0:
            tile = tl.load(rows, mask=row_ok[:, None], other=0.0)
        else:
            tile = tl.load(rows, mask=row_ok[:, None] & (k < K)[None, :], other=0.0)
        columns = _weights(weight, column, k, K, N, BLOCK_N, BLOCK_K)
        acc = tl.dot(tile, tl.trans(columns), acc, input_precision="ieee")
        if ACTIVATION != "":
            columns = _weights(weight + N * K, column, k, K, N, BLOCK_N, BLOCK_K)
            acc_up = tl.dot(tile, tl.trans(columns), acc_up, input_precision="ieee")
    if squares is not None:
        acc = acc * factor[:, None]
        acc_up = acc_up * factor[:, None]
    if bias is not None:
        acc += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            acc_up += tl.load(bias + N + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        acc = gated(acc, acc_up, ACTIVATION)
    ok = row_ok[:, None] & column_ok[None, :]
    if residual is not None:
        before = residual + wide_row[:, None] * residual_stride + column[None, :]
        acc += tl.load(before, mask=ok, other=0.0).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    place = wide_row[:, None] * N + column[None, :]
    tl.store(out + place, result, mask=ok)
    if scaled is not None:
        _store_scaled(scaled, new_squares, norm_weight, result, row, column, num_rows, N)


@triton.jit
def scale_rows_kernel(
    scaled,  # [T, K] contiguous
    squares,  # [T, programs of a row] float32
    x,  # [T, K]
    norm_weight,  # [K]
    x_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each row and BLOCK columns of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < K
    scale = tl.load(norm_weight + column, mask=ok, other=0.0).to(tl.float32)
    wait_for_previous_kernel(EARLY)
    wide = tl.load(x + row * x_stride + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(scaled + row * K + column, (wide * scale).to(scaled.dtype.element_ty), mask=ok)
    tl.store(squares + row * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide, 0))


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
    cleared: Tensor | None = None,
) -> Tensor:
    """`fused_linear` with the kernel; arguments as for the op.

    Args:
        cleared: int32, a power of two of elements, which the launch sets to zeros; None = nothing.

    Raises:
        ValueError: the dtype is not one of `FUSED_DTYPES`, or a tensor does not fit `fused_linear`.
    """
    return _launch(x, weight, bias, squares, eps, activation, residual, None, cleared)[0]


def launch_linear_and_scale(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_and_scale` with the kernel; arguments and errors as for the op."""
    return _launch(x, weight, bias, None, 0.0, "", residual, norm_weight, None)


def launch_scale_rows(x: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    """`scale_rows` with the kernel; arguments and errors as for the op."""
    _check_rows("x", x)
    num_rows, size = x.shape
    block = min(_SCALED, triton.next_power_of_2(size))
    scaled = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    squares = x.new_empty((num_rows, triton.cdiv(size, block)), dtype=torch.float32)
    if num_rows:
        early = starts_early(x.device)
        constants = {"K": size, "BLOCK": block, "EARLY": early, "launch_pdl": early}
        scale_rows_kernel[squares.shape](
            scaled,
            squares,
            x,
            norm_weight,
            x.stride(0) if num_rows > 1 else size,
            **constants,
        )
    return scaled, squares


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    cleared: Tensor | None,
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
        cleared,
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
            num_cleared=0 if cleared is None else cleared.numel(),
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
