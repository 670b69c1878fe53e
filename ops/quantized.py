"""Linear layers over weights of 8 and 4 bits: the ops that quantise, multiply and look up rows.

A weight [N, K] is cut along K into groups. The values of a group share a scale and, unless the
format is symmetric, a zero point or a minimum. Scales and zero points are stored between the
values, in the order in which the kernel reads them (ops/native/quantized/layout.h). So a decode
step reads a weight as one stream.

On a CPU, `quantized_linear` quantises the activations too: each group of a row becomes integers in
[-127, 127] and a float32 scale. The sum of products within a group is an integer and exact, in any
order and on any instruction set. Groups are summed in float32, in ascending order. So the bits of a
row depend neither on other rows nor on the number of threads. Weights of the kind e4m3 are floats
of 8 bits. Activations that are multiplied by them are not quantised.

The kernels are quantized.cpp, pack.cpp and repack.cpp in ops/native/quantized/. Until they are
loaded the same ops run as plain torch (ops/quantized_reference.py).

On CUDA the same bytes are read by the Triton kernels of ops/gpu_quantized/, which do not round
activations. If the checkpoint states 8-bit activations, ops/w8a8/ multiplies the weights there.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ostinato.ops.linear.packed_linear import why_unpackable
from ostinato.ops.native.library import load
from ostinato.ops.quantized_reference import (
    QuantFormat,
    pack_quantized_reference,
    quantize_linear_reference,
    quantized_linear_reference,
    quantized_rows_reference,
)
from ostinato.ops.register import register_op

__all__ = (
    "GPU_TILE_TOKENS",
    "pack_quantized_weight",
    "quantize_linear_weight",
    "quantized_linear",
    "quantized_rows",
)

GPU_TILE_TOKENS = (1, 2, 3, 5, 17, 33, 65)
"""For each tile of the CUDA kernels, the smallest number of tokens of a step that uses the tile.

Each tile is compiled once."""


def quantize_linear_weight(weight: Tensor, form: QuantFormat) -> Tensor:
    """The quantised form of a linear weight [N, K]; the caller drops the original.

    Symmetric: `w = (q - offset) * scale`. Asymmetric: `w = (q - zero_point) * scale`. Scales are
    bfloat16. With 8 bits the grid spans the group from its least to its greatest value. With 4 bits
    a few grids are tried, which clip the extremes more or less, and the grid with the least squared
    error is taken. A group with an infinity or a NaN becomes NaN.

    Builds and loads the native library on first use.

    Raises:
        ValueError: `why_unpackable(weight)` gives a reason, or `form` has a value that
            `QuantFormat` does not list, a kind other than `steps`, or scales other than bfloat16.
        NativeBuildError: the kernels cannot be built here.
    """
    reason = why_unpackable(weight)
    if reason is not None:
        raise ValueError(f"this weight cannot be quantised: {reason}")
    load("quantized")
    return _quantize_linear(weight.detach(), *form)


def pack_quantized_weight(
    values: Tensor, scales: Tensor, zeros: Tensor | None, form: QuantFormat
) -> Tensor:
    """The quantised form of a weight [N, K] whose integers are stored in a checkpoint.

    No value is rounded if the dtype `form.factors` can hold the scales and zero points exactly.

    Builds and loads the native library on first use.

    Args:
        values: [N, K] uint8, of any strides: the integers, from 0 to 2**bits - 1.
        scales: [N, groups] float32.
        zeros: [N, groups] float32, the values that stand for zero, or the minimums; None if the
            format is symmetric. The value that stands for zero is then `form.offset`.
        form: the format of the result.

    Raises:
        ValueError: a shape or dtype is not as above.
        NativeBuildError: the kernels cannot be built here.
    """
    load("quantized")
    return _pack_quantized(values, scales, zeros, *form)


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    form: QuantFormat,
    *,
    residual: Tensor | None = None,
    order: Tensor | None = None,
    float32_output: bool = False,
) -> Tensor:
    """x @ W.T + bias + residual with a quantised W; on a CPU x is quantised too (see above).

    Args:
        x: [T, K] float32 or bfloat16, on CUDA also float16; last dimension contiguous, any row
            stride.
        weight: the result of `quantize_linear_weight` or `pack_quantized_weight` for W
            [out_features, K].
        bias: [out_features] in x's dtype, added in float32 before rounding, or None.
        out_features: N; the weight is padded beyond it.
        form: the format of the weight.
        residual: [T, out_features] in x's dtype, last dimension contiguous, added in float32 before
            rounding, or None.
        order: [K] int32, for each column of the weight the column of x that it multiplies; None =
            the column with the same number.
        float32_output: return the float32 sums themselves, for logits and partial sums. `residual`
            must be None.

    Returns:
        [T, out_features] contiguous, in x's dtype or float32. Where x is quantised, a row of x with
        an infinity or a NaN gives a row of NaN.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    return _quantized_linear(x, weight, bias, out_features, float32_output, residual, order, *form)


def quantized_rows(
    weight: Tensor,
    ids: Tensor,
    out_features: int,
    in_features: int,
    form: QuantFormat,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Rows of the matrix that a quantised weight stands for. Used for embeddings.

    Args:
        weight: the result of `quantize_linear_weight` or `pack_quantized_weight` for W
            [out_features, in_features].
        ids: [T] int64 or int32, 0 <= id < out_features.
        out_features: rows of the table.
        in_features: their length.
        form: the format of the weight.
        dtype: the dtype of the result, float32 or bfloat16, on CUDA also float16.

    Returns:
        [T, in_features] contiguous.

    Raises:
        ValueError: an id is out of range; its index and value are in the text. CUDA does not check
            ids.
    """
    float32_output = dtype != torch.bfloat16
    rows = _quantized_rows(weight, ids, out_features, in_features, float32_output, *form)
    return rows.to(dtype)


def _quantize_fake(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, scales: str, kind: str
) -> Tensor:
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    return weight.new_empty(form.packed_shape(*weight.shape), dtype=torch.uint8)


def _pack_fake(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    kind: str,
) -> Tensor:
    return _quantize_fake(values, bits, group_size, symmetric, scale_dtype, kind)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None,
    order: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    dtype = torch.float32 if float32_output else x.dtype
    return x.new_empty((x.shape[0], out_features), dtype=dtype)


def _rows_fake(
    weight: Tensor,
    ids: Tensor,
    out_features: int,
    in_features: int,
    float32_output: bool,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    dtype = torch.float32 if float32_output else torch.bfloat16
    return weight.new_empty((ids.shape[0], in_features), dtype=dtype)


def _linear_on_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None,
    order: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    kernels = import_module("ostinato.ops.gpu_quantized.triton_quantized_linear")
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    return kernels.quantized_linear_on_cuda(
        x, weight, bias, out_features, float32_output, residual, order, form
    )


def _rows_on_cuda(
    weight: Tensor,
    ids: Tensor,
    out_features: int,
    in_features: int,
    float32_output: bool,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    kernels = import_module("ostinato.ops.gpu_quantized.triton_quantized_rows")
    dtype = torch.float32 if float32_output else torch.bfloat16
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    return kernels.quantized_rows_on_cuda(weight, ids, out_features, in_features, dtype, form)


_quantize_linear = register_op(
    "quantize_linear", {"CompositeExplicitAutograd": quantize_linear_reference}, fake=_quantize_fake
)
_pack_quantized = register_op(
    "pack_quantized", {"CompositeExplicitAutograd": pack_quantized_reference}, fake=_pack_fake
)
_quantized_linear = register_op(
    "quantized_linear",
    {"CompositeExplicitAutograd": quantized_linear_reference, "CUDA": _linear_on_cuda},
    fake=_linear_fake,
)
_quantized_rows = register_op(
    "quantized_rows",
    {"CompositeExplicitAutograd": quantized_rows_reference, "CUDA": _rows_on_cuda},
    fake=_rows_fake,
)
