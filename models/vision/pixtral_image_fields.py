"""Reads how a model takes images whose rows end with tokens (Pixtral, Mistral 3); imports no torch.

Two objects say it: that of the image processor (size and colours), and processor_config.json itself
(patches and tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.media.processor_fields import (
    ProcessorFields,
    read_colours,
    read_object,
    read_resample,
    text_of_id,
)
from ostinato.models.vision.image_processor_fields import (
    CLIP_COLOURS,
    COMMON,
    COMMON_KEYS,
    edge_of,
    read_class,
    read_pair,
    read_placeholder,
)
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec

__all__ = ("MISTRAL3", "read_pixtral_images")

MISTRAL3 = "mistral3"
"""The model type of Mistral Small 3.1. That of Pixtral is `llava`."""

_IMAGE_PROCESSOR = "PixtralImageProcessor"
_CLASSES = {
    _IMAGE_PROCESSOR: COMMON
    | {"size": {"longest_edge": 1024}, "default_to_square": True, **CLIP_COLOURS}
}
_KEYS = COMMON_KEYS | {
    *("do_center_crop", "crop_size"),
    # Only the images of a batch are padded.
    *("do_pad", "pad_size"),
    "default_to_square",
    # `patch_size` and `spatial_merge_size` of processor_config.json take its place.
    "patch_size",
}
_FILE = "processor_config.json"
_DEFAULTS = {
    "patch_size": 16,
    "spatial_merge_size": 1,
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_FILE_KEYS = {
    *_DEFAULTS,
    # The image processor is read above. The other keys have no effect on images.
    *("image_processor", "processor_class", "auto_map", "chat_template"),
}


def read_pixtral_images(
    checkpoint_directory: Path,
    hf_config: HFConfig,
    token_text: Callable[[int], str],
    token_id: Callable[[str], int | None],
) -> ImageSpec:
    """The spec of a model with the tower of Pixtral or Mistral 3.

    Args:
        checkpoint_directory: has the files of the processor.
        hf_config: the parsed config.json.
        token_text: gives the text of a token id.
        token_id: gives the id of an added token's text; None if there is no such token.

    Raises:
        ValueError: a key has a value that is not supported. The message names the file, the key and
            the value.
    """
    _, fields = read_class(checkpoint_directory, hf_config, _CLASSES, _IMAGE_PROCESSOR)
    fields.refuse_unknown(_KEYS)
    if not fields.flag("do_resize"):
        raise fields.refusal("do_resize", "it must be true, so that images consist of patches")
    if fields.flag("do_center_crop"):
        raise fields.refusal("do_center_crop", "it must be false, because images are not cut")
    processor = ProcessorFields(
        source=_FILE, stated=read_object(checkpoint_directory / _FILE) or {}, defaults=_DEFAULTS
    )
    processor.refuse_unknown(_FILE_KEYS)
    patch_size, merge_size = _read_patches(processor, hf_config)
    placeholder_id = read_placeholder(hf_config, 10 if _is_mistral3(hf_config) else 32000)
    key = "image_token_index"
    placeholder = text_of_id(placeholder_id, key, token_text)
    if processor.get("image_token") != placeholder:
        raise processor.refusal(
            "image_token", f"it must be {placeholder!r}, the text of config.json: {key}"
        )
    mean, std, rescale = read_colours(fields)
    return ImageSpec(
        sizing=ImageSizing.shrunk,
        placeholder_id=placeholder_id,
        placeholder=placeholder,
        marked_placeholder=placeholder,
        mean=mean,
        std=std,
        rescale=rescale,
        resample=read_resample(fields),
        patch_size=patch_size,
        merge_size=merge_size,
        max_edges=_read_edges(fields),
        row_ends=(
            _read_token(processor, "image_break_token", token_id),
            _read_token(processor, "image_end_token", token_id),
        ),
    )


def _is_mistral3(hf_config: HFConfig) -> bool:
    return hf_config.get("model_type") == MISTRAL3


def _read_patches(processor: ProcessorFields, hf_config: HFConfig) -> tuple[int, int]:
    """`patch_size` and `merge_size`, which config.json states too."""
    tower = hf_config.get("vision_config")
    patch_size, merge_size = 14, 1  # of a Mistral 3 config without `vision_config`
    if tower is not None:
        patch_size = edge_of(tower, "patch_size", 16)
    if _is_mistral3(hf_config):
        stated = hf_config.get("spatial_merge_size")
        merge_size = 2 if stated is None else stated
    for key, place, in_config in (
        ("patch_size", "vision_config.patch_size", patch_size),
        ("spatial_merge_size", "spatial_merge_size", merge_size),
    ):
        if processor.integer(key) != in_config:
            raise processor.refusal(key, f"it must be that of config.json: {place}={in_config}")
    return patch_size, merge_size


def _read_edges(fields: ProcessorFields) -> tuple[int, int]:
    """The longest height and width: `size.longest_edge` for both, or one for each."""
    stated = fields.get("size")
    if isinstance(stated, dict) and set(stated) == {"longest_edge"}:
        edge = fields.lengths("size", "longest_edge")["longest_edge"]
        return edge, edge
    if isinstance(stated, int) and not fields.flag("default_to_square"):
        raise fields.refusal("size", "with default_to_square=false it must have longest_edge")
    return read_pair(fields, "size", "longest_edge, or height and width")


def _read_token(processor: ProcessorFields, key: str, token_id: Callable[[str], int | None]) -> int:
    """The id of the token whose text a key has."""
    text = processor.get(key)
    found = token_id(text) if isinstance(text, str) else None
    if found is None:
        raise processor.refusal(key, "it must be the text of an added token of the tokenizer")
    return found
