"""A checkpoint's scales of keys and values, against a model whose matrices are scaled instead.

The scales are powers of two, so multiplying and dividing by them is exact. `K` and `V` are so far
from 1 that keys and values would saturate or become zero in an 8-bit cache without scales.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.conf.schema import ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import CheckpointError, open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.registry import build_model, read_model_config
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.model_source import open_model
from tests.models.driver import Driver, Sequence
from tests.models.quantized_checkpoints.writers import Form, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save
from tests.runtime.tiny import tiny_config

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(23)]
K, V = 2.0**-12, 2.0**9
NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = VARIANTS["llama3"].as_one_file()
    return save(reference_model(variant), variant, tmp_path_factory.mktemp("floats"))


def changed(source: Path, target: Path, **tensors: Tensor) -> Path:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    save_file(stored | tensors, target / "model.safetensors")
    return target


def logits(directory: Path, *, scales: bool) -> Tensor:
    checkpoint = open_checkpoint(ModelSection(path=str(directory)))
    config = read_model_config(checkpoint)
    model = build_model(
        config,
        dtype=torch.float32,
        device=CPU,
        attention_backend="reference",
        has_cache_scales=scales,
    )
    assert isinstance(model, CausalLM)
    load_weights(model, checkpoint)
    return Driver(model, config, dtype=FP8).prefill(Sequence(PROMPT), [9, 14])


def scaled_matrices(source: Path, target: Path, scales: list[tuple[float, float]]) -> Path:
    """Copy a checkpoint and scale its matrices.

    Keys and values are divided by the scales. Queries and the inputs of the output projection are
    multiplied by them.
    """
    tensors: dict[str, Tensor] = {}
    stored = load_file(source / "model.safetensors")
    for layer, (k, v) in enumerate(scales):
        for kind, factor in (("q", k), ("k", 1 / k), ("v", 1 / v), ("o", v)):
            name = f"model.layers.{layer}.self_attn.{kind}_proj.weight"
            tensors[name] = stored[name] * factor
    return changed(source, target, **tensors)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_layers_have_their_own_scales(
    written: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    tensors = {f"model.layers.0.{names[0]}": torch.tensor(K)}
    tensors[f"model.layers.1.{names[0]}"] = torch.tensor([0.5])
    tensors[f"model.layers.1.{names[1]}"] = torch.tensor([V])
    ours = logits(changed(written, tmp_path / "scaled", **tensors), scales=True)
    # A layer that stores one scale uses it for keys and for values.
    expected = scaled_matrices(written, tmp_path / "matrices", [(K, K), (0.5, V)])
    torch.testing.assert_close(ours, logits(expected, scales=False), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours, logits(written, scales=False), atol=1e-2)


def test_one_scale_for_both_and_none(written: Path, tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.self_attn.kv_scale": torch.tensor(K),
        "model.layers.1.self_attn.k_scale": torch.tensor(-1.0),
    }
    ours = logits(changed(written, tmp_path / "scaled", **tensors), scales=True)
    expected = scaled_matrices(written, tmp_path / "matrices", [(K, K), (1.0, 1.0)])
    torch.testing.assert_close(ours, logits(expected, scales=False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(0.0), "k_scale is 0.0; a scale"),
        (torch.tensor(float("inf")), "k_scale is inf"),
        (torch.ones(2), r"k_scale is \[2\]"),
    ],
)
def test_a_scale_is_one_number(written: Path, tmp_path: Path, value: Tensor, message: str) -> None:
    name = "model.layers.0.self_attn.k_scale"
    directory = changed(written, tmp_path / "wrong", **{name: value})
    with pytest.raises(CheckpointError, match=message):
        logits(directory, scales=True)


def test_only_a_cache_of_8_bits_uses_them(written: Path, tmp_path: Path) -> None:
    quantised = tmp_path / "quantised"
    write(written, quantised, Form("gptq", 4, 32))
    name = "model.layers.0.self_attn.k_scale"
    directory = changed(quantised, tmp_path / "scaled", **{name: torch.tensor(K)})
    for dtype, is_used in (("fp8_e4m3", True), ("auto", False), ("int8", False)):
        config = tiny_config(f"model.path={directory}", f"cache.dtype={dtype}")
        assert open_model(config).has_cache_scales is is_used
    recorded = ["model.implementation=transformers", "cache.dtype=fp8_e4m3"]
    with pytest.raises(StartupError, match="which TracedCausalLM does not use"):
        open_model(tiny_config(f"model.path={directory}", *recorded))
