"""The triton kernels compiled for compute capability 9.0, which needs no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")

from ostinato.benchmarks.machine.described_device import described_device
from ostinato.benchmarks.micro.kernels.kernel_table import (
    Variant,
    compile_variant,
    render,
    variants,
)

# The rest of the table takes more than a minute of one core and shares its code paths with these.
# Kernels of attention take 2 s each: among these, each role, size of heads, type of cache and
# optional argument occurs.
ATTENTION = {
    ("16/8 heads, D256", "few", ""),
    ("Llama-8B 32/8 heads, D128", "long", "fp8_e4m3"),
    ("32/8 heads, D64", "short", "fp8_e4m3"),
    ("window 4096, cap 50, D128", "short", ""),
    ("gpt-oss 64/8 heads, D64, window 128, sinks", "long", ""),
    ("64/8 heads, D128, sinks", "few", ""),
    ("BLOOM-7B 32/32 heads, D128, ALiBi", "short", ""),
}
OTHERS = {
    "Llama-8B 32/8 heads, D128",
    "Qwen3-30B-A3B output and router, 8 rows",
    "Qwen3-30B-A3B gate and up, 8 rows",
    "Qwen3-30B-A3B down, 8 rows",
    "DeepSeek-V3 output, blocks, 256 rows",
    "Qwen3.5-4B",
    "LFM2-1.2B",
    "Granite-4-tiny",
}


def is_unmarked(variant: Variant) -> bool:
    if variant.role in ("few", "short", "long"):
        is_listed = (variant.model, variant.role, variant.cache_dtype) in ATTENTION
        return is_listed and variant.dtype == "bfloat16"
    return variant.model in OTHERS


CASES = [
    pytest.param(
        variant,
        id=f"{variant.model}-{variant.role}-{variant.dtype}-{variant.cache_dtype or 'same'}",
        marks=() if is_unmarked(variant) else pytest.mark.slow,
    )
    for variant in variants()
]


@pytest.mark.parametrize("variant", CASES)
def test_compiles_within_registers_and_shared_memory(variant: Variant) -> None:
    used = compile_variant(variant)
    print(render([(variant, used)]))  # noqa: T201 - the report, seen with pytest -s
    assert used.spill_bytes == 0
    assert used.shared_bytes <= 227 * 1024
    if variant.uses_tensor_cores:
        assert used.num_wgmma + used.num_mma > 0
        # The keys and values of the next tiles are copied while a tile is computed.
        assert used.num_copies > 0
    if variant.uses_tensor_cores and (
        variant.role == "long" or variant.constants["BLOCK_M"] == 128
    ):
        assert used.num_wgmma > 0, "tiles of 128 rows must use the wide matrix instructions"
    if variant.role in ("few", "short") and variant.constants["BLOCK_M"] == 16:
        resident = described_device("h200").resident_programs(
            used.registers, used.shared_bytes, used.num_threads
        )
        wanted = 1 if variant.role == "few" else 2
        assert resident >= wanted, f"the launch counts on {wanted} programs a processor"
