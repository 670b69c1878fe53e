"""What the readers of all image processors share.

The facts are those of the image processors of transformers 5.24. This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.media.processor_fields import ProcessorFields, read_id, read_processor_fields

__all__ = (
    "CLIP_COLOURS",
    "COMMON",
    "COMMON_KEYS",
    "PAD_AND_CROP",
    "edge_of",
    "merged_edge",
    "pair_of",
    "read_class",
    "read_pair",
    "read_placeholder",
)

CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_BICUBIC = 3
COMMON = {
    "do_resize": True,
    "resample": _BICUBIC,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
"""What all processors do unless their file says otherwise."""

COMMON_KEYS = {
    *COMMON,
    *("size", "image_mean", "image_std"),
    # The keys below change no prepared image. The first two name the class.
    *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
    "_valid_processor_keys",
    "do_convert_rgb",  # models take colour images only, so all images are converted to RGB
    *("data_format", "input_data_format", "device", "return_tensors", "disable_grouping"),
    "image_seq_length",
}
PAD_AND_CROP = {"default_to_square", "do_center_crop", "crop_size", "do_pad", "pad_size"}


def read_class(
    checkpoint_directory: Path,
    hf_config: HFConfig,
    classes: Mapping[str, Mapping[str, Any]],
    default: str,
) -> tuple[str, ProcessorFields]:
    """The name of the processor's class, and its fields with the defaults of the class."""
    source, stated = read_processor_fields(checkpoint_directory)
    key, name = "image_processor_type", stated.get("image_processor_type")
    if name is None and stated.get("feature_extractor_type") is not None:
        key, name = "feature_extractor_type", stated["feature_extractor_type"]
        name = str(name).replace("FeatureExtractor", "ImageProcessor")
    if name is None and "AutoImageProcessor" in (stated.get("auto_map") or {}):
        raise ValueError(
            f"{source}: auto_map={json.dumps(stated['auto_map'])} names code of the checkpoint, "
            f"which is not run; set image_processor_type, supported: {', '.join(classes)}"
        )
    # transformers has up to three classes of one name, which differ in speed only.
    name = str(name or default).removesuffix("Fast").removesuffix("Pil")
    if name not in classes:
        raise ValueError(
            f"{source}: {key}={json.dumps(stated.get(key))} is not supported for model_type "
            f"{hf_config['model_type']}; supported: {', '.join(classes)}"
        )
    return name, ProcessorFields(source=source, stated=stated, defaults=classes[name])


def read_pair(fields: ProcessorFields, key: str, keys: str = "height and width") -> tuple[int, int]:
    """(height, width) from a mapping, a list, or one number for both."""
    value = fields.get(key)
    if isinstance(value, int):
        return fields.integer(key), fields.integer(key)
    if isinstance(value, list) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
        fields = ProcessorFields(source=fields.source, stated={key: value}, defaults={})
    lengths = fields.lengths(key, keys)
    if set(lengths) != {"height", "width"}:
        raise fields.refusal(key, f"it must have {keys}")
    return lengths["height"], lengths["width"]


def pair_of(tower: Mapping[str, Any], key: str, default: int) -> tuple[int, int]:
    """Two lengths of vision_config, which may state one number for both."""
    value = tower.get(key, default)
    pair = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2 or not all(type(length) is int and length >= 1 for length in pair):
        raise ValueError(
            f"config.json: vision_config.{key}={json.dumps(value)} is not supported; it must be "
            "an integer of at least 1, or two"
        )
    return pair[0], pair[1]


def edge_of(tower: Mapping[str, Any], key: str, default: int) -> int:
    """The length of a square's edge, from vision_config."""
    first, second = pair_of(tower, key, default)
    if first != second:
        raise ValueError(
            f"config.json: vision_config.{key}={json.dumps(tower[key])} is not supported; both "
            "numbers must be the same"
        )
    return first


def merged_edge(hf_config: HFConfig) -> int:
    """Patches of the edge of the square that InternVL merges: 1 / `downsample_ratio`."""
    ratio = hf_config.get("downsample_ratio", 0.5)
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 < ratio <= 1
    if not is_number or round(1 / ratio) * ratio != 1:
        raise ValueError(
            f"config.json: downsample_ratio={json.dumps(ratio)} is not supported; it must be 1 "
            "divided by an integer"
        )
    return round(1 / ratio)


def read_placeholder(hf_config: HFConfig, default: int) -> int:
    """The id of the placeholder token. Both keys have the same meaning."""
    keys = ("image_token_id", "image_token_index")
    ids = {read_id(hf_config, key, default) for key in keys if hf_config.get(key) is not None}
    if len(ids) > 1:
        raise ValueError(
            f"config.json: image_token_id={hf_config['image_token_id']} and "
            f"image_token_index={hf_config['image_token_index']} must be the same; remove one"
        )
    return ids.pop() if ids else default
