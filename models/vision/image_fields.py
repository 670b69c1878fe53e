"""Reads how a model takes images from the files of its checkpoint.

The facts are those of the image processors of transformers 5.24: their defaults, and which key has
which effect. This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ostinato.models.media.processor_fields import (
    ProcessorFields,
    read_areas,
    read_colours,
    read_id,
    read_processor_fields,
    read_resample,
    text_of_id,
)
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.models.vision.video_fields import read_video_spec

__all__ = ("read_image_spec",)

# A parsed config.json. The alias of models/config is not imported, because it needs torch and
# models/config imports this folder.
HFConfig = Mapping[str, Any]
_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_BICUBIC = 3
# What all processors do unless their file says otherwise.
_COMMON = {
    "do_resize": True,
    "resample": _BICUBIC,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
_CLIP = _COMMON | {
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    **_CLIP_COLOURS,
}
# Processors that give all images the same size, with their defaults.
_FIXED = {
    "CLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": _CLIP,
    "SiglipImageProcessor": _COMMON
    | {
        "size": {"height": 224, "width": 224},
        "default_to_square": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
_QWEN = _COMMON | {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    **_CLIP_COLOURS,
}
# All Qwen-VL models have the processor of Qwen2-VL. The other names stand in some early files.
_DYNAMIC = {
    "Qwen2VLImageProcessor": _QWEN,
    "Qwen2_5_VLImageProcessor": _QWEN,
    "Qwen3VLImageProcessor": _QWEN,
}
# The edge of a patch in models whose vision_config does not state it.
_DYNAMIC_PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}
# Towers of LLaVA: default image size, default patch size, and number of class tokens.
_FIXED_TOWERS = {"clip_vision_model": (224, 32, 1), "siglip_vision_model": (224, 16, 0)}
_LLAVA_TOWER = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}

_COMMON_KEYS = {
    *_COMMON,
    *("size", "image_mean", "image_std"),
    # The keys below change no prepared image. The first two name the class.
    *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
    "_valid_processor_keys",
    "do_convert_rgb",  # models take colour images only, so all images are converted to RGB
    *("data_format", "input_data_format", "device", "return_tensors", "disable_grouping"),
    "image_seq_length",
}
_PAD_AND_CROP = {"default_to_square", "do_center_crop", "crop_size", "do_pad", "pad_size"}
_FIXED_KEYS = _COMMON_KEYS | _PAD_AND_CROP | {"use_square_size"}
_DYNAMIC_KEYS = {
    *_COMMON_KEYS,
    *("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"),
    *_PAD_AND_CROP,  # this processor does not read these keys
    # Keys for videos.
    *("fps", "min_frames", "max_frames", "num_frames", "do_sample_frames", "return_metadata"),
}


def read_image_spec(
    checkpoint_directory: Path,
    hf_config: HFConfig,
    *,
    max_resized_pixels: int | None = None,
    max_frame_pixels: int | None = None,
    takes_videos: bool = True,
    token_text: Callable[[int], str],
) -> ImageSpec:
    """Read how a model takes images and videos.

    Args:
        checkpoint_directory: has preprocessor_config.json, or processor_config.json with the key
            `image_processor`.
        hf_config: the parsed config.json.
        max_resized_pixels: the setting `images.max_resized_pixels`, which lowers the largest
            height * width of a resized image.
        max_frame_pixels: the setting `video.max_resized_pixels`, the same for a frame of a video.
        takes_videos: whether videos are served, if the model takes any.
        token_text: gives the text of a token id.

    Raises:
        ValueError: the files are missing, or a key has a value that is not supported. The message
            names the file, the key and the value.
    """
    model_type = hf_config.get("model_type")
    if model_type == "llava":
        spec = _read_fixed(checkpoint_directory, hf_config, token_text)
    elif model_type in _DYNAMIC_PATCH:
        spec = _read_dynamic(checkpoint_directory, hf_config, token_text)
    else:
        raise ValueError(
            f"config.json: images for model_type={model_type!r} are not supported; supported: "
            f"{', '.join(('llava', *_DYNAMIC_PATCH))}"
        )
    video = None
    if takes_videos and model_type in _DYNAMIC_PATCH:
        try:
            video = read_video_spec(
                checkpoint_directory,
                hf_config,
                spec,
                max_resized_pixels=max_frame_pixels,
                token_text=token_text,
            )
        except ValueError as error:
            raise ValueError(
                f"{error}; or set video.max_per_request=0 to serve no videos"
            ) from error
    spec = msgspec.structs.replace(spec, video=video)
    return spec if max_resized_pixels is None else _lower_pixels(spec, max_resized_pixels)


def _read_fixed(
    checkpoint_directory: Path, hf_config: HFConfig, token_text: Callable[[int], str]
) -> ImageSpec:
    """The spec of a model that takes all images in the same size."""
    name, fields = _read_class(checkpoint_directory, hf_config, _FIXED, "LlavaImageProcessor")
    fields.refuse_unknown(_FIXED_KEYS)
    if fields.get("use_square_size"):
        raise fields.refusal("use_square_size", "remove the key and state size")
    tower = hf_config.get("vision_config")
    tower = _LLAVA_TOWER if tower is None else tower
    tower_type = tower.get("model_type", "clip_vision_model")
    if tower_type not in _FIXED_TOWERS:
        raise ValueError(
            f"config.json: vision_config.model_type={tower_type!r} is not supported; supported: "
            f"{', '.join(_FIXED_TOWERS)}"
        )
    default_size, default_patch, num_class_tokens = _FIXED_TOWERS[tower_type]
    image_size = _pair_of(tower, "image_size", default_size)
    patch_size = _edge_of(tower, "patch_size", default_patch)

    pads_to_square = name == "LlavaImageProcessor" and fields.flag("do_pad")
    mean, std, rescale = read_colours(fields)
    if pads_to_square and (not fields.flag("do_normalize") or not all(0 <= c <= 1 for c in mean)):
        raise fields.refusal(
            "do_pad",
            "images are padded with the colour image_mean, so do_normalize must be true and "
            "image_mean must be from 0 to 1",
        )
    shortest_edge, size, crop = _read_sizes(fields, image_size)
    if fields.flag("do_pad") and name != "LlavaImageProcessor" and fields.get("pad_size"):
        _refuse_other_size(fields, "pad_size", _read_pair(fields, "pad_size"), image_size)
    num_patches = (image_size[0] // patch_size) * (image_size[1] // patch_size)
    num_tokens = num_patches + num_class_tokens - _num_dropped(hf_config)
    if num_tokens < 1:
        raise ValueError(
            f"config.json: vision_config.image_size={list(image_size)} gives no embedding with "
            f"vision_config.patch_size={patch_size}; it must be larger"
        )
    placeholder_id = _read_placeholder(hf_config, 32000)
    placeholder = text_of_id(placeholder_id, "image_token_index", token_text)
    return ImageSpec(
        sizing=ImageSizing.fixed,
        placeholder_id=placeholder_id,
        placeholder=placeholder,
        marked_placeholder=f"{placeholder}\n",
        mean=mean,
        std=std,
        rescale=rescale,
        resample=read_resample(fields),
        patch_size=patch_size,
        pads_to_square=pads_to_square,
        shortest_edge=shortest_edge,
        size=size,
        crop=crop,
        num_tokens=num_tokens,
    )


def _read_sizes(
    fields: ProcessorFields, image_size: tuple[int, int]
) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """`shortest_edge`, `size` and `crop` of a spec with one size for all images."""
    shortest_edge, size, crop = 0, (0, 0), (0, 0)
    if fields.flag("do_resize"):
        value = fields.get("size")
        if isinstance(value, int) and not fields.flag("default_to_square"):
            shortest_edge = fields.integer("size")
        elif isinstance(value, dict) and set(value) == {"shortest_edge"}:
            shortest_edge = fields.lengths("size", "shortest_edge")["shortest_edge"]
        else:
            size = _read_pair(fields, "size", "shortest_edge, or height and width")
    if fields.flag("do_center_crop"):
        crop = _read_pair(fields, "crop_size")
        _refuse_other_size(fields, "crop_size", crop, image_size)
    elif size == (0, 0):
        raise fields.refusal(
            "do_center_crop",
            "without it, size must have height and width, and do_resize must be true, because "
            "the model takes images of one size",
        )
    else:
        _refuse_other_size(fields, "size", size, image_size)
    return shortest_edge, size, crop


def _refuse_other_size(
    fields: ProcessorFields, key: str, size: tuple[int, int], image_size: tuple[int, int]
) -> None:
    """Refuse prepared images of a size that the tower does not take."""
    if size != image_size:
        raise fields.refusal(
            key,
            f"the height and width {list(size)} must be those of config.json: "
            f"vision_config.image_size={list(image_size)}",
        )


def _num_dropped(hf_config: HFConfig) -> int:
    """States that are left out at the begin of a tower's output."""
    strategy = hf_config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ValueError(
            f"config.json: vision_feature_select_strategy={strategy!r} is not supported; "
            "supported: default, full"
        )
    return int(strategy == "default")


def _read_dynamic(
    checkpoint_directory: Path, hf_config: HFConfig, token_text: Callable[[int], str]
) -> ImageSpec:
    """The spec of a model that takes images of different sizes."""
    _, fields = _read_class(checkpoint_directory, hf_config, _DYNAMIC, "Qwen2VLImageProcessor")
    fields.refuse_unknown(_DYNAMIC_KEYS)
    if not fields.flag("do_resize"):
        raise fields.refusal("do_resize", "it must be true, so that images consist of patches")
    tower = hf_config.get("vision_config") or {}
    tower_edges = {
        "patch_size": ("patch_size", _DYNAMIC_PATCH[hf_config["model_type"]]),
        "merge_size": ("spatial_merge_size", 2),
        "temporal_patch_size": ("temporal_patch_size", 2),
    }
    for key, (tower_key, default) in tower_edges.items():
        in_tower = _edge_of(tower, tower_key, default)
        if fields.integer(key) != in_tower:
            raise fields.refusal(
                key, f"it must be that of config.json: vision_config.{tower_key}={in_tower}"
            )
    if fields.integer("temporal_patch_size") != 2:
        raise fields.refusal("temporal_patch_size", "it must be 2")
    min_pixels, max_pixels = read_areas(fields)
    mean, std, rescale = read_colours(fields)
    placeholder_id = _read_placeholder(hf_config, 151655)
    placeholder = text_of_id(placeholder_id, "image_token_id", token_text)
    marks = [
        text_of_id(read_id(hf_config, key, default), key, token_text)
        for key, default in (("vision_start_token_id", 151652), ("vision_end_token_id", 151653))
    ]
    return ImageSpec(
        sizing=ImageSizing.dynamic,
        placeholder_id=placeholder_id,
        placeholder=placeholder,
        marked_placeholder=placeholder.join(marks),
        mean=mean,
        std=std,
        rescale=rescale,
        resample=read_resample(fields),
        patch_size=fields.integer("patch_size"),
        merge_size=fields.integer("merge_size"),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )


def _lower_pixels(spec: ImageSpec, max_resized_pixels: int) -> ImageSpec:
    """The spec with images of at most so many pixels."""
    if spec.sizing is ImageSizing.fixed:
        height, width = spec.fixed_size
        least, what = height * width, f"the model takes all images as {height}x{width}"
    else:
        least, what = spec.min_pixels, f"the model's min_pixels is {spec.min_pixels}"
    if max_resized_pixels < least:
        raise ValueError(
            f"images.max_resized_pixels={max_resized_pixels} must be at least {least}, because "
            f"{what}"
        )
    lowered = min(spec.max_pixels, max_resized_pixels)
    return msgspec.structs.replace(spec, max_pixels=lowered)


def _read_class(
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


def _read_pair(
    fields: ProcessorFields, key: str, keys: str = "height and width"
) -> tuple[int, int]:
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


def _pair_of(tower: Mapping[str, Any], key: str, default: int) -> tuple[int, int]:
    """Two lengths of vision_config, which may state one number for both."""
    value = tower.get(key, default)
    pair = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2 or not all(type(length) is int and length >= 1 for length in pair):
        raise ValueError(
            f"config.json: vision_config.{key}={json.dumps(value)} is not supported; it must be "
            "an integer of at least 1, or two"
        )
    return pair[0], pair[1]


def _edge_of(tower: Mapping[str, Any], key: str, default: int) -> int:
    """The length of a square's edge, from vision_config."""
    first, second = _pair_of(tower, key, default)
    if first != second:
        raise ValueError(
            f"config.json: vision_config.{key}={json.dumps(tower[key])} is not supported; both "
            "numbers must be the same"
        )
    return first


def _read_placeholder(hf_config: HFConfig, default: int) -> int:
    """The id of the placeholder token. Both keys have the same meaning."""
    keys = ("image_token_id", "image_token_index")
    ids = {read_id(hf_config, key, default) for key in keys if hf_config.get(key) is not None}
    if len(ids) > 1:
        raise ValueError(
            f"config.json: image_token_id={hf_config['image_token_id']} and "
            f"image_token_index={hf_config['image_token_index']} must be the same; remove one"
        )
    return ids.pop() if ids else default
