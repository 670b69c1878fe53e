"""The Triton kernels of experts compiled for compute capability 9.0, which needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.benchmarks.machine.kernel_resources import Resources, read_resources
from ostinato.ops.moe.triton_moe_linear import (
    combine_slots_kernel,
    grouped_constants,
    grouped_kernel,
)
from ostinato.ops.moe.triton_routing import expert_order_kernel, route_kernel

CAPABILITY = 90
OPTIONS = ("num_warps", "num_stages")
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
SLOW = pytest.mark.slow  # the unmarked cases have the tiles of 16 and of 64 rows
# (experts, slots, columns, depth) of gate and up, and of down.
QWEN3_30B = [(128, 8, 1536, 2048), (128, 8, 2048, 768)]
MIXTRAL = [(8, 2, 28672, 4096), (8, 2, 4096, 14336)]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Resources:
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # As at a launch: data pointers and strides are multiples of 16.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and name not in ("scale", "num_pairs")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    found: Any = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    return read_resources(found.asm["ptx"], found.metadata.shared, options["num_warps"], CAPABILITY)


@pytest.mark.parametrize(
    ("tokens", "sizes", "dtype"),
    [
        (1, QWEN3_30B[0], torch.bfloat16),
        (512, MIXTRAL[1], torch.bfloat16),
        pytest.param(64, QWEN3_30B[1], torch.bfloat16, marks=SLOW),
        pytest.param(1024, QWEN3_30B[0], torch.bfloat16, marks=SLOW),
        pytest.param(8192, QWEN3_30B[1], torch.bfloat16, marks=SLOW),
        pytest.param(8192, MIXTRAL[0], torch.bfloat16, marks=SLOW),
        pytest.param(16, MIXTRAL[0], torch.float32, marks=SLOW),
    ],
)
def test_the_grouped_product_spills_nothing(
    tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    experts, slots, columns, depth = sizes
    constants = grouped_constants(tokens * slots, experts, dtype) | {
        "N": columns,
        "K": depth,
        "SLOTS": slots,
        "IS_SHARED": True,
        "NUM_EXPERTS": experts,
        "BLOCK_E": experts,
        "bias": None,
    }
    types = dict.fromkeys(("x", "weight", "out"), POINTERS[dtype])
    types |= {"order": "*i64", "ends": "*i64", "x_stride": "i32"}
    used = compiled(grouped_kernel, types, constants)
    assert used.spill_bytes == 0
    assert used.shared_bytes <= 227 * 1024
    if dtype == torch.bfloat16:
        assert used.num_wgmma + used.num_mma > 0
        assert used.num_copies > 0


@pytest.mark.parametrize("scoring", ["softmax", pytest.param("top_softmax", marks=SLOW)])
def test_routing_compiles(scoring: str) -> None:
    types = {"logits": "*bf16", "ids": "*i32", "weights": "*fp32", "scale": "fp32"}
    types["logits_stride"] = "i32"
    constants = {"NUM_EXPERTS": 128, "TOP_K": 8, "SCORING": scoring, "RENORMALIZE": True}
    constants |= {"BLOCK_E": 128, "BLOCK_K": 8, "bias": None, "num_warps": 1}
    assert compiled(route_kernel, types, constants).spill_bytes == 0


def test_the_order_of_pairs_compiles() -> None:
    types = {"ids": "*i32", "order": "*i64", "ends": "*i64", "num_pairs": "i32"}
    constants = {"NUM_EXPERTS": 128, "BLOCK": 32, "OTHERS": 128, "num_warps": 4}
    assert compiled(expert_order_kernel, types, constants).spill_bytes == 0


def test_the_sum_of_slots_compiles() -> None:
    types = {"products": "*fp32", "routing_weights": "*fp32", "residual": "*bf16", "out": "*bf16"}
    types["residual_stride"] = "i32"
    constants = {"N": 2048, "SLOTS": 8, "BLOCK_N": 1024, "num_warps": 4}
    assert compiled(combine_slots_kernel, types, constants).spill_bytes == 0
