"""Reads how a model takes videos from the files of its checkpoint.

The facts are those of the video processors of transformers 5.24. This module imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ostinato.models.media.processor_fields import (
    ProcessorFields,
    read_areas,
    read_colours,
    read_id,
    read_object,
    read_resample,
    text_of_id,
)
from ostinato.models.vision.dynamic_image_fields import QWEN_DEFAULTS
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import FRAMES_OF_PAIR, VideoSpec

__all__ = ("read_video_spec",)

_COMBINED_FILE, _COMBINED_KEY = "processor_config.json", "video_processor"
_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_COMMON = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "temporal_patch_size": FRAMES_OF_PAIR,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    # transformers states it for Qwen3-VL only. The authors' code for Qwen2-VL has the same number.
    "fps": 2.0,
}
_QWEN2, _QWEN3 = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"
_CLASSES = {
    _QWEN2: _COMMON
    | {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "patch_size": 14,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    _QWEN3: _COMMON
    | {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
_TOKENS_PER_SECOND = 4  # of Qwen2.5-VL, if vision_config does not state it
_KEYS = {
    *_CLASSES[_QWEN2],
    *("min_pixels", "max_pixels", "cap_pixels_per_frame", "num_frames"),
    # The keys below change no frame. The first four name the class.
    *("video_processor_type", "image_processor_type", "feature_extractor_type", "processor_class"),
    *("auto_map", "_valid_processor_keys", "do_convert_rgb", "image_seq_length"),
    *("data_format", "input_data_format", "device", "return_tensors", "disable_grouping"),
    *("default_to_square", "do_center_crop", "crop_size", "do_pad", "pad_size"),
    *("return_metadata", "video_metadata"),
    "max_video_tokens",  # read with cap_pixels_per_frame only
    # Frames of files are always sampled, as the authors' code does. Frames of arrays never are.
    "do_sample_frames",
}


_FRAME_TOKENS = 768  # embeddings of a pair of frames, unless a setting allows more


def read_video_spec(
    checkpoint_directory: Path,
    hf_config: Mapping[str, Any],
    images: ImageSpec,
    *,
    max_resized_pixels: int | None = None,
    token_text: Callable[[int], str],
) -> VideoSpec:
    """Read how a model takes videos.

    Args:
        checkpoint_directory: has processor_config.json with the key `video_processor`,
            video_preprocessor_config.json or preprocessor_config.json; the first one that is there
            is read. Without any, all values are the defaults of the model's video processor.
        hf_config: the parsed config.json of a model of the families Qwen2-VL to Qwen3.5.
        images: how the model takes images. Frames are scaled and cut as images are.
        max_resized_pixels: the setting `video.max_resized_pixels`, which lowers the largest
            height * width of a resized frame; None = the area of 768 embeddings. That is the limit
            of Qwen's own tools. Files of images, which old checkpoints have only, allow 16 times
            as much.
        token_text: gives the text of a token id.

    Raises:
        ValueError: a key has a value that is not supported. The message names the file, the key and
            the value.
    """
    model_type = hf_config["model_type"]
    name, fields = _read_class(checkpoint_directory, model_type)
    fields.refuse_unknown(_KEYS)
    _check_frames(fields, images)
    min_pixels, max_pixels = _read_limits(name, fields)
    defaults = QWEN_DEFAULTS[model_type]
    placeholder_id = read_id(hf_config, "video_token_id", defaults.video_id)
    placeholder = text_of_id(placeholder_id, "video_token_id", token_text)
    start_id = read_id(hf_config, "vision_start_token_id", defaults.start_id)
    end_id = read_id(hf_config, "vision_end_token_id", defaults.end_id)
    marks = [
        text_of_id(start_id, "vision_start_token_id", token_text),
        text_of_id(end_id, "vision_end_token_id", token_text),
    ]
    if placeholder_id == images.placeholder_id:
        raise ValueError(
            f"config.json: video_token_id={placeholder_id} must differ from image_token_id, which "
            "is the same"
        )
    limits_whole, max_frame_pixels = name == _QWEN3, 0
    least = -(-min_pixels // FRAMES_OF_PAIR) if limits_whole else min_pixels
    if max_resized_pixels is None:
        max_resized_pixels = max(_FRAME_TOKENS * images.unit**2, least)
    elif max_resized_pixels < least:
        raise ValueError(
            f"video.max_resized_pixels={max_resized_pixels} must be at least {least}, because "
            f"the model enlarges smaller frames to {least} pixels"
        )
    if limits_whole:
        max_frame_pixels = max_resized_pixels
    else:
        max_pixels = min(max_pixels, max_resized_pixels)
    return VideoSpec(
        placeholder_id=placeholder_id,
        placeholder=placeholder,
        marked_placeholder=placeholder.join(marks),
        start_id=start_id,
        end_id=end_id,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        limits_whole=limits_whole,
        max_frame_pixels=max_frame_pixels,
        fps=_read_fps(fields),
        min_frames=fields.integer("min_frames"),
        max_frames=fields.integer("max_frames"),
        positions_per_second=_positions_per_second(hf_config),
        states_times=defaults.video_class == _QWEN3,
    )


def _read_class(checkpoint_directory: Path, model_type: str) -> tuple[str, ProcessorFields]:
    """The name of the processor's class, and its fields with the defaults of the class."""
    family = QWEN_DEFAULTS[model_type].video_class
    source, stated = _read_stated(checkpoint_directory)
    source = source or f"the defaults of {family}"
    name = stated.get("video_processor_type")
    if name is None:
        if "AutoVideoProcessor" in (stated.get("auto_map") or {}):
            raise ValueError(
                f"{source}: auto_map={json.dumps(stated['auto_map'])} names code of the "
                f"checkpoint, which is not run; set video_processor_type={family}"
            )
        # transformers takes the class from the name of the image processor's, if there is one.
        alike = str(stated.get("image_processor_type")).replace("ImageP", "VideoP")
        name = alike if alike in _CLASSES else family
    elif name not in _CLASSES:
        raise ValueError(
            f"{source}: video_processor_type={json.dumps(name)} is not supported for model_type "
            f"{model_type}; supported: {', '.join(_CLASSES)}"
        )
    return name, ProcessorFields(
        source=source, stated=stated, defaults=_CLASSES[name], medium="videos"
    )


def _read_stated(checkpoint_directory: Path) -> tuple[str, dict[str, Any]]:
    """Where the fields of the video processor stand, empty for nowhere, and the fields."""
    combined = read_object(checkpoint_directory / _COMBINED_FILE) or {}
    source, stated = f"{_COMBINED_FILE}: {_COMBINED_KEY}", combined.get(_COMBINED_KEY)
    for file in _FILES:
        if stated is None:
            source, stated = file, read_object(checkpoint_directory / file)
    if stated is None:
        return "", {}
    if not isinstance(stated, dict):
        raise ValueError(f"{source} must be a JSON object, got {json.dumps(stated)}")  # noqa: TRY004
    return source, stated


def _check_frames(fields: ProcessorFields, images: ImageSpec) -> None:
    """Refuse frames that are prepared in another way than images."""
    if not fields.flag("do_resize"):
        raise fields.refusal("do_resize", "it must be true, so that frames consist of patches")
    if fields.integer("temporal_patch_size") != FRAMES_OF_PAIR:
        raise fields.refusal("temporal_patch_size", f"it must be {FRAMES_OF_PAIR}")
    mean, std, rescale = read_colours(fields)
    normalises = fields.flag("do_normalize")
    for key, own, of_images in (
        ("patch_size", fields.integer("patch_size"), images.patch_size),
        ("merge_size", fields.integer("merge_size"), images.merge_size),
        ("image_mean" if normalises else "do_normalize", mean, images.mean),
        ("image_std" if normalises else "do_normalize", std, images.std),
        ("rescale_factor" if fields.flag("do_rescale") else "do_rescale", rescale, images.rescale),
        ("resample", read_resample(fields), images.resample),
    ):
        if own != of_images:
            shown = list(of_images) if isinstance(of_images, tuple) else of_images
            raise fields.refusal(key, f"frames must be prepared as images are, with {shown}")


def _read_limits(name: str, fields: ProcessorFields) -> tuple[int, int]:
    """`min_pixels` and `max_pixels` of the spec."""
    if fields.flag("cap_pixels_per_frame"):
        raise fields.refusal(
            "cap_pixels_per_frame", "it must be false; video.max_resized_pixels limits frames"
        )
    if name == _QWEN2:
        return read_areas(fields)
    # The other class does not read min_pixels and max_pixels.
    others = fields.stated.keys() - {"min_pixels", "max_pixels"}
    return read_areas(replace(fields, stated={key: fields.stated[key] for key in others}))


def _read_fps(fields: ProcessorFields) -> float:
    """Frames of a second that are used."""
    if fields.get("num_frames") is not None:
        raise fields.refusal(
            "num_frames",
            "remove the key; fps, or the setting video.fps, says which frames are used",
        )
    if fields.get("fps") is None:
        return fields.defaults["fps"]
    return fields.factor("fps")


def _positions_per_second(hf_config: Mapping[str, Any]) -> float:
    """Positions in time of a second; 0 = pairs have consecutive ones, or those of images."""
    if hf_config["model_type"] != "qwen2_5_vl":
        return 0.0
    stated = (hf_config.get("vision_config") or {}).get("tokens_per_second")
    value = _TOKENS_PER_SECOND if stated is None else stated
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(
            f"config.json: vision_config.tokens_per_second={json.dumps(value)} must be a number "
            "above 0"
        )
    return float(value)
