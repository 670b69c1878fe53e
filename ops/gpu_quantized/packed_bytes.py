"""The constants and views through which Triton kernels read the bytes of a quantised weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ostinato.ops.quantized_reference import QuantFormat

__all__ = ("check_operands", "format_constants", "typed_views")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def format_constants(form: QuantFormat, out_features: int, in_features: int) -> dict[str, Any]:
    """The kernel constants that describe a weight [out_features, in_features]."""
    return {
        "N": out_features,
        "K": in_features,
        "KIND": form.kind,
        "BITS": form.bits,
        "GROUP": form.group_size,
        "SYMMETRIC": form.symmetric,
        "HEADER": form.header_bytes,
        "UNIT": 8 if form.bits == 4 else 4,
        "PANEL_BYTES": form.packed_shape(out_features, in_features)[1],
    }


def typed_views(weight: Tensor, form: QuantFormat) -> tuple[Tensor, Tensor]:
    """Two views of a weight's bytes: one to read values, one in the dtype of its scales."""
    return weight.view(torch.int32), weight.view(form.factors)


def check_operands(
    x: Tensor, weight: Tensor, form: QuantFormat, out_features: int, in_features: int
) -> None:
    """Check the arguments of the kernels in this folder.

    Raises:
        ValueError: a dtype, shape or stride is not supported.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype}; it must be bfloat16, float16 or float32")
    if x.stride(-1) != 1:
        raise ValueError(f"x has strides {x.stride()}; its rows must be contiguous")
    shape = form.packed_shape(out_features, in_features)
    if tuple(weight.shape[-2:]) != shape or not weight.is_contiguous():
        raise ValueError(
            f"the weight has shape {tuple(weight.shape)} and strides {weight.stride()}; it must be "
            f"contiguous {shape} for {form.name} of [{out_features}, {in_features}]"
        )
