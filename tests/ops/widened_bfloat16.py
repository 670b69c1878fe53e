"""Lets Triton's interpreter multiply bfloat16 in float32."""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

__all__ = ("widen_products_of_bfloat16",)


def widen_products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen the operands of `tl.dot`. The interpreter would multiply their raw 16-bit integers."""
    builder = type(interpreter.interpreter_builder)
    create_dot = builder.create_dot

    def widen(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    monkeypatch.setattr(
        builder, "create_dot", lambda self, a, b, *rest: create_dot(self, widen(a), widen(b), *rest)
    )
