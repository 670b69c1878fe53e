"""What is particular to Nemotron-H: names in checkpoints, limits of time steps, and its caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.conf.schema import ExpertKernels, ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.block_parts import PartBlock
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import Shard, Span, Stage
from tests.models.driver import Driver, Sequence
from tests.models.parity import PROMPT, TOLERANCE, load
from tests.models.random_checkpoints import VARIANTS, reference_model, save

MIXED = VARIANTS["nemotron-h-mixed"]  # -M*E
OF_PARTS = (
    ("up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"),
    (
        *("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias"),
        *("norm.weight", "out_proj.weight"),
    ),
    ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
    (
        *("gate.weight", "gate.e_score_correction_bias"),
        *(f"experts.{n}.{side}_proj.weight" for n in range(6) for side in ("up", "down")),
        *(f"shared_experts.{s}_proj.{t}" for s in ("up", "down") for t in ("weight", "bias")),
    ),
)
PUBLISHED = {
    "backbone.embeddings.weight",
    "backbone.norm_f.weight",
    "lm_head.weight",
    *(f"backbone.layers.{layer}.norm.weight" for layer in range(4)),
    *(
        f"backbone.layers.{layer}.mixer.{name}"
        for layer, names in enumerate(OF_PARTS)
        for name in names
    ),
}


def read(directory: Path) -> ModelConfig:
    return read_model_config(open_checkpoint(ModelSection(path=str(directory))))


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_names_of_published_checkpoints(tmp_path: Path, prefix: str) -> None:
    """Layers that predict one token more are not read."""
    reference = reference_model(MIXED)
    save(reference, MIXED, tmp_path)
    file = tmp_path / "model.safetensors"
    found = {
        name.replace("model.", "backbone.", 1): tensor for name, tensor in load_file(file).items()
    }
    assert set(found) == PUBLISHED
    renamed = {name.replace("backbone.", prefix, 1): tensor for name, tensor in found.items()}
    extra = {"mtp.layers.0.norm.weight": torch.ones(64)}
    save_file(renamed | extra, file, metadata={"format": "pt"})
    model, config = load(tmp_path, "cpu")
    logits = Driver(model, config).prefill(Sequence(PROMPT), [len(PROMPT)])
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_time_steps_have_the_limits_of_the_config(tmp_path: Path) -> None:
    """The published code reads `time_step_limit`, and the class of transformers should."""
    variant = VARIANTS["nemotron-h"].as_one_file()
    limits = (0.9, 1.6)
    reference = reference_model(variant)
    file = save(reference, variant, tmp_path) / "config.json"
    stated = json.loads(file.read_text(encoding="utf-8")) | {"time_step_limit": limits}
    file.write_text(json.dumps(stated), encoding="utf-8")
    mixers = [one for one in reference.modules() if hasattr(one, "time_step_limit")]
    with torch.no_grad():
        unlimited = reference(torch.tensor([PROMPT])).logits[0]
        for mixer in mixers:
            mixer.time_step_limit = limits
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert len(mixers) == 3
    assert float((unlimited - expected).abs().max()) > 100 * TOLERANCE
    model, config = load(tmp_path, "cpu")
    for chunks in ([len(PROMPT)], [1] * len(PROMPT)):
        logits = Driver(model, config).prefill(Sequence(PROMPT), chunks)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_blocks_with_an_mlp_or_experts_keep_nothing(tmp_path: Path) -> None:
    save(reference_model(MIXED), MIXED, tmp_path)
    config = read(tmp_path)
    spec = config.kv_cache_spec(16, torch.float32)
    sizes = [[side.numel() for side in layer] for layer in spec.allocate(3, torch.device("cpu"), 5)]
    keys, states = 3 * 2 * 16 * 24, 5 * 8 * 16 * 24
    inputs = 5 * 3 * (8 * 16 + 2 * 2 * 24)
    assert sizes == [[0, 0], [inputs, states], [keys, keys], [0, 0]]
    assert spec.bytes_per_token == 2 * 2 * 24 * 4
    assert config.kv_cache_spec(16, torch.float32).bytes_per_block == 16 * spec.bytes_per_token


def test_a_stage_can_keep_nothing(tmp_path: Path) -> None:
    save(reference_model(MIXED), MIXED, tmp_path)
    stage = Stage(number=0, count=2, layers=Span(0, 1, 4))
    spec = read(tmp_path).kv_cache_spec(16, torch.float32, shard=Shard(stage=stage))
    assert (spec.num_layers, spec.bytes_per_token) == (0, 0)
    assert spec.recurrent is not None
    assert spec.recurrent.bytes_per_slot == 0
    [layer] = spec.allocate(3, torch.device("cpu"), 5)
    assert [side.numel() for side in layer] == [0, 0]


def test_each_block_has_one_norm_and_one_part(tmp_path: Path) -> None:
    model, config = load(save(reference_model(MIXED), MIXED, tmp_path), "cpu")
    assert all(isinstance(layer, PartBlock) for layer in model.layers)
    assert [len(list(layer.children())) for layer in model.layers] == [2] * config.num_layers


def test_flashinfer_has_no_kernels_for_experts_without_gates(tmp_path: Path) -> None:
    save(reference_model(MIXED), MIXED, tmp_path)
    with pytest.raises(ValueError, match="flashinfer has kernels for gated experts only"):
        build_model(
            read(tmp_path),
            dtype=torch.bfloat16,
            device=torch.device("meta"),
            attention_backend="reference",
            experts=ExpertKernels.flashinfer,
        )


def test_squared_relu(tmp_path: Path) -> None:
    """The default activation of the family is not that of the other families."""
    config = read(save(reference_model(MIXED), MIXED, tmp_path))
    assert config.activation == "relu2"
