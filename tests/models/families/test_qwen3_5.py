"""Checkpoints of Qwen3.5 with a vision tower: their decoder is used, under other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from docs.list_models import REFUSED
from ostinato.models.base import DecoderLayer
from ostinato.models.checkpoints.checkpoint import CheckpointError
from ostinato.models.registry import model_class
from tests.models.driver import Driver, Sequence
from tests.models.parity import NUM_PROMPT, PROMPT, TOLERANCE, load
from tests.models.random_checkpoints import VARIANTS, reference_model, save
from tests.models.recurrent_variants import WITH_TOWER

TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
}


def model_with_tower(name: str) -> Any:
    kind = getattr(transformers, WITH_TOWER[name])
    config = kind.config_class(text_config=dict(VARIANTS[name].settings), vision_config=TOWER)
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn(parameter.shape) * 0.1
    return model.float().eval()


def stack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Store the experts of each layer as two tensors, as the published checkpoints do."""
    names = [name for name in tensors if ".experts." in name and not name.startswith("mtp.")]
    layers = {name.split(".experts.")[0] for name in names}
    for layer in layers:
        parts: dict[str, list[torch.Tensor]] = {}
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{layer}.experts.{expert}.{part}.weight" for expert in range(8)]
            parts[part] = [tensors.pop(name) for name in names]
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{layer}.experts.down_proj"] = torch.stack(parts["down_proj"])


@pytest.mark.parametrize(
    ("name", "is_stacked"), [("qwen3.5", False), ("qwen3.5-moe", False), ("qwen3.5-moe", True)]
)
def test_the_decoder_computes_the_logits_of_texts(
    tmp_path: Path, name: str, is_stacked: bool
) -> None:
    reference = model_with_tower(name)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(one.startswith("model.language_model.layers.") for one in tensors)
    assert any(one.startswith("model.visual.") for one in tensors)
    for one in ("self_attn.q_proj", "mlp.experts.0.gate_proj"):
        tensors[f"mtp.layers.0.{one}.weight"] = torch.zeros(2, 2)
    if is_stacked:
        stack_experts(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    model, config = load(tmp_path, "cpu")
    assert config.vision is None
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    logits = Driver(model, config).prefill(Sequence(PROMPT), [NUM_PROMPT])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    if is_stacked:
        tensors.pop("model.language_model.layers.1.mlp.experts.down_proj")
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"lacks tensor .*layers\.1\.mlp\.experts\.down"):
            load(tmp_path, "cpu")


@pytest.mark.parametrize("name", WITH_TOWER)
def test_listed_values_of_the_decoder_are_refused(name: str) -> None:
    architecture = WITH_TOWER[name]
    config = {"architectures": [architecture], "text_config": dict(VARIANTS[name].settings)}
    model_class(architecture).read_config(config)
    for key, value, _, _ in REFUSED[architecture]:
        inner = key.removeprefix("text_config.")
        changed = {**config, "text_config": {**config["text_config"], inner: value}}
        with pytest.raises(ValueError, match=f"{inner}={value} is not supported"):
            model_class(architecture).read_config(changed)


def test_the_fused_kernels_of_small_steps_are_for_layers_without_gates(tmp_path: Path) -> None:
    for name, expected in (("qwen3.5", [False] * 4), ("lfm2", [False, True, False])):
        directory = save(reference_model(VARIANTS[name]), VARIANTS[name], tmp_path / name)
        model, _ = load(directory, "reference", torch.bfloat16)
        layers = cast(list[DecoderLayer], list(model.layers))
        assert [layer.few_rows() is not None for layer in layers] == expected
