"""The Triton kernels of greedy and full draws: interpreted, and compiled without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is installed on Linux x86-64 only")

from ostinato.ops.sampling.triton_unsorted_draw import draw_kernel, parts_kernel
from tests.ops.triton_checks import compiled_kernel


@pytest.mark.parametrize(
    ("kernel", "constants"), [(parts_kernel, {}), (draw_kernel, {"PARTS": 64})]
)
def test_compiles_without_spills(kernel: object, constants: dict[str, int]) -> None:
    types = {"token_ids": "*i64", "highest": "*fp32", "likeliest": "*i32", "sums": "*i64"}
    types |= {"logits": "*fp32", "paths": "*fp64", "temperatures": "*fp64", "uniforms": "*fp64"}
    types |= {"row_stride": "i32", "vocab_size": "i32", "num_parts": "i32"}
    used = compiled_kernel(kernel, {"PART": 4096, "num_warps": 8, **constants}, types)
    assert used.spill_bytes == 0
