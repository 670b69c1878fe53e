"""The Triton kernels of `add_adapters`, compiled for a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")

from ostinato.ops.adapters.triton_adapters import (
    expand_constants,
    expand_kernel,
    shrink_constants,
    shrink_kernel,
)
from tests.ops.triton_checks import compiled_kernel

TYPES = {
    **dict.fromkeys(("x", "y", "a", "b"), "*bf16"),
    **dict.fromkeys(("slots", "ranks", "bounds"), "*i32"),
    **dict.fromkeys(("scales", "hidden"), "*fp32"),
    "y_stride": "i32",
}


@pytest.mark.parametrize(
    "max_rank", [16, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (8, 64, 256))]
)
def test_llama_8b(max_rank: int) -> None:
    shrink = compiled_kernel(shrink_kernel, shrink_constants(4096, max_rank, 3), TYPES)
    assert shrink.spill_bytes == 0
    assert shrink.num_wgmma + shrink.num_mma > 0
    expand = compiled_kernel(expand_kernel, expand_constants(6144, 4096, max_rank, 3), TYPES)
    assert expand.spill_bytes == 0
