"""Reads how a Gemma 3 takes images; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ostinato.models.config.hf_fields import HFConfig, read_integer
from ostinato.models.media.processor_fields import (
    read_colours,
    read_id,
    read_resample,
    text_of_id,
)
from ostinato.models.vision.image_processor_fields import (
    COMMON,
    COMMON_KEYS,
    edge_of,
    read_class,
    read_pair,
    read_placeholder,
)
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec

__all__ = ("read_gemma3_images",)

_BILINEAR = 2
_DEFAULTS = COMMON | {
    "size": {"height": 224, "width": 224},
    "resample": _BILINEAR,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pan_and_scan": None,
}
_CLASSES = {"Gemma3ImageProcessor": _DEFAULTS}
# Keys of crops beside the image, which are read only with `do_pan_and_scan`.
_CROP_KEYS = {
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_min_ratio_to_activate",
}
_KEYS = {*COMMON_KEYS, "default_to_square", "do_pan_and_scan", *_CROP_KEYS}


def read_gemma3_images(
    checkpoint_directory: Path, hf_config: HFConfig, token_text: Callable[[int], str]
) -> ImageSpec:
    """The spec of a Gemma 3 (arXiv:2503.19786): all images get one size.

    A chat template writes the token that begins an image. The processor of transformers puts the
    placeholder, the token that ends an image and newlines around it, before it encodes the text.

    Args:
        checkpoint_directory: has the processor's file.
        hf_config: the parsed config.json.
        token_text: gives the text of a token id.

    Raises:
        ValueError: a file is missing, or a key has a value that is not supported.
    """
    _, fields = read_class(checkpoint_directory, hf_config, _CLASSES, "Gemma3ImageProcessor")
    fields.refuse_unknown(_KEYS)
    if fields.get("do_pan_and_scan"):
        raise fields.refusal(
            "do_pan_and_scan", "crops beside the image are not supported; set it to false"
        )
    if not fields.flag("do_resize"):
        raise fields.refusal("do_resize", "it must be true, because all images have one size")
    tower = hf_config.get("vision_config") or {}
    image_size = edge_of(tower, "image_size", 224)
    size = read_pair(fields, "size")
    if size != (image_size, image_size):
        raise fields.refusal(
            "size",
            f"the height and width {list(size)} must be those of config.json: "
            f"vision_config.image_size={image_size}",
        )
    mean, std, rescale = read_colours(fields)
    placeholder_id = read_placeholder(hf_config, 262_144)
    placeholder = text_of_id(placeholder_id, "image_token_index", token_text)
    start, end = (
        text_of_id(read_id(hf_config, key, default), key, token_text)
        for key, default in (("boi_token_index", 255_999), ("eoi_token_index", 256_000))
    )
    return ImageSpec(
        sizing=ImageSizing.fixed,
        placeholder_id=placeholder_id,
        placeholder=start,
        marked_placeholder=start,
        encoded_as=f"\n\n{start}{placeholder}{end}\n\n",
        mean=mean,
        std=std,
        rescale=rescale,
        resample=read_resample(fields),
        patch_size=edge_of(tower, "patch_size", 16),
        size=size,
        num_tokens=read_integer(hf_config, "mm_tokens_per_image", default=256),
    )
