"""What the fused products of few rows do with their sums, in Triton.

A product divides its sums by the root mean square of a norm, adds a bias, applies a gated
activation, adds a residual, and prepares the norm after it. The kernels of plain weights
(triton_fused_linear.py), of quantised ones (triton_fused_quantized.py) and of experts
(triton_expert_kernels.py, triton_output_router.py) share these functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ("finish_tile", "gated", "is_last_of", "norm_factor")

_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def is_last_of(count, counter):
    """Count this program; return whether it is the last of `count` programs to be counted.

    The last one may read what all of them stored before. `counter` points to an int32 that is zero
    before the first program is counted.
    """
    tl.debug_barrier()  # all values of this program are written before it is counted
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.debug_barrier()
    return is_last


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
    elif KIND == "relu2":
        active = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    else:
        tl.static_assert(KIND == "relu", "an activation without a kernel")
        active = tl.maximum(gate, 0.0)
    return active * up


@triton.jit
def norm_factor(
    squares,  # [T, SQUARES] float32, or None
    row,
    num_rows,
    eps,
    K: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two, at least SQUARES
    BLOCK_M: tl.constexpr,
):
    """1 / the root mean square of [BLOCK_M] rows of K values; 1 without sums of squares."""
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if squares is not None:
        part = tl.arange(0, BLOCK_S)
        sums = tl.load(
            squares + row.to(tl.int64)[:, None] * SQUARES + part[None, :],
            mask=(row < num_rows)[:, None] & (part < SQUARES)[None, :],
            other=0.0,
        )
        factor = tl.rsqrt(tl.sum(sums, 1) / K + eps)
    return factor


@triton.jit
def _store_scaled(scaled, squares, norm_weight, result, row, column, num_rows, tile, num_tiles,
                  N: tl.constexpr):  # fmt: skip
    """Store a tile of the result times `norm_weight`, and the sums of the squares of its rows."""
    row_ok, column_ok = row < num_rows, column < N
    ok = row_ok[:, None] & column_ok[None, :]
    wide = tl.where(ok, result.to(tl.float32), 0.0)
    scale = tl.load(norm_weight + column, mask=column_ok, other=0.0).to(tl.float32)
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(scaled + place, (wide * scale[None, :]).to(result.dtype), mask=ok)
    tl.store(squares + row.to(tl.int64) * num_tiles + tile, tl.sum(wide * wide, 1), mask=row_ok)


@triton.jit
def finish_tile(
    out,  # [T, N] contiguous
    scaled,  # [T, N] contiguous, out * norm_weight, or None
    new_squares,  # [T, num_tiles] float32, sums of the squares of out; None as `scaled` is
    bias,  # [N] or [2 N], or None
    residual,  # [T, N], or None
    norm_weight,  # [N]; None as `scaled` is
    acc,  # [BLOCK_M, BLOCK_N] float32, sums of products; with an activation those of gate
    acc_up,  # as acc, those of up; not read without an activation
    squares,  # None if the sums are not multiplied by the factor
    factor,  # [BLOCK_M] float32, of `norm_factor`
    row,  # [BLOCK_M] rows of the result
    column,  # [BLOCK_N] columns of the result
    num_rows,  # T
    residual_stride,
    tile,  # number of this tile among those of its rows
    num_tiles,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store a tile of `activation(acc * factor + bias) + residual`, and what a norm of it needs."""
    row_ok, column_ok = row < num_rows, column < N
    wide_row = row.to(tl.int64)
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
    tl.store(out + wide_row[:, None] * N + column[None, :], result, mask=ok)
    if scaled is not None:
        _store_scaled(scaled, new_squares, norm_weight, result, row, column, num_rows, tile,
                      num_tiles, N)  # fmt: skip
