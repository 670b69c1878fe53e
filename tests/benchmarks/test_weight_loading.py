"""The benchmark of weight loading writes GGUF files that load, and counts their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.benchmarks.micro.model.weight_loading import GGUF_TYPES, measure
from ostinato.benchmarks.workload.random_gguf import write_random_gguf
from ostinato.models.gguf.gguf_file import TENSOR_TYPES
from ostinato.ops.native.library import load
from tests.models.random_checkpoints import VARIANTS, reference_model

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
}


def config_of(name: str) -> dict:
    return reference_model(VARIANTS[name]).config.to_dict() | WIDE


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_gguf_files_of_random_weights_load(name: str, tmp_path: Path) -> None:
    load("core"), load("quantized")
    with torch.inference_mode():
        found = measure(f"GGUF {name}", config_of("qwen3"), tmp_path, 1)
    values, num_bytes = next(sizes[1:] for sizes in TENSOR_TYPES.values() if sizes[0] == name)
    assert found.file_bytes > 2 * 3 * 256 * 512 * num_bytes // values
    assert found.weight_bytes > 0
    assert found.seconds[0] > 0


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_type is .llama.; only qwen3 can be written"):
        write_random_gguf({"model_type": "llama"}, "Q4_0", tmp_path / "x.gguf")
