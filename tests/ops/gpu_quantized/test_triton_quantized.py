"""The Triton kernels of quantised weights: under the interpreter, and compiled for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")

from ostinato.benchmarks.machine.kernel_resources import Resources
from ostinato.ops.fused.triton_fused_quantized import (
    few_rows_fused_kernel,
    few_rows_fused_launch,
    many_rows_fused_kernel,
    many_rows_fused_launch,
)
from ostinato.ops.gpu_quantized.packed_bytes import format_constants
from ostinato.ops.gpu_quantized.triton_quantized_linear import (
    FEW_ROWS,
    add_parts_kernel,
    few_rows_kernel,
    few_rows_launch,
    many_rows_kernel,
    many_rows_launch,
)
from ostinato.ops.gpu_quantized.triton_quantized_moe import (
    quantized_experts_constants,
    quantized_experts_kernel,
)
from ostinato.ops.gpu_quantized.triton_quantized_rows import quantized_rows_kernel
from ostinato.ops.quantized_reference import QuantFormat
from tests.ops.triton_checks import compiled_kernel

SLOW = pytest.mark.slow
FACTORS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
GPTQ = QuantFormat(4, 128, False, "float16")
INT8 = QuantFormat(8, 128, True)
FP8 = QuantFormat(8, 128, True, "float32", "e4m3")
MXFP4 = QuantFormat(4, 32, True, "bfloat16", "e2m1")
NVFP4 = QuantFormat(4, 16, True, "float32", "e2m1")
Q4_K = QuantFormat(4, 32, False, "float32", "minimums")
FORMS = [GPTQ, INT8, FP8, MXFP4, NVFP4, Q4_K, QuantFormat(4, 32, True)]


def compiled(kernel: Any, form: QuantFormat, constants: dict[str, Any], **types: str) -> Resources:
    known = {"x": "*bf16", "out": "*bf16", "parts": "*fp32"}
    known |= {"words": "*i32", "factors": FACTORS[form.scales]}
    known |= {"counters": "*i32", "eps": "fp32"}
    return compiled_kernel(kernel, constants, known | types)


@pytest.mark.parametrize(
    ("form", "rows"),
    [pytest.param(form, rows, marks=SLOW) for form in FORMS for rows in (1, 2, 4)],
)
def test_few_rows(form: QuantFormat, rows: int) -> None:
    constants = few_rows_launch(form, rows, 4096, 4096).constants
    used = compiled(few_rows_kernel, form, constants, out="*fp32")
    assert used.spill_bytes == 0


@pytest.mark.parametrize(
    ("form", "rows"),
    [pytest.param(form, rows, marks=SLOW) for form in FORMS for rows in (16, 64, 4096)],
)
def test_many_rows(form: QuantFormat, rows: int) -> None:
    constants = many_rows_launch(form, rows, 4096, 4096, torch.bfloat16).constants
    used = compiled(many_rows_kernel, form, constants, order="*i32", bias="*bf16", residual="*bf16")
    assert used.spill_bytes == 0
    assert used.shared_bytes <= 227 * 1024
    assert used.num_wgmma + used.num_mma > 0


@SLOW
@pytest.mark.parametrize("tokens", [1, 8192])
def test_experts(tokens: int) -> None:
    size = (32, 5760, 2880)  # gpt-oss-20b
    constants = quantized_experts_constants(MXFP4, tokens * 4, *size, torch.bfloat16)
    constants |= {"SLOTS": 4, "IS_SHARED": True}
    used = compiled(
        quantized_experts_kernel, MXFP4, constants, bias="*bf16", order="*i64", ends="*i64"
    )
    assert used.spill_bytes == 0
    assert used.num_wgmma + used.num_mma > 0


@SLOW
@pytest.mark.parametrize("form", [INT8, GPTQ, Q4_K], ids=lambda form: form.name)
def test_rows_and_sums_of_parts(form: QuantFormat) -> None:
    constants = format_constants(form, 32000, 4096) | {"BLOCK_U": 128, "num_warps": 4}
    assert compiled(quantized_rows_kernel, form, constants, ids="*i64").spill_bytes == 0
    constants = {"N": 4096, "BLOCK_N": 1024, "num_warps": 4}
    used = compiled(add_parts_kernel, form, constants, bias="*bf16", residual="*bf16")
    assert used.spill_bytes == 0


NORM = {"scaled": "*bf16", "new_squares": "*fp32", "norm_weight": "*bf16", "residual": "*bf16"}
# The products of Llama-8B: gate and up, and the output projection with the norm after it.
PRODUCTS = [((14336, 4096), "silu", {"squares": "*fp32"}), ((4096, 4096), "", NORM)]


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        (GPTQ, 64),
        *(pytest.param(form, rows, marks=SLOW) for form in FORMS for rows in (1, 4, 16, 32, 256)),
    ],
)
def test_fused_products(form: QuantFormat, rows: int) -> None:
    for size, activation, types in PRODUCTS:
        if rows <= FEW_ROWS:
            kernel, launch = (
                few_rows_fused_kernel,
                few_rows_fused_launch(form, rows, *size, activation),
            )
        else:
            kernel = many_rows_fused_kernel
            launch = many_rows_fused_launch(form, rows, *size, activation, torch.bfloat16)
        constants = launch.constants | {"SQUARES": 64, "BLOCK_S": 64}
        used = compiled(kernel, form, constants, bias="*bf16", order="*i32", **types)
        assert used.spill_bytes == 0
        assert used.shared_bytes <= 227 * 1024
        assert rows <= FEW_ROWS or used.num_wgmma + used.num_mma > 0
