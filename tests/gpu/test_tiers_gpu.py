"""Copies of KV blocks of a CUDA device: bytes, and the tokens of prompts that were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato import LLM
from ostinato.models.kv_cache import KVCache, KVCacheSpec
from ostinato.runtime.tiers.device_blocks import CpuBlocks, CudaBlocks
from tests.gpu.test_engine_gpu import generate, make_prompts
from tests.gpu.tiny_llama import cuda_config

pytestmark = pytest.mark.gpu

# Room for 96 blocks. The prompts below need more, so blocks are reused.
SMALL = ("cache.memory_gib=0.003", "cache.store=all", "speculation.method=none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_block_is_saved_as_it_was_and_restored(dtype: torch.dtype) -> None:
    spec = KVCacheSpec(
        num_layers=3, num_kv_heads=2, head_dim=64, value_dim=48, block_size=16, dtype=dtype
    )
    with torch.inference_mode():
        on_gpu = spec.allocate(9, torch.device("cuda"))
        sides = [side.view(torch.uint8) for layer in on_gpu for side in layer]
        for side in sides:
            side.random_(0, 256)
        on_cpu = KVCache((key.cpu(), value.cpu()) for key, value in on_gpu)
        gpu, cpu = CudaBlocks(on_gpu), CpuBlocks(on_cpu)
        saved, expected = gpu.make_buffers(2), cpu.make_buffers(2)
        for index, block_id in enumerate((4, 7)):
            gpu.save(block_id, saved[index])
            cpu.save(block_id, expected[index])
        for side in sides:
            side[4:8].zero_()  # the next step overwrites the blocks
        mark = gpu.mark()
    gpu.wait(mark)
    assert all(map(torch.equal, saved, expected))
    gpu.restore(2, saved[1], mark)
    for side, before in zip(sides, (side for layer in on_cpu for side in layer), strict=True):
        assert torch.equal(side[2].cpu(), before.view(torch.uint8)[7])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_loaded_prompts_have_the_same_tokens(tier: str, tmp_path: Path) -> None:
    setting = "cache.host_gib=0.05" if tier == "host" else f"cache.disk_dir={tmp_path}"
    prompts = make_prompts(24)
    expected = generate(LLM(config=cuda_config("speculation.method=none")), prompts)
    llm = LLM(config=cuda_config(*SMALL, setting))
    for _ in range(3):
        assert generate(llm, prompts) == expected
    stats = llm.stats()
    assert stats.tiers[tier].num_loaded_blocks > 0
    assert not stats.late_compiles
    llm.close()
    if tier == "disk":
        again = LLM(config=cuda_config(*SMALL, setting))
        assert generate(again, prompts) == expected
        assert again.stats().tiers["disk"].num_loaded_blocks > 0
