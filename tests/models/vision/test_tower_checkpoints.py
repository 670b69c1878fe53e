"""Checkpoints of models that take images: names of tensors, missing tensors, quantised weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.conf.schema import Quantization
from ostinato.models.checkpoints.checkpoint import CheckpointError
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.registry import build_model
from ostinato.models.sharding import Shard, Span, Stage
from tests.models.quantized_checkpoints.writers import Form, write
from tests.models.vision.image_models import encode, load, random_pixels, reference_model, spec_of
from tests.models.vision.image_variants import VARIANTS

# Name of a variant -> (beginning of a name that transformers saves, beginning of another name).
OTHER_NAMES = {
    "llava, hub": [("vision_tower.", "vision_tower.vision_model.")],
    "llava, new": [
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
    "pixtral, new": [
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
    "internvl, new": [
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
    "mistral3, new": [
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
    "llava-siglip, hub": [("vision_tower.", "vision_tower.vision_model.")],
    "qwen2-vl, new": [("model.", "model.language_model."), ("visual.", "model.visual.")],
    "qwen2.5-vl, new": [("model.", "model.language_model."), ("visual.", "model.visual.")],
    "qwen3-vl, old": [
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.visual.", "visual."),
    ],
    "qwen3-vl-moe, old": [("model.language_model.", "model."), ("model.visual.", "visual.")],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each variant's checkpoint."""
    directory = tmp_path_factory.mktemp("models")
    for name, variant in VARIANTS.items():
        reference_model(variant).save_pretrained(directory / name)
    return {name: directory / name for name in VARIANTS}


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A copy of a checkpoint with other tensors, and with other keys in config.json."""
    shutil.copytree(source, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**stated, **config}))
    return target


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def assert_same(one: Decoder, two: Decoder) -> None:
    second = two.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, second[name]), name


def renamed(name: str, pairs: list[tuple[str, str]]) -> str:
    for old, new in pairs:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_other_names_of_tensors_load(case: str, saved: dict[str, Path], tmp_path: Path) -> None:
    source = saved[case.split(",")[0]]
    tensors = {renamed(name, OTHER_NAMES[case]): each for name, each in tensors_of(source).items()}
    assert tensors.keys() != tensors_of(source).keys()
    directory = rewrite(source, tmp_path / "other", tensors)
    assert_same(load(source)[0], load(directory)[0])


def test_experts_that_are_stored_transposed_load(saved: dict[str, Path], tmp_path: Path) -> None:
    source = saved["qwen3-vl-moe"]
    tensors = {
        name: each.transpose(1, 2).contiguous() if ".experts." in name else each
        for name, each in tensors_of(source).items()
    }
    assert_same(load(source)[0], load(rewrite(source, tmp_path / "other", tensors))[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_missing_tensor_of_the_tower_is_named(
    name: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    tensors = tensors_of(saved[name])
    wanted = {
        "llava": "vision_tower.embeddings.class_embedding",
        "llava-mistral": "multi_modal_projector.linear_2.weight",
        "llava-siglip": "vision_tower.encoder.layers.2.self_attn.k_proj.bias",
        "gemma3": "multi_modal_projector.mm_input_projection_weight",
        "pixtral": "vision_tower.transformer.layers.2.feed_forward.up_proj.weight",
        "mistral3": "multi_modal_projector.patch_merger.merging_layer.weight",
        "internvl": "vision_tower.encoder.layer.1.lambda_2",
        "internvl-qwen3": "vision_tower.layernorm.bias",
        "internvl-llama": "multi_modal_projector.layer_norm.weight",
        "idefics3": "model.connector.modality_projection.proj.weight",
        "smolvlm": "model.vision_model.embeddings.position_embedding.weight",
        "qwen2-vl": "visual.merger.mlp.0.bias",
        "qwen2.5-vl": "visual.blocks.1.mlp.up_proj.weight",
        "qwen3-vl": "model.visual.deepstack_merger_list.1.norm.weight",
        "qwen3-vl-moe": "model.visual.pos_embed.weight",
        "qwen3.5": "model.visual.merger.norm.bias",
        "qwen3.5-moe": "model.visual.patch_embed.proj.weight",
    }[name]
    del tensors[wanted]
    directory = rewrite(saved[name], tmp_path / "other", tensors)
    with pytest.raises(CheckpointError, match="lacks tensor") as error:
        load(directory)
    assert wanted.removeprefix("model.") in str(error.value)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_unknown_tensor_of_the_tower_is_named(
    name: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    place = {
        "llava": "vision_tower.encoder.layers.7",
        "gemma3": "vision_tower.encoder.layers.7",
        "pixtral": "vision_tower.transformer.layers.7",
        "mistral3": "vision_tower.transformer.layers.7",
        "internvl": "vision_tower.encoder.layer.7",
        "idefics3": "model.vision_model.encoder.layers.7",
        "smolvlm": "model.vision_model.encoder.layers.7",
    }.get(name.split("-")[0], "visual.blocks.7")
    tensors = {**tensors_of(saved[name]), f"{place}.other.weight": torch.zeros(2)}
    directory = rewrite(saved[name], tmp_path / "other", tensors)
    with pytest.raises(CheckpointError, match=rf"has unexpected tensor {place}\.other\.weight"):
        load(directory)


def test_a_convolution_of_another_shape_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    tensors = tensors_of(saved["qwen3-vl"])
    name = "model.visual.patch_embed.proj.weight"
    tensors[name] = tensors[name].flatten(1)
    with pytest.raises(CheckpointError, match=r"has shape \[32, 96\].*needs \[32, 3, 2, 4, 4\]"):
        load(rewrite(saved["qwen3-vl"], tmp_path / "other", tensors))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_without_room_for_images_has_no_tower(name: str, saved: dict[str, Path]) -> None:
    model, _ = load(saved[name], num_media_rows=0)
    assert model.vision is None
    whole = load(saved[name])[0].state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole[key]), key


def test_layers_that_are_not_computed_may_be_missing(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    """LLaVA reads the result of the last layer but one. So does this Mistral 3."""
    for variant, layer in (
        ("llava", "vision_tower.encoder.layers.2."),
        ("mistral3", "vision_tower.transformer.layers.2."),
    ):
        tensors = tensors_of(saved[variant])
        fewer = {name: each for name, each in tensors.items() if not name.startswith(layer)}
        assert len(fewer) < len(tensors)
        directory = rewrite(saved[variant], tmp_path / variant, fewer)
        assert_same(load(saved[variant])[0], load(directory)[0])


def matrices(model: Decoder) -> dict[str, LinearBase]:
    return {name: each for name, each in model.named_modules() if isinstance(each, LinearBase)}


@pytest.mark.parametrize(
    "name", ["llava", "mistral3", "qwen2.5-vl", "qwen3-vl", "internvl", "smolvlm"]
)
def test_int8_on_load_leaves_the_tower_as_it_is(name: str, saved: dict[str, Path]) -> None:
    floats, _ = load(saved[name], pack=True)
    model, _ = load(saved[name], pack=True, quantization=Quantization.int8)
    kinds = {key: each.method.is_quantized for key, each in matrices(model).items()}
    assert not any(is_quantized for key, is_quantized in kinds.items() if key.startswith("vision."))
    assert all(is_quantized for key, is_quantized in kinds.items() if key.startswith("layers."))
    pixels, spec = random_pixels(VARIANTS[name]), spec_of(VARIANTS[name])
    assert torch.equal(encode(model, pixels, spec), encode(floats, pixels, spec))


FORMS = [
    Form("awq", symmetric=False),
    Form("gptq"),
    Form("fp8", bits=8, group=32),
    Form("pack_quantized"),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.method)
@pytest.mark.parametrize(
    "case", ["qwen2.5-vl", "qwen2.5-vl, new", "llava", "llava, new", "mistral3"]
)
def test_quantised_checkpoints_have_a_float_tower(
    case: str, form: Form, saved: dict[str, Path], tmp_path: Path
) -> None:
    name = case.split(",")[0]
    quantised = tmp_path / "quantised"
    restored = write(saved[name], quantised, form, floats=("visual", "vision_tower"))
    floats = rewrite(saved[name], tmp_path / "floats", restored)
    pairs = OTHER_NAMES.get(case, [])
    tensors = {renamed(key, pairs): each for key, each in tensors_of(quantised).items()}
    excluded = {"modules_to_not_convert": ["visual", "vision_tower", "lm_head"]}
    stated = json.loads((quantised / "config.json").read_text())["quantization_config"]
    if form.method in ("awq", "fp8"):
        stated |= excluded
    other = rewrite(quantised, tmp_path / "other", tensors, quantization_config=stated)
    model, _ = load(other, pack=True)
    expected, _ = load(floats, pack=True)
    kinds = {key: each.method.is_quantized for key, each in matrices(model).items()}
    assert not any(is_quantized for key, is_quantized in kinds.items() if key.startswith("vision."))
    assert all(is_quantized for key, is_quantized in kinds.items() if key.startswith("layers."))
    pixels, spec = random_pixels(VARIANTS[name]), spec_of(VARIANTS[name])
    assert torch.equal(encode(model, pixels, spec), encode(expected, pixels, spec))
    for key, module in matrices(expected).items():
        if key.startswith("layers."):
            found = matrices(model)[key].dense()
            torch.testing.assert_close(found, module.dense(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_dummy_weights_fill_the_tower(name: str, saved: dict[str, Path]) -> None:
    model, config = load(saved[name])
    dummy = build_model(
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend="reference",
        num_media_rows=9,
    )
    init_dummy_weights(dummy, seed=1)
    assert isinstance(dummy, Decoder)
    pixels, spec = random_pixels(VARIANTS[name]), spec_of(VARIANTS[name])
    assert encode(dummy, pixels, spec).shape == encode(model, pixels, spec).shape


@pytest.mark.parametrize("number", [0, 1])
def test_stages_have_a_tower_if_they_read_it(number: int, saved: dict[str, Path]) -> None:
    """Stages of one and two layers. Two layers of the decoder get states of the tower added."""
    _, config = load(saved["qwen3-vl"])
    layers = [Span(0, 1, 3), Span(1, 2, 3)][number]
    shard = Shard(stage=Stage(number, 2, layers))
    model = build_model(
        config,
        dtype=torch.float32,
        device=torch.device("meta"),
        attention_backend="reference",
        shard=shard,
        num_media_rows=9,
    )
    assert isinstance(model, Decoder)
    assert model.vision is not None
    assert [table is not None for table in model.media_tables()] == [
        [True, True, False],
        [False, False, True],
    ][number]
