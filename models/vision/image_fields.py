"""Reads how a model takes images from the files of its checkpoint.

The facts are those of the image processors of transformers 5.24: their defaults, and which key has
which effect. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.vision.dynamic_image_fields import QWEN_DEFAULTS, read_dynamic_images
from ostinato.models.vision.fixed_image_fields import read_fixed_images
from ostinato.models.vision.gemma3_image_fields import read_gemma3_images
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.models.vision.pixtral_image_fields import MISTRAL3, read_pixtral_images
from ostinato.models.vision.tile_spec import TileGrid, TileSpec
from ostinato.models.vision.tiled_image_fields import read_idefics_images, read_intern_images
from ostinato.models.vision.video_fields import read_video_spec

__all__ = ("read_image_spec",)

_READERS = {
    "gemma3": read_gemma3_images,
    "idefics3": read_idefics_images,
    "internvl": read_intern_images,
    "llava": read_fixed_images,
    "smolvlm": read_idefics_images,
    **dict.fromkeys(QWEN_DEFAULTS, read_dynamic_images),
}


def read_image_spec(
    checkpoint_directory: Path,
    hf_config: HFConfig,
    *,
    max_resized_pixels: int | None = None,
    max_frame_pixels: int | None = None,
    takes_videos: bool = True,
    token_text: Callable[[int], str],
    token_id: Callable[[str], int | None],
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
        token_id: gives the id of an added token's text; None if there is no such token.

    Raises:
        ValueError: the files are missing, or a key has a value that is not supported. The message
            names the file, the key and the value.
    """
    model_type = hf_config.get("model_type")
    if _has_pixtral(hf_config):
        spec = read_pixtral_images(checkpoint_directory, hf_config, token_text, token_id)
    elif model_type in _READERS:
        spec = _READERS[model_type](checkpoint_directory, hf_config, token_text)
    else:
        raise ValueError(
            f"config.json: images for model_type={model_type!r} are not supported; supported: "
            f"{', '.join((*_READERS, MISTRAL3))}"
        )
    video = None
    if takes_videos and model_type in QWEN_DEFAULTS:
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


def _has_pixtral(hf_config: HFConfig) -> bool:
    """Whether a model has the tower of Pixtral or Mistral 3."""
    if hf_config.get("model_type") != "llava":
        return hf_config.get("model_type") == MISTRAL3
    return (hf_config.get("vision_config") or {}).get("model_type") == "pixtral"


def _lower_pixels(spec: ImageSpec, max_resized_pixels: int) -> ImageSpec:
    """The spec with images of at most so many pixels."""
    if spec.tiles is not None:
        return msgspec.structs.replace(spec, tiles=_fewer_tiles(spec.tiles, max_resized_pixels))
    least, what = spec.least_pixels, f"the model's min_pixels is {spec.min_pixels}"
    if spec.sizing is ImageSizing.fixed:
        height, width = spec.fixed_size
        what = f"the model takes all images as {height}x{width}"
    elif spec.sizing is ImageSizing.shrunk:
        what = f"the model takes images in whole squares of {spec.unit}x{spec.unit}"
    if max_resized_pixels < least:
        raise ValueError(
            f"images.max_resized_pixels={max_resized_pixels} must be at least {least}, because "
            f"{what}"
        )
    return spec.limited(max_resized_pixels)


def _fewer_tiles(tiles: TileSpec, max_resized_pixels: int) -> TileSpec:
    """The tiles of images whose grids have at most so many pixels."""
    most = max_resized_pixels // tiles.edge**2
    if most < tiles.min_tiles:
        what = "a tile has" if tiles.min_tiles == 1 else f"{tiles.min_tiles} tiles have"
        raise ValueError(
            f"images.max_resized_pixels={max_resized_pixels} must be at least "
            f"{tiles.min_tiles * tiles.edge**2}, because {what} so many pixels"
        )
    if tiles.grid is TileGrid.nearest:
        return msgspec.structs.replace(tiles, max_tiles=min(tiles.max_tiles, most))
    # All grids are within the square one.
    longest = min(tiles.longest_edge, math.isqrt(most) * tiles.edge // 2 * 2)
    return msgspec.structs.replace(tiles, longest_edge=longest)
