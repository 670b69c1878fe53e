"""The Triton kernel of `quantized_rows` on CUDA. Not yet verified on hardware."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.ops.gpu_quantized.packed_bytes import format_constants, typed_views
from ostinato.ops.gpu_quantized.triton_values import factors_of, unit_base, unit_values
from ostinato.ops.quantized_reference import QuantFormat

__all__ = ("quantized_rows_kernel", "quantized_rows_on_cuda")


@triton.jit
def quantized_rows_kernel(
    out,  # [T, K]
    ids,  # [T]
    words,  # the weight as int32
    factors,  # the weight in the dtype of its scales
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    HEADER: tl.constexpr,
    UNIT: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """One program for each id and BLOCK_U units of its row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.load(ids + token).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    unit = (tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U))[None, :]
    mask = unit < (K + 7) // 8 * 8 // UNIT
    base = unit_base(column, unit, GROUP, HEADER, UNIT, BITS, PANEL_BYTES)
    scale, zero = factors_of(factors, base, column, mask, KIND, BITS, SYMMETRIC)
    values = unit_values(words, base, column, unit, zero, mask, GROUP, HEADER, UNIT, KIND, BITS)
    values = values * scale[:, :, None]
    if KIND == "minimums":
        values -= zero[:, :, None]
    k = unit[:, :, None] * UNIT + tl.arange(0, UNIT)[None, None, :]
    tl.store(out + token * K + k, values.to(out.dtype.element_ty), mask=k < K)


def quantized_rows_on_cuda(
    weight: Tensor,
    ids: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    form: QuantFormat,
) -> Tensor:
    """`quantized_rows` (ops/quantized.py). Ids must be rows of the weight; they are not checked."""
    out = torch.empty((ids.shape[0], in_features), dtype=dtype, device=weight.device)
    if ids.shape[0] == 0:
        return out
    constants = format_constants(form, out_features, in_features)
    units = -(-in_features // constants["UNIT"])
    block = min(128, triton.next_power_of_2(units))
    quantized_rows_kernel[(ids.shape[0], triton.cdiv(units, block))](
        out, ids, *typed_views(weight, form), **constants, BLOCK_U=block, num_warps=4
    )
    return out
