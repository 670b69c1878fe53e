"""The audio encoder against transformers, and what a checkpoint must have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.conf.schema import ModelSection
from ostinato.models.audio.audio_tower import AudioTower
from ostinato.models.checkpoints.checkpoint import CheckpointError, open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.decoder import Decoder
from ostinato.models.kv_cache import CrossSpace
from ostinato.models.registry import build_model, read_model_config
from tests.models.audio.whisper_checkpoints import load_whisper, make_whisper
from tests.runtime.audio_engines import sound


def load(path: Path) -> Decoder:
    checkpoint = open_checkpoint(ModelSection(path=str(path)))
    model = build_model(
        read_model_config(checkpoint),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend="reference",
        cross=CrossSpace(num_windows=1, num_keys=1500, block_size=16, dtype=torch.float32),
    )
    load_weights(model, checkpoint)
    assert isinstance(model, Decoder)
    return model


def encode(tower: AudioTower, features: Tensor, rows_per_unit: int) -> tuple[Tensor, int]:
    """The states, and the number of units."""
    units = tower.encode(features, rows_per_unit)
    count = 0
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value, count
        count += 1


@pytest.mark.parametrize("num_bins", [80, 128])
@torch.inference_mode()
def test_states_are_those_of_transformers(num_bins: int, tmp_path: Path) -> None:
    make_whisper(tmp_path, num_bins=num_bins)
    reference, _ = load_whisper(tmp_path)
    tower = load(tmp_path).audio
    assert tower is not None
    features = sound(3, num_bins)
    expected = reference.model.encoder(features[None]).last_hidden_state[0]
    counts: list[int] = []
    for rows_per_unit in (7, 256, 1 << 20):
        states, count = encode(tower, features, rows_per_unit)
        torch.testing.assert_close(states, expected, atol=2e-4, rtol=1e-4)
        counts.append(count)
    assert counts[0] > counts[1] > counts[2] == 2 + 3 * tower.config.num_layers


@torch.inference_mode()
def test_the_activation_is_that_of_the_layers_alone(tmp_path: Path) -> None:
    """The convolutions have GELU."""
    config = make_whisper(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "activation_function": "relu"}))
    tower, features = load(tmp_path).audio, sound(3)
    assert tower is not None
    expected = load_whisper(tmp_path)[0].model.encoder(features[None]).last_hidden_state[0]
    states, _ = encode(tower, features, 512)
    torch.testing.assert_close(states, expected, atol=2e-4, rtol=1e-4)


def test_a_spectrogram_of_another_size_is_refused(tmp_path: Path) -> None:
    tower = load(make_whisper(tmp_path)).audio
    assert tower is not None
    with pytest.raises(ValueError, match=r"\[80, 2999\].*\[80, 3000\]"):
        next(tower.encode(sound(1)[:, 1:], 64))


def test_a_checkpoint_needs_every_tensor_but_the_bias_of_keys(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert not any(name.endswith("k_proj.bias") for name in tensors)
    for missing in (
        "model.encoder.conv1.weight",
        "model.encoder.layers.1.fc1.bias",
        "model.decoder.layers.0.encoder_attn.k_proj.weight",
        "model.decoder.layers.0.encoder_attn_layer_norm.weight",
    ):
        rest = {name: tensor for name, tensor in tensors.items() if name != missing}
        save_file(rest, file, metadata={"format": "pt"})
        # Names in messages are without the prefix that other checkpoints leave out.
        with pytest.raises(CheckpointError, match=missing.removeprefix("model.").split(".", 1)[1]):
            load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("scale_embedding", True, "scale_embedding=True"),
        ("is_encoder_decoder", False, "is_encoder_decoder=False"),
        ("activation_function", "swish2", "activation_function"),
        ("encoder_attention_heads", 3, "encoder_attention_heads=3"),
    ],
)
def test_settings_that_are_not_supported_are_named(
    key: str, value: object, text: str, tmp_path: Path
) -> None:
    make_whisper(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises((ValueError, CheckpointError), match=text):
        load(tmp_path)
