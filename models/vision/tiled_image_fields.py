"""Reads how a model takes images that are cut into tiles (InternVL, Idefics3); imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    PAD_AND_CROP,
    edge_of,
    merged_edge,
    read_class,
    read_pair,
    read_placeholder,
)
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.models.vision.tile_spec import TileGrid, TileSpec

__all__ = ("read_idefics_images", "read_intern_images")

_FILE = "processor_config.json"
_INTERN = {
    "GotOcr2ImageProcessor": COMMON
    | {"size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12, **CLIP_COLOURS}
}
# The processor always asks for tiles, so crop_to_patches has no effect.
_INTERN_KEYS = COMMON_KEYS | PAD_AND_CROP | {"crop_to_patches", "min_patches", "max_patches"}
_MOST_TILES = 1000  # of a grid

_LANCZOS = 1
_IDEFICS = COMMON | {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
    "resample": _LANCZOS,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_IDEFICS_CLASSES = {"Idefics3ImageProcessor": _IDEFICS, "SmolVLMImageProcessor": _IDEFICS}
_IDEFICS_KEYS = {
    *COMMON_KEYS,
    *PAD_AND_CROP,  # images are padded only if several of different sizes are prepared at once
    *("max_image_size", "do_image_splitting"),
    # The keys below change no image.
    *("return_row_col_info", "video_sampling"),
}
_AROUND = "<fake_token_around_image>"


def read_intern_images(
    checkpoint_directory: Path, hf_config: HFConfig, token_text: Callable[[int], str]
) -> ImageSpec:
    """The spec of InternVL, whose tiles have one pair of texts around them."""
    _, fields = read_class(checkpoint_directory, hf_config, _INTERN, "GotOcr2ImageProcessor")
    fields.refuse_unknown(_INTERN_KEYS)
    _check_resized(fields)
    tower = hf_config.get("vision_config") or {}
    edge = edge_of(tower, "image_size", 448)
    size = read_pair(fields, "size")
    if size != (edge, edge):
        raise fields.refusal(
            "size", f"both edges must be those of config.json: vision_config.image_size={edge}"
        )
    least, most = fields.integer("min_patches"), fields.integer("max_patches")
    if not least <= most <= _MOST_TILES:
        raise fields.refusal(
            "max_patches", f"it must be at least min_patches={least} and at most {_MOST_TILES}"
        )
    tiles = TileSpec(
        grid=TileGrid.nearest,
        edge=edge,
        min_tiles=least,
        max_tiles=most,
        start="<img>",
        end="</img>",
    )
    merge_size = merged_edge(hf_config)
    patch_size = edge_of(tower, "patch_size", 14)
    num_tokens = _count_tokens(fields, "size", edge, patch_size, merge_size)
    _check_length(checkpoint_directory, "image_seq_length", 256, num_tokens, "size")
    placeholder_id = read_placeholder(hf_config, 151667)
    placeholder = text_of_id(placeholder_id, "image_token_id", token_text)
    return ImageSpec(
        placeholder_id=placeholder_id,
        placeholder=placeholder,
        marked_placeholder=f"{placeholder}\n",
        patch_size=patch_size,
        merge_size=merge_size,
        **_tiled(fields, tiles, num_tokens),
    )


def read_idefics_images(
    checkpoint_directory: Path, hf_config: HFConfig, token_text: Callable[[int], str]
) -> ImageSpec:
    """The spec of Idefics3 and SmolVLM, whose tiles have names."""
    _, fields = read_class(
        checkpoint_directory, hf_config, _IDEFICS_CLASSES, "Idefics3ImageProcessor"
    )
    fields.refuse_unknown(_IDEFICS_KEYS)
    _check_resized(fields)
    tiles = TileSpec(
        grid=TileGrid.longest,
        edge=_longest(fields, "max_image_size"),
        is_split=fields.flag("do_image_splitting"),
        longest_edge=_longest(fields, "size"),
        start=_AROUND,
        end=_AROUND,
        whole_name="<global-img>",
    )
    tower = hf_config.get("vision_config") or {}
    patch_size = edge_of(tower, "patch_size", 32)
    merge_size = edge_of(hf_config, "scale_factor", 2)
    num_tokens = _count_tokens(fields, "max_image_size", tiles.edge, patch_size, merge_size)
    _check_length(checkpoint_directory, "image_seq_len", 169, num_tokens, "max_image_size")
    placeholder_id = read_placeholder(hf_config, 128257)
    placeholder = text_of_id(placeholder_id, "image_token_id", token_text)
    return ImageSpec(
        placeholder_id=placeholder_id,
        placeholder=placeholder,
        marked_placeholder=placeholder,
        patch_size=patch_size,
        merge_size=merge_size,
        **_tiled(fields, tiles, num_tokens),
    )


def _check_resized(fields: ProcessorFields) -> None:
    if not fields.flag("do_resize"):
        raise fields.refusal("do_resize", "it must be true, so that tiles have one size")


def _longest(fields: ProcessorFields, key: str) -> int:
    lengths = fields.lengths(key, "longest_edge")
    if set(lengths) != {"longest_edge"}:
        raise fields.refusal(key, "it must have longest_edge alone")
    return lengths["longest_edge"]


def _count_tokens(
    fields: ProcessorFields, key: str, edge: int, patch_size: int, merge_size: int
) -> int:
    """Embeddings of a tile.

    Args:
        fields: the processor's file.
        key: its key that states the size of a tile.
        edge: pixels of a tile's edge.
        patch_size: pixels of a patch's edge.
        merge_size: patches of the edge of the square that gives one embedding.

    Raises:
        ValueError: a tile does not have whole squares.
    """
    patches = edge // patch_size
    if not patches or patches % merge_size:
        raise fields.refusal(
            key,
            f"its {edge} pixels are {patches} patches of config.json: vision_config.patch_size="
            f"{patch_size} in a row, which must be a multiple of the {merge_size} that are merged",
        )
    return (patches // merge_size) ** 2


def _check_length(
    directory: Path, length_key: str, default: int, num_tokens: int, key: str
) -> None:
    """Refuse a number of placeholders that is not the number of embeddings of a tile."""
    stated = (read_object(directory / _FILE) or {}).get(length_key)
    length = default if stated is None else stated
    if length != num_tokens:
        raise ValueError(
            f"{_FILE}: {length_key}={json.dumps(length)} must be {num_tokens}, the embeddings of a "
            f"tile by config.json and by {key} of the image processor"
        )


def _tiled(fields: ProcessorFields, tiles: TileSpec, num_tokens: int) -> dict[str, Any]:
    """The fields of an `ImageSpec` that both families have."""
    mean, std, rescale = read_colours(fields)
    return {
        "sizing": ImageSizing.tiles,
        "mean": mean,
        "std": std,
        "rescale": rescale,
        "resample": read_resample(fields),
        "num_tokens": num_tokens,
        "tiles": tiles,
    }
