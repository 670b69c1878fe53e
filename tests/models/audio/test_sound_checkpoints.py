"""Checkpoints of models that take sounds: names of tensors, missing ones, quantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import Quantization
from ostinato.models.checkpoints.checkpoint import CheckpointError
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.decoder import Decoder
from ostinato.models.registry import build_model
from ostinato.models.sharding import Shard, Span, Stage
from tests.models.audio.sound_models import FAMILIES, make_sound_model, run_tower
from tests.models.quantized_checkpoints.writers import write
from tests.models.vision.image_models import load
from tests.models.vision.test_tower_checkpoints import (
    FORMS,
    Form,
    assert_same,
    matrices,
    renamed,
    rewrite,
    tensors_of,
)

FEATURES = torch.rand((128, 41), generator=torch.Generator().manual_seed(3))
# (beginning of a name that transformers saves, beginning of another name)
OTHER_NAMES = [
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("audio_tower.", "model.audio_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each family's checkpoint."""
    directory = tmp_path_factory.mktemp("models")
    return {family: make_sound_model(directory / family, family) for family in FAMILIES}


@torch.inference_mode()
def encode(model: Decoder) -> Tensor:
    assert model.sound is not None
    return run_tower(model.sound, FEATURES)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_newer_checkpoints_load(
    family: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    source = saved[family]
    tensors = {renamed(name, OTHER_NAMES): each for name, each in tensors_of(source).items()}
    assert not tensors.keys() & tensors_of(source).keys()
    directory = rewrite(source, tmp_path / "other", tensors)
    assert_same(load(source)[0], load(directory)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_but_the_bias_of_keys_is_needed(
    family: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    tensors = tensors_of(saved[family])
    assert not any("audio_tower" in name and "k_proj.bias" in name for name in tensors)
    for number, missing in enumerate(
        (
            "audio_tower.conv2.bias",
            "audio_tower.embed_positions.weight",
            "audio_tower.layers.1.self_attn.q_proj.bias",
            "audio_tower.layer_norm.weight",
            "multi_modal_projector.linear" + (".bias" if family == "qwen2_audio" else "_2.bias"),
            "language_model.model.layers.0.self_attn.k_proj.bias",
        )
    ):
        fewer = {name: each for name, each in tensors.items() if name != missing}
        assert len(fewer) == len(tensors) - 1
        directory = rewrite(saved[family], tmp_path / str(number), fewer)
        with pytest.raises(CheckpointError, match="lacks tensor") as error:
            load(directory)
        assert missing in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_tensor_of_the_tower_is_named(
    family: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    name = "audio_tower.layers.7.other.weight"
    tensors = {**tensors_of(saved[family]), name: torch.zeros(2)}
    with pytest.raises(CheckpointError, match=f"has unexpected tensor {name}"):
        load(rewrite(saved[family], tmp_path / "other", tensors))


def test_a_stored_bias_of_keys_is_used(saved: dict[str, Path], tmp_path: Path) -> None:
    tensors = tensors_of(saved["qwen2_audio"])
    name = "audio_tower.layers.1.self_attn.k_proj.bias"
    bias = torch.arange(32, dtype=torch.float32)
    model, _ = load(rewrite(saved["qwen2_audio"], tmp_path / "other", {**tensors, name: bias}))
    assert torch.equal(model.state_dict()["sound.blocks.1.attn.qkv.bias"][32:64], bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_room_for_sounds_has_no_tower(family: str, saved: dict[str, Path]) -> None:
    model, _ = load(saved[family], num_media_rows=0)
    assert (model.sound, model.media_table) == (None, None)
    whole = load(saved[family])[0].state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole[key]), key


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_on_load_leaves_the_tower_as_it_is(family: str, saved: dict[str, Path]) -> None:
    floats, _ = load(saved[family], pack=True)
    model, _ = load(saved[family], pack=True, quantization=Quantization.int8)
    kinds = {key: each.method.is_quantized for key, each in matrices(model).items()}
    assert not any(is_quantized for key, is_quantized in kinds.items() if key.startswith("sound."))
    assert all(is_quantized for key, is_quantized in kinds.items() if key.startswith("layers."))
    assert torch.equal(encode(model), encode(floats))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.method)
@pytest.mark.parametrize("is_new", [False, True], ids=["names of old files", "of new files"])
def test_quantised_checkpoints_have_a_float_tower(
    is_new: bool, form: Form, saved: dict[str, Path], tmp_path: Path
) -> None:
    source = saved["qwen2_audio"]
    restored = write(source, tmp_path / "quantised", form, floats=("audio_tower", "multi_modal"))
    pairs = OTHER_NAMES if is_new else []
    tensors = tensors_of(tmp_path / "quantised")
    tensors = {renamed(key, pairs): each for key, each in tensors.items()}
    file = tmp_path / "quantised" / "config.json"
    stated = json.loads(file.read_text())["quantization_config"]
    if form.method in ("awq", "fp8"):
        floats = ["audio_tower", "multi_modal_projector", "lm_head"]
        stated |= {"modules_to_not_convert": floats}
    other = tmp_path / "other"
    model, _ = load(
        rewrite(tmp_path / "quantised", other, tensors, quantization_config=stated), pack=True
    )
    expected, _ = load(rewrite(source, tmp_path / "floats", restored), pack=True)
    kinds = {key: each.method.is_quantized for key, each in matrices(model).items()}
    assert not any(is_quantized for key, is_quantized in kinds.items() if key.startswith("sound."))
    assert all(is_quantized for key, is_quantized in kinds.items() if key.startswith("layers."))
    assert torch.equal(encode(model), encode(expected))
    for key, module in matrices(expected).items():
        if key.startswith("layers."):
            found = matrices(model)[key].dense()
            torch.testing.assert_close(found, module.dense(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_stage_has_the_tower(number: int, saved: dict[str, Path]) -> None:
    _, config = load(saved["qwen2_audio"])
    layers = [Span(0, 1, 3), Span(1, 2, 3)][number]
    model = build_model(
        config,
        dtype=torch.float32,
        device=torch.device("meta"),
        attention_backend="reference",
        shard=Shard(stage=Stage(number, 2, layers)),
        num_media_rows=9,
    )
    assert isinstance(model, Decoder)
    assert (model.sound is None) == (number == 1)
    assert [table is None for table in model.media_tables()] == [number == 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_fill_the_tower(family: str, saved: dict[str, Path]) -> None:
    _, config = load(saved[family], num_media_rows=0)
    dummy = build_model(
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend="reference",
        num_media_rows=9,
    )
    init_dummy_weights(dummy, seed=1)
    assert isinstance(dummy, Decoder)
    found = encode(dummy)
    assert found.shape == (10, 64)
    assert found.isfinite().all()
