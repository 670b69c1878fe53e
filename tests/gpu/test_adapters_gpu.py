"""Low-rank adapters on a CUDA device: the op against plain torch, and an engine against a CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato import LLM
from ostinato.benchmarks.workload.random_adapter import write_random_adapter
from ostinato.ops.adapters.add_adapters import add_adapters
from tests.gpu.test_engine_gpu import make_prompts
from tests.gpu.tiny_llama import MODEL, cuda_config
from tests.ops.adapters.adapter_rows import Rows, make_rows
from tests.runtime.adapted_engines import adapted_answers
from tests.runtime.tiny import tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "widths", "max_rank"),
    [(1, 4096, (4096, 1024, 1024), 16), (37, 1000, (80, 48), 20), (300, 512, (700,), 64)],
)
def test_rows_get_their_own_adapters(
    dtype: torch.dtype, num_rows: int, in_features: int, widths: tuple[int, ...], max_rank: int
) -> None:
    rows = make_rows(1, num_rows, in_features, widths, max_rank=max_rank, dtype=dtype)
    expected = rows.reference()
    none = rows.slots[:, 0] < 0
    on_gpu = Rows(*(tensor.cuda() for tensor in rows))
    add_adapters(*on_gpu)
    tolerance = 1e-4 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(on_gpu.y.cpu(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(on_gpu.y.cpu()[none], rows.y[none])


def test_a_captured_call_serves_other_slots_and_other_adapters() -> None:
    first, second = (make_rows(seed, 9, 256, (300, 64)) for seed in (1, 2))
    static = Rows(*(tensor.cuda() for tensor in first))
    add_adapters(*static)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_adapters(*static)
    for rows in (first, second):
        for tensor, value in zip(static, rows, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.testing.assert_close(static.y.cpu(), rows.reference(), atol=1e-4, rtol=1e-4)


def test_greedy_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    room = ("lora.max_adapters=3", "lora.max_rank=8")
    cpu = LLM(
        config=tiny_config(
            "device.name=cpu",
            "graphs.attention=reference",
            "graphs.pack_weights=false",
            "cache.block_size=16",
            *room,
            model__config=MODEL,
        )
    )
    gpu = LLM(config=cuda_config(*room))
    adapters = [write_random_adapter(tmp_path / str(seed), MODEL, seed=seed) for seed in range(3)]
    prompts = make_prompts(16)
    expected = adapted_answers(cpu, adapters, prompts)
    assert adapted_answers(gpu, adapters, prompts) == expected
    assert gpu.stats().steps_by_kind["captured"] > 0
