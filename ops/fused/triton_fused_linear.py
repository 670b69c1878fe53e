"""The Triton kernel of `ostinato::fused_linear`, for few rows. Not yet verified on hardware.

A program computes BLOCK_N columns of the result for a tile of rows. It reads its rows of W once, so
the launch reads little more than W. The RMS norm needs no pass of its own, because the scale of a
row is a factor on the sums of that row.

    norm(x) @ W.T = ((x * norm_weight) @ W.T) / rms(x)

Every program sums the squares of x while it computes its products.

A step of up to 128 rows is one tile of rows. A larger step has two, which read the same rows of W.
The second reads them from the cache of the device.

A column's sum runs over K in an order that depends on K, on the dtype and on the tile. There are
three tiles: for up to 16 rows, for up to 64, and for more (bfloat16 only). So the other rows of a
step can change the bits of a row only by their number, which chooses the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = (
    "LinearTile",
    "choose_tile",
    "fused_linear_kernel",
    "gated",
    "launch",
    "linear_constants",
)

_FEW, _MORE, _MANY = 16, 64, 128  # rows of the tiles; tensor cores take 16 at least
_PROGRAMS = 128  # programs of a launch at least, if possible, so that all multiprocessors read
_SHARED_MEMORY = 227 * 1024  # bytes that a program may use on compute capability 9.0
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@dataclass(frozen=True, slots=True)
class LinearTile:
    """BLOCK_M rows of x and BLOCK_N rows of W, multiplied BLOCK_K elements at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_tile(
    num_rows: int,
    out_features: int,
    in_features: int,
    itemsize: int,
    *,
    is_gated: bool,
    shared_memory: int = _SHARED_MEMORY,
) -> LinearTile:
    """The tile of a launch.

    Args:
        num_rows: T; only whether it is above 16 and above 64 matters.
        out_features: N, columns of the result.
        in_features: K.
        itemsize: bytes of an element of x and W.
        is_gated: whether a column of the result needs two columns of products.
        shared_memory: bytes that one program may use.
    """
    # Sums of 128 rows in float32 do not fit the registers.
    block_m = _FEW if num_rows <= _FEW else _MORE if num_rows <= _MORE or itemsize == 4 else _MANY
    if block_m == _MANY:
        return _many_rows(out_features, is_gated=is_gated, shared_memory=shared_memory)
    sizes = (32, 16) if is_gated or itemsize == 4 else (64, 32, 16)
    least = 16 if block_m == _FEW else 32
    block_n = next((n for n in sizes if out_features >= _PROGRAMS * n), least)
    block_k = 128 if is_gated or block_m == _MORE else 256
    block_k = min(block_k * 2 // itemsize, max(16, 1 << (in_features - 1).bit_length()))
    stage = (block_m + block_n * (2 if is_gated else 1)) * block_k * itemsize
    # Two programs share a multiprocessor, so that one loads while the other ends or begins.
    num_stages = next((n for n in (5, 4, 3) if n * stage <= shared_memory // 2), 2)
    # Two sums of 64 rows and the squares of the norm do not fit the registers of 4 warps.
    num_warps = 8 if is_gated and block_m == _MORE else 4
    return LinearTile(block_m, block_n, block_k, num_warps, num_stages)


def _many_rows(out_features: int, *, is_gated: bool, shared_memory: int) -> LinearTile:
    """The tile of more than 64 rows of bfloat16.

    The tile has the most columns that leave enough programs for two tiles of rows. Wide tiles read
    less, because each program reads the rows of x again.
    """
    sizes = (64, 32) if is_gated else (128, 64, 32)
    block_n = next((n for n in sizes if 2 * out_features >= _PROGRAMS * n), 32)
    stage = (_MANY + block_n * (2 if is_gated else 1)) * 64 * 2
    num_stages = next((n for n in (4, 3) if n * stage <= shared_memory // 2), 2)
    return LinearTile(_MANY, block_n, 64, 8, num_stages)


def linear_constants(
    tile: LinearTile,
    out_features: int,
    in_features: int,
    activation: str,
    num_cleared: int = 0,
    *,
    overlaps: bool = False,
) -> dict[str, Any]:
    """The constants of `fused_linear_kernel`, launch options included."""
    return {
        "K": in_features,
        "N": out_features,
        "ACTIVATION": activation,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "CLEARED": num_cleared,
        "OVERLAPS": overlaps,
        "launch_pdl": overlaps,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


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
def _prefetch(pointers):
    """Load the cache lines of these addresses into the device's cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows", "eps"])
def fused_linear_kernel(
    out,  # [T, N] contiguous
    x,  # [T, K]
    weight,  # [N, K] contiguous; [2 N, K] with an activation
    bias,  # [N] or [2 N], or None
    norm_weight,  # [K], or None
    residual,  # [T, N], or None
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
    CLEARED: tl.constexpr,  # 0 or a power of two
    OVERLAPS: tl.constexpr,  # programs start before the previous kernel of the stream has ended
):
    """One program for each row tile and column tile of the result."""
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVERLAPS:
        gdc_launch_dependents()
        # The weights do not depend on the previous kernel, so their first tiles are on the way to
        # the device's cache while that kernel ends.
        line = tl.arange(0, BLOCK_K // 64) * 64
        ahead = weight + (column % N)[:, None].to(tl.int64) * K + line[None, :]
        _prefetch(ahead)
        if BLOCK_K * 2 <= K:
            _prefetch(ahead + BLOCK_K)
        if ACTIVATION != "":
            _prefetch(ahead + N * K)
        gdc_wait()
    if CLEARED:  # noqa: SIM102 - known when the kernel is compiled
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(cleared + tl.arange(0, CLEARED), tl.zeros([CLEARED], tl.int32))
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok, column_ok = row < num_rows, column < N
    wide_row = row.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = x + wide_row[:, None] * x_stride + k[None, :]
        if K % BLOCK_K == 0:
            tile = tl.load(rows, mask=row_ok[:, None], other=0.0)
        else:
            tile = tl.load(rows, mask=row_ok[:, None] & (k < K)[None, :], other=0.0)
        if norm_weight is not None:
            wide = tile.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
            tile = (wide * scale[None, :]).to(tile.dtype)
        columns = _weights(weight, column, k, K, N, BLOCK_N, BLOCK_K)
        acc = tl.dot(tile, tl.trans(columns), acc, input_precision="ieee")
        if ACTIVATION != "":
            columns = _weights(weight + N * K, column, k, K, N, BLOCK_N, BLOCK_K)
            acc_up = tl.dot(tile, tl.trans(columns), acc_up, input_precision="ieee")
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(squares, 1) / K + eps)
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
    tl.store(out + wide_row[:, None] * N + column[None, :], acc.to(out.dtype.element_ty), mask=ok)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
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
    _check(x, weight, residual)
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // (2 if activation else 1)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = choose_tile(
        num_rows,
        out_features,
        in_features,
        x.element_size(),
        is_gated=bool(activation),
        shared_memory=_shared_memory(x.device),
    )
    grid = (-(-num_rows // tile.block_m), -(-out_features // tile.block_n))
    fused_linear_kernel[grid](
        out,
        x,
        weight,
        bias,
        norm_weight,
        residual,
        cleared,
        num_rows,
        # A single row may have any stride. Triton would compile the kernel again for some strides.
        x.stride(0) if num_rows > 1 else in_features,
        residual.stride(0) if residual is not None and num_rows > 1 else out_features,
        eps,
        **linear_constants(
            tile, out_features, in_features, activation, 0 if cleared is None else cleared.numel()
        ),
    )
    return out


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32) or weight.dtype != x.dtype:
        raise ValueError(
            f"fused_linear: x is {x.dtype} and the weight {weight.dtype}; both must be bfloat16 or "
            "float32"
        )
    for name, tensor in (("x", x), ("the weight", weight), ("the residual", residual)):
        if tensor is not None and tensor.stride(1) != 1:
            raise ValueError(
                f"fused_linear: {name} has strides {tensor.stride()}, its rows must be contiguous; "
                "call .contiguous() on it"
            )
    if not weight.is_contiguous():
        raise ValueError(f"fused_linear: the weight has strides {weight.stride()}, must be dense")


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return _SHARED_MEMORY  # Triton's interpreter, which has no limit
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
