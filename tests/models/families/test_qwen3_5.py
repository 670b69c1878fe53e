"""Texts for a Qwen3.5 with a vision tower, and the forms of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.models.base import DecoderLayer
from ostinato.models.checkpoints.checkpoint import CheckpointError
from tests.models.parity import NUM_PROMPT, PROMPT, TOLERANCE, load
from tests.models.random_checkpoints import VARIANTS, reference_model, save
from tests.models.vision import image_models
from tests.models.vision.image_models import ImageDriver, ImageSequence
from tests.models.vision.image_variants import VARIANTS as IMAGE_VARIANTS


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
    variant = IMAGE_VARIANTS[name]
    reference = image_models.reference_model(variant)
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
    model, config = image_models.load(tmp_path)
    expected, places = image_models.hf_logits(variant, reference, PROMPT, [])
    sequence = ImageSequence(PROMPT, [0] * NUM_PROMPT, places)
    logits = ImageDriver(model, config).prefill(sequence, [NUM_PROMPT])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    if is_stacked:
        tensors.pop("model.language_model.layers.1.mlp.experts.down_proj")
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"lacks tensor .*layers\.1\.mlp\.experts\.down"):
            image_models.load(tmp_path)


def test_the_fused_kernels_of_small_steps_are_for_layers_without_gates(tmp_path: Path) -> None:
    for name, expected in (("qwen3.5", [False] * 4), ("lfm2", [False, True, False])):
        directory = save(reference_model(VARIANTS[name]), VARIANTS[name], tmp_path / name)
        model, _ = load(directory, "reference", torch.bfloat16)
        layers = cast(list[DecoderLayer], list(model.layers))
        assert [layer.few_rows() is not None for layer in layers] == expected
