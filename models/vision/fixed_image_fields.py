"""Reads how a model takes images that all get one size (LLaVA 1.5); imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ostinato.models.config.hf_fields import HFConfig, read_name
from ostinato.models.media.processor_fields import (
    ProcessorFields,
    read_colours,
    read_resample,
    text_of_id,
)
from ostinato.models.vision.image_processor_fields import (
    CLIP_COLOURS,
    COMMON,
    COMMON_KEYS,
    PAD_AND_CROP,
    edge_of,
    pair_of,
    read_class,
    read_pair,
    read_placeholder,
)
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec

__all__ = ("read_feature_strategy", "read_fixed_images")

_CLIP = COMMON | {
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    **CLIP_COLOURS,
}
# Processors that give all images the same size, with their defaults.
_FIXED = {
    "CLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": _CLIP,
    "SiglipImageProcessor": COMMON
    | {
        "size": {"height": 224, "width": 224},
        "default_to_square": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
# Towers of LLaVA: default image size, default patch size, and number of class tokens.
_FIXED_TOWERS = {"clip_vision_model": (224, 32, 1), "siglip_vision_model": (224, 16, 0)}
_LLAVA_TOWER = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
_FIXED_KEYS = COMMON_KEYS | PAD_AND_CROP | {"use_square_size"}


def read_fixed_images(
    checkpoint_directory: Path, hf_config: HFConfig, token_text: Callable[[int], str]
) -> ImageSpec:
    """The spec of a model that takes all images in the same size."""
    name, fields = read_class(checkpoint_directory, hf_config, _FIXED, "LlavaImageProcessor")
    fields.refuse_unknown(_FIXED_KEYS)
    if fields.get("use_square_size"):
        raise fields.refusal("use_square_size", "remove the key and state size")
    tower = hf_config.get("vision_config")
    tower = _LLAVA_TOWER if tower is None else tower
    tower_type = tower.get("model_type", "clip_vision_model")
    if tower_type not in _FIXED_TOWERS:
        raise ValueError(
            f"config.json: vision_config.model_type={tower_type!r} is not supported; supported: "
            f"{', '.join((*_FIXED_TOWERS, 'pixtral'))}"
        )
    default_size, default_patch, num_class_tokens = _FIXED_TOWERS[tower_type]
    image_size = pair_of(tower, "image_size", default_size)
    patch_size = edge_of(tower, "patch_size", default_patch)

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
        _refuse_other_size(fields, "pad_size", read_pair(fields, "pad_size"), image_size)
    num_patches = (image_size[0] // patch_size) * (image_size[1] // patch_size)
    num_dropped = int(read_feature_strategy(hf_config) == "default")
    num_tokens = num_patches + num_class_tokens - num_dropped
    if num_tokens < 1:
        raise ValueError(
            f"config.json: vision_config.image_size={list(image_size)} gives no embedding with "
            f"vision_config.patch_size={patch_size}; it must be larger"
        )
    placeholder_id = read_placeholder(hf_config, 32000)
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
            size = read_pair(fields, "size", "shortest_edge, or height and width")
    if fields.flag("do_center_crop"):
        crop = read_pair(fields, "crop_size")
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


def read_feature_strategy(hf_config: HFConfig) -> str:
    """`vision_feature_select_strategy`; `default` leaves out the first state of the tower's output.

    Raises:
        ValueError: it is not supported.
    """
    supported = ("default", "full")
    return read_name(hf_config, "vision_feature_select_strategy", supported, "default")
