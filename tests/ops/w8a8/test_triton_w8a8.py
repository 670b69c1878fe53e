"""The Triton kernels for operands of 8 bits: under the interpreter, and compiled for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")

from ostinato.benchmarks.machine.kernel_resources import Resources
from ostinato.ops.w8a8.round_rows import InputScales
from ostinato.ops.w8a8.triton_round_rows import (
    groups_constants,
    round_groups_kernel,
    round_whole_rows_kernel,
    rows_constants,
)
from ostinato.ops.w8a8.triton_w8a8_linear import Operands
from ostinato.ops.w8a8.triton_w8a8_moe import (
    w8a8_experts_constants,
    w8a8_experts_kernel,
)
from tests.ops.triton_checks import compiled_kernel

SLOW = pytest.mark.slow
E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def compiled(kernel: Any, dtype: torch.dtype, constants: dict[str, Any], **types: str) -> Resources:
    eight = "*fp8e4nv" if dtype == E4M3 else "*i8"
    known = {"x": eight, "weight": eight, "x_scales": "*fp32", "scales": "*fp32", "out": "*bf16"}
    return compiled_kernel(kernel, constants, known | types)


@SLOW
@pytest.mark.parametrize("tokens", [1, 8192])
def test_experts(tokens: int) -> None:
    operands = Operands(4096, 7168, 128, InputScales.group, E4M3)  # DeepSeek-V3
    constants = w8a8_experts_constants(operands, tokens * 8, 256)
    constants |= {"SLOTS": 8, "IS_SHARED": True}
    types = {"order": "*i64", "ends": "*i64"}
    used = compiled(w8a8_experts_kernel, operands.dtype, constants, **types)
    assert used.spill_bytes == 0
    assert used.num_wgmma + used.num_mma > 0


@pytest.mark.parametrize("dtype", [E4M3, pytest.param(INT8, marks=SLOW)])
def test_rounding(dtype: torch.dtype) -> None:
    types = {"x": "*bf16", "out": "*fp8e4nv" if dtype == E4M3 else "*i8", "given": "*fp32"}
    constants = rows_constants(14336, dtype, 3, powers=False)
    assert compiled(round_whole_rows_kernel, dtype, constants, **types).spill_bytes == 0
    constants = groups_constants(7168, 128, dtype, powers=True)
    assert compiled(round_groups_kernel, dtype, constants, **types).spill_bytes == 0
