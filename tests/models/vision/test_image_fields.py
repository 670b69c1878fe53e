"""`read_image_spec`: each key has the effect that it has in transformers, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.processing_utils import ImagesKwargs

from ostinato.models.vision.image_spec import ImageSizing
from ostinato.runtime.images.prepare_image import prepare_pil
from tests.runtime.images.image_processors import (
    LIMITS,
    PROCESSORS,
    Processor,
    picture,
    pixels_of,
    read_spec,
    reference_colours,
)

CLIP, SIGLIP, QWEN = PROCESSORS["clip"], PROCESSORS["siglip"], PROCESSORS["qwen2_vl"]
INTERN, IDEFICS = PROCESSORS["internvl"], PROCESSORS["idefics3"]
# Values for keys that a file can have besides those that `save_pretrained` writes.
FURTHER = {
    "_valid_processor_keys": ["images"],
    "auto_map": {"AutoImageProcessor": "code.Processor"},
    "crop_size": {"height": 14, "width": 14},
    "data_format": "channels_last",
    "default_to_square": True,
    "device": "cpu",
    "disable_grouping": True,
    "do_pad": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_seq_length": 7,
    "input_data_format": "channels_first",
    "max_pixels": 8 * 784,
    "min_pixels": 2 * 784,
    "pad_size": {"height": 56, "width": 56},
    "processor_class": "LlavaProcessor",
    "return_tensors": "np",
    "use_square_size": True,
}
CROP = {"do_center_crop": True, "crop_size": {"height": 30, "width": 30}}


def written(processor: Processor, directory: Path, **changes: Any) -> Path:
    """The directory with the processor's file, whose keys are changed."""
    processor.save(directory)
    path = directory / "preprocessor_config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(fields))
    return directory


def mutated(value: Any) -> list[Any]:
    """Other values of the same type, and null."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value - 1, value + 1, None]
    if isinstance(value, float):
        return [value / 2, None]
    if isinstance(value, str):
        return ["Other"]
    if isinstance(value, list):
        return [[0.25, *value[1:]], 0.25, None]
    lengths: dict[str, int] = value
    changed = [lengths | {key: length + 14} for key, length in lengths.items()]
    return [*changed, {key: length + 14 for key, length in lengths.items()}, 28, [28, 28], None]


def check(processor: Processor, directory: Path, *keys: str) -> str:
    """Compare with transformers; say whether the keys were honoured or refused."""
    try:
        spec = read_spec(directory, processor.config)
    except ValueError as error:
        if not any(key in str(error) for key in keys):
            raise
        return "refused"
    reference = processor.kind.from_pretrained(directory)
    reference.return_tensors = None  # the call below has its own
    for width, height in ((60, 45), (20, 70)):
        image = picture(width, height)
        try:
            expected = reference_colours(reference, image, spec)
        except (TypeError, ValueError):
            return "refused by transformers"
        pixels = pixels_of(prepare_pil(image, spec, LIMITS, "image"))
        ours = (pixels * np.float64(spec.rescale) - spec.mean) / spec.std
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5, err_msg=str(keys))
    return "honoured"


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_key_of_a_saved_file_has_its_effect_or_is_refused(name: str, tmp_path: Path):
    processor = PROCESSORS[name]
    saved = json.loads((written(processor, tmp_path) / "preprocessor_config.json").read_text())
    assert check(processor, tmp_path) == "honoured"
    outcomes = {
        (key, json.dumps(value)): check(
            processor, written(processor, tmp_path, **{key: value}), key
        )
        for key, old in saved.items()
        for value in mutated(old)
    }
    assert outcomes["image_processor_type", '"Other"'] == "refused"
    colours = ("image_mean", "image_std", "rescale_factor", "do_rescale")
    honoured = {
        key
        for (key, value), outcome in outcomes.items()
        if key in colours and value.startswith(("[", "0", "f")) and outcome == "honoured"
    }
    assert honoured == set(colours)


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_further_key_has_its_effect_or_is_refused(name: str, tmp_path: Path):
    processor = PROCESSORS[name]
    assert set(ImagesKwargs.__annotations__) <= {*FURTHER, *processor.make().to_dict(), *CROP}
    outcomes = {
        key: check(processor, written(processor, tmp_path, **{key: value}), key)
        for key, value in FURTHER.items()
    }
    outcomes["crop"] = check(processor, written(processor, tmp_path, **CROP), *CROP)
    assert "refused by transformers" not in outcomes.values()
    assert outcomes["processor_class"] == outcomes["device"] == "honoured"


@pytest.mark.parametrize("name", PROCESSORS)
def test_missing_keys_have_the_defaults_of_the_class(name: str, tmp_path: Path):
    processor = PROCESSORS[name]
    default = processor._replace(make=processor.kind)
    is_tiled = name.startswith(("internvl", "idefics3", "smolvlm"))
    if "qwen3" in name:  # whose patches are not those of the class's default
        with pytest.raises(ValueError, match=r"patch_size=14 .*vision_config.patch_size=16"):
            read_spec(default.save(tmp_path), default.config)
        return
    if processor.config["model_type"] in ("gemma3", "llava") and name != "pixtral":
        vision = processor.config["vision_config"] | {"image_size": 224}
        default = default._replace(config=processor.config | {"vision_config": vision})
    if is_tiled:  # a tile has the default number of embeddings
        sizes = {"image_size": 384, "patch_size": 12 if "internvl" in name else 14}
        default = default._replace(
            whole={},
            config=processor.config
            | {"downsample_ratio": 0.5, "scale_factor": 2, "vision_config": sizes},
        )
    whole = read_spec(default.save(tmp_path), default.config, takes_videos=False)
    name_only = {"image_processor_type": processor.kind.__name__.removesuffix("Pil")}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(name_only))
    assert read_spec(tmp_path, default.config, takes_videos=False) == whole


def test_an_unknown_key_is_refused(tmp_path: Path):
    for processor in (CLIP, QWEN):
        with pytest.raises(ValueError, match=r"preprocessor_config.json: tiles=4 is not supported"):
            read_spec(written(processor, tmp_path, tiles=4), processor.config)


@pytest.mark.parametrize(
    ("processor", "key", "value"),
    [
        (CLIP, "size", {"shortest_edge": 0}),
        (CLIP, "size", {"shortest_edge": 28, "longest_edge": 40}),
        (CLIP, "size", {"max_height": 28, "max_width": 28}),
        (CLIP, "size", True),
        (CLIP, "crop_size", {"shortest_edge": 28}),
        (CLIP, "crop_size", [28, 28, 28]),
        (CLIP, "do_resize", "yes"),
        (CLIP, "do_center_crop", False),
        (CLIP, "resample", 6),
        (CLIP, "resample", "bicubic"),
        (CLIP, "rescale_factor", 0),
        (CLIP, "image_std", [1, 0, 1]),
        (CLIP, "image_mean", [0.5, 0.5]),
        (CLIP, "image_mean", [0.5, 0.5, "x"]),
        (PROCESSORS["llava"], "do_normalize", False),
        (PROCESSORS["llava"], "image_mean", [1.5, 0.5, 0.5]),
        (QWEN, "size", {"height": 28, "width": 28}),
        (QWEN, "size", {"min_pixels": 784, "max_pixels": 7840}),
        (QWEN, "size", {"shortest_edge": 7840, "longest_edge": 784}),
        (QWEN, "size", 28),
        (QWEN, "min_pixels", 0),
        (QWEN, "merge_size", 1),
        (QWEN, "temporal_patch_size", 1),
        (QWEN, "do_resize", False),
        (QWEN, "image_processor_type", "CLIPImageProcessor"),
        (INTERN, "size", {"height": 28, "width": 42}),
        (INTERN, "min_patches", 6),
        (INTERN, "max_patches", 1001),
        (INTERN, "do_resize", False),
        (INTERN, "use_thumbnail", True),
        (IDEFICS, "size", {"height": 28, "width": 28}),
        (IDEFICS, "max_image_size", {"longest_edge": 21}),
        (IDEFICS, "max_image_size", {"longest_edge": 42}),
        (IDEFICS, "max_image_size", {"longest_edge": 28, "shortest_edge": 28}),
        (IDEFICS, "do_resize", False),
        (IDEFICS, "do_image_splitting", "yes"),
        (CLIP, "image_processor_type", "Qwen2VLImageProcessor"),
    ],
)
def test_unsupported_values_are_refused(processor: Processor, key: str, value: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"p\w+_config.json: .*{key}"):
        read_spec(written(processor, tmp_path, **{key: value}), processor.config)


@pytest.mark.parametrize(
    ("processor", "changes", "message"),
    [
        (CLIP, {"model_type": "mllama"}, "model_type='mllama'"),
        (CLIP, {"vision_config": {"model_type": "dinov2"}}, "vision_config.model_type='dinov2'"),
        (CLIP, {"vision_config": {"image_size": 28, "patch_size": 32}}, "patch_size=32"),
        (CLIP, {"vision_config": {"image_size": 28, "patch_size": 28}}, None),
        (CLIP, {"vision_config": {"image_size": 28, "patch_size": [14, 7]}}, r"patch_size=\[14, 7"),
        (CLIP, {"vision_config": {"image_size": "28"}}, 'image_size="28"'),
        (CLIP, {"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy=cls"),
        (CLIP, {"image_token_id": 5, "image_token_index": 6}, "image_token_index=6 must be"),
        (CLIP, {"image_token_id": -1}, "image_token_id=-1"),
        (QWEN, {"vision_start_token_id": "<"}, 'vision_start_token_id="<"'),
        (QWEN, {"vision_config": {"temporal_patch_size": 4}}, "temporal_patch_size"),
    ],
)
def test_unsupported_values_of_the_model_are_refused(
    processor: Processor, changes: dict[str, Any], message: str | None, tmp_path: Path
):
    config = {key: value for key, value in processor.config.items() if key != "image_token_index"}
    if message is None:
        assert read_spec(processor.save(tmp_path), config | changes).num_tokens == 1
        return
    with pytest.raises(ValueError, match=message):
        read_spec(processor.save(tmp_path), config | changes)


def test_the_file_of_llava_1_5(tmp_path: Path):
    fields = {
        "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_convert_rgb": True,
        "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "CLIPImageProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711], "processor_class": "LlavaProcessor",
        "resample": 3, "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 336},
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    spec = read_spec(tmp_path, {"model_type": "llava", "image_token_index": 32000})
    assert (spec.sizing, spec.shortest_edge, spec.crop) == (ImageSizing.fixed, 336, (336, 336))
    assert spec.num_tokens == spec.max_tokens == 576
    assert (spec.placeholder, spec.marked_placeholder) == ("<32000>", "<32000>\n")
    old = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 336, "crop_size": 336}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    assert read_spec(tmp_path, {"model_type": "llava"}) == spec


def test_the_files_of_qwen(tmp_path: Path):
    path = tmp_path / "preprocessor_config.json"
    fields: dict[str, Any] = {
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
    }  # fmt: skip
    path.write_text(json.dumps(fields))
    spec = read_spec(tmp_path, {"model_type": "qwen2_5_vl"})
    assert (spec.min_pixels, spec.max_pixels, spec.max_tokens) == (3136, 12845056, 16384)
    assert spec.placeholder == "<151655>"
    assert spec.marked_placeholder == "<151652><151655><151653>"
    # `size` has names without an effect here.
    path.write_text(json.dumps(fields | {"size": {"min_pixels": 1, "max_pixels": 2}}))
    assert read_spec(tmp_path, {"model_type": "qwen2_5_vl"}) == spec
    newer = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }  # fmt: skip
    path.write_text(json.dumps(newer))
    spec = read_spec(tmp_path, {"model_type": "qwen3_vl"})
    assert (spec.patch_size, spec.min_pixels, spec.max_pixels) == (16, 65536, 16777216)
    assert spec.max_tokens == 16384


def test_a_combined_file_has_priority(tmp_path: Path):
    written(QWEN, tmp_path, resample=2)
    fields = QWEN.make().to_dict() | {"resample": 1}
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({"image_processor": fields, "video_processor": {"resample": 1}}))
    assert read_spec(tmp_path, QWEN.config).resample == 1
    path.write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
    assert read_spec(tmp_path, QWEN.config).resample == 2
    path.write_text(json.dumps({"image_processor": [1]}))
    with pytest.raises(ValueError, match=r"processor_config.json: image_processor must be"):
        read_spec(tmp_path, QWEN.config)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no preprocessor_config.json.*save_pretrained"):
        read_spec(tmp_path, QWEN.config)
    path = tmp_path / "preprocessor_config.json"
    for text, message in (("{", "not valid JSON"), ("[]", "must be a JSON object")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"preprocessor_config.json {message}|is {message}"):
            read_spec(tmp_path, QWEN.config)


def test_code_of_the_checkpoint_is_refused_unless_the_class_is_known(tmp_path: Path):
    code = {"AutoImageProcessor": "code.Processor"}
    assert read_spec(written(CLIP, tmp_path, auto_map=code), CLIP.config).num_tokens == 4
    written(CLIP, tmp_path, auto_map=code, image_processor_type=None)
    with pytest.raises(ValueError, match="auto_map"):
        read_spec(tmp_path, CLIP.config)


def test_resized_pixels_are_lowered_only(tmp_path: Path):
    QWEN.save(tmp_path)
    as_stated = read_spec(tmp_path, QWEN.config)
    lowered = read_spec(tmp_path, QWEN.config, max_resized_pixels=5 * 784)
    assert (lowered.min_pixels, lowered.max_pixels) == (as_stated.min_pixels, 5 * 784)
    assert read_spec(tmp_path, QWEN.config, max_resized_pixels=10**9) == as_stated
    with pytest.raises(ValueError, match=r"images.max_resized_pixels=3135 must be at least 3136"):
        read_spec(tmp_path, QWEN.config, max_resized_pixels=3135)
    CLIP.save(tmp_path)
    as_stated = read_spec(tmp_path, CLIP.config)
    assert read_spec(tmp_path, CLIP.config, max_resized_pixels=784) == as_stated
    with pytest.raises(ValueError, match=r"images.max_resized_pixels=783 must be at least 784"):
        read_spec(tmp_path, CLIP.config, max_resized_pixels=783)


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("processor", [CLIP, SIGLIP], ids=["clip", "siglip"])
def test_the_number_of_tokens_is_that_of_the_model(
    processor: Processor, strategy: str, tmp_path: Path
):
    fields = dict(processor.config, vision_feature_select_strategy=strategy)
    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    for key in ("vision_config", "text_config"):
        fields[key] = fields[key] | sizes
    size = fields["vision_config"]["image_size"]
    with torch.device("meta"):
        model = transformers.LlavaModel(transformers.LlavaConfig.from_dict(fields))
        features: Any = model.get_image_features(torch.zeros(1, 3, size, size))
    spec = read_spec(processor.save(tmp_path), fields)
    assert spec.num_tokens == features.pooler_output[0].shape[0]
