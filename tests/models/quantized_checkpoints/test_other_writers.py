"""Checkpoints with the names and keys that different versions of the libraries write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.quantized_checkpoints.loading import load, matrices
from tests.models.quantized_checkpoints.writers import Form, edit, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

NAME = "layers.1.mlp.down_proj"
AUTO_ROUND = {
    "amp": True,
    "act_bits": 32,
    "autoround_version": "0.5.1",
    "data_type": "int",
    "enable_quanted_input": False,
    "iters": 1000,
    "low_gpu_mem_usage": True,
    "nsamples": 512,
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
    "to_quant_block_names": "model.layers",
}
GPTQMODEL = {
    "checkpoint_format": "gemm",
    "desc_act": False,
    "format": "gemm",
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:5.8.0"], "act_group_aware": True},
    "pack_dtype": "int32",
}
TRANSFORMERS = transformers.AwqConfig(group_size=32).to_dict()
FP8 = transformers.FineGrainedFP8Config(weight_block_size=(64, 64)).to_dict()


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    return save(reference_model(VARIANTS["qwen2"]), VARIANTS["qwen2"].as_one_file(), folder)


def check(floats: Path, directory: Path, form: Form) -> None:
    """Check that a checkpoint is read with the weights that it stands for."""
    restored = write(floats, directory, form)
    found = matrices(load(directory)[0])[NAME]
    assert found.method.is_quantized
    assert torch.equal(found.dense(), restored[f"model.{NAME}.weight"])


@pytest.mark.parametrize(
    "settings",
    [
        {"packing_format": "auto_round"},
        {"packing_format": "auto_round:gptq"},
        {"packing_format": "auto_round:awq"},
        {"backend": "auto_round:exllamav2"},
        {"backend": "auto_round:gptq:exllamav2"},
        {},
    ],
    ids=str,
)
def test_zero_points_of_auto_round(floats: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """The plain packing stores zero points as they are, that of GPTQ stores them minus 1."""
    check(floats, tmp_path / "x", Form("auto_round", symmetric=False, settings=settings))


@pytest.mark.parametrize(
    "form",
    [
        Form("gptq", settings=AUTO_ROUND),
        Form("gptq", settings=transformers.GPTQConfig(4, group_size=32).to_dict()),
        Form("awq", settings={**AUTO_ROUND, "provider": "auto-round", "zero_point": False}),
        Form("awq", settings={**GPTQMODEL, "zero_point": False}),
        Form("awq", symmetric=False, settings=TRANSFORMERS),
        Form("fp8", bits=8, group=64, settings=FP8),
    ],
    ids=["auto-round", "transformers", "auto-round", "gptqmodel", "transformers", "transformers"],
)
def test_keys_and_tensors_of_other_libraries(floats: Path, tmp_path: Path, form: Form) -> None:
    """AutoRound and GPTQModel store zero points of symmetric weights in AWQ's format too."""
    check(floats, tmp_path / "x", form)


def test_sparse_formats_of_compressed_tensors(floats: Path, tmp_path: Path) -> None:
    """Older checkpoints state how many weights are zero, although they store all weights."""
    sparsity = {
        "format": "dense",
        "global_sparsity": 19.098103233975568,
        "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
    }
    form = Form("pack_quantized", settings={"sparsity_config": sparsity})
    check(floats, tmp_path / "x", form)
    edit(tmp_path / "x", sparsity_config={**sparsity, "format": "sparse-bitmask"})
    with pytest.raises(ValueError, match="sparsity_config is not supported"):
        load(tmp_path / "x")
