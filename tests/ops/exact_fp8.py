"""Lets Triton's interpreter convert from and to 8-bit floats as torch does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl

__all__ = ("FP8", "convert_exactly")

FP8 = torch.float8_e4m3fn

Convert = Callable[[np.ndarray, tl.dtype, tl.dtype, object], np.ndarray]


def convert_exactly(convert: Convert) -> Convert:
    """The interpreter's conversion, with torch's for the 8-bit dtype.

    The interpreter's own conversion rounds to 8 bits without a carry into the exponent, and gives
    no 8-bit NaN. torch's results are those of the hardware within the dtype's range.

    Args:
        convert: `_convert_float` of triton.runtime.interpreter.
    """

    def exact(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if source == tl.float8e4nv:
            wide = torch.from_numpy(data.view(np.uint8)).view(FP8).float().numpy()
            return wide.astype(np.float16 if target == tl.float16 else np.float32)
        if target == tl.float8e4nv:
            wide = torch.from_numpy(np.ascontiguousarray(data).astype(np.float32))
            return wide.to(FP8).view(torch.uint8).numpy()
        return convert(data, source, target, mode)

    return exact
