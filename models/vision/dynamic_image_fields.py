"""Reads how a model takes images of different sizes (Qwen-VL); imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.media.processor_fields import (
    read_areas,
    read_colours,
    read_id,
    read_resample,
    text_of_id,
)
from ostinato.models.vision.image_processor_fields import (
    CLIP_COLOURS,
    COMMON,
    COMMON_KEYS,
    PAD_AND_CROP,
    edge_of,
    read_class,
    read_placeholder,
)
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec

__all__ = (
    "QWEN_DEFAULTS",
    "QwenDefaults",
    "read_dynamic_images",
)

_QWEN = COMMON | {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    **CLIP_COLOURS,
}
# All Qwen-VL models have the processor of Qwen2-VL. The other names stand in some early files.
_DYNAMIC = {
    "Qwen2VLImageProcessor": _QWEN,
    "Qwen2_5_VLImageProcessor": _QWEN,
    "Qwen3VLImageProcessor": _QWEN,
}


class QwenDefaults(NamedTuple):
    """What a config.json of this kind of model may leave out."""

    patch_size: int  # edge of a patch
    video_class: str  # of the video processor
    image_id: int = 151655
    video_id: int = 151656
    start_id: int = 151652
    end_id: int = 151653


_VIDEOS_OF_QWEN2, _VIDEOS_OF_QWEN3 = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"
_QWEN3_5 = QwenDefaults(16, _VIDEOS_OF_QWEN3, 248056, 248057, 248053, 248054)
QWEN_DEFAULTS = {
    "qwen2_vl": QwenDefaults(14, _VIDEOS_OF_QWEN2),
    "qwen2_5_vl": QwenDefaults(14, _VIDEOS_OF_QWEN2),
    "qwen3_vl": QwenDefaults(16, _VIDEOS_OF_QWEN3),
    "qwen3_vl_moe": QwenDefaults(16, _VIDEOS_OF_QWEN3),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
}
"""`model_type` -> defaults."""

_DYNAMIC_KEYS = {
    *COMMON_KEYS,
    *("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"),
    *PAD_AND_CROP,  # this processor does not read these keys
    # Keys for videos.
    *("fps", "min_frames", "max_frames", "num_frames", "do_sample_frames", "return_metadata"),
}


def read_dynamic_images(
    checkpoint_directory: Path, hf_config: HFConfig, token_text: Callable[[int], str]
) -> ImageSpec:
    """The spec of a model that takes images of different sizes."""
    _, fields = read_class(checkpoint_directory, hf_config, _DYNAMIC, "Qwen2VLImageProcessor")
    fields.refuse_unknown(_DYNAMIC_KEYS)
    if not fields.flag("do_resize"):
        raise fields.refusal("do_resize", "it must be true, so that images consist of patches")
    tower = hf_config.get("vision_config") or {}
    defaults = QWEN_DEFAULTS[hf_config["model_type"]]
    tower_edges = {
        "patch_size": ("patch_size", defaults.patch_size),
        "merge_size": ("spatial_merge_size", 2),
        "temporal_patch_size": ("temporal_patch_size", 2),
    }
    for key, (tower_key, default) in tower_edges.items():
        in_tower = edge_of(tower, tower_key, default)
        if fields.integer(key) != in_tower:
            raise fields.refusal(
                key, f"it must be that of config.json: vision_config.{tower_key}={in_tower}"
            )
    if fields.integer("temporal_patch_size") != 2:
        raise fields.refusal("temporal_patch_size", "it must be 2")
    min_pixels, max_pixels = read_areas(fields)
    mean, std, rescale = read_colours(fields)
    placeholder_id = read_placeholder(hf_config, defaults.image_id)
    placeholder = text_of_id(placeholder_id, "image_token_id", token_text)
    marks = [
        text_of_id(read_id(hf_config, key, default), key, token_text)
        for key, default in (
            ("vision_start_token_id", defaults.start_id),
            ("vision_end_token_id", defaults.end_id),
        )
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
