"""A vision tower without weights, and images for it: an embedding says which pixels it comes from."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from hashlib import blake2b

import msgspec
import torch
from torch import Tensor

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.models.vision.towers.vision_tower import VisionTower
from ostinato.runtime.types.images import PromptImage, image_digest

WIDTH = 4

SPEC = ImageSpec(
    sizing=ImageSizing.dynamic,
    placeholder_id=7,
    placeholder="<image>",
    marked_placeholder="<image>",
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    patch_size=1,
    merge_size=1,
    min_pixels=1,
    max_pixels=16,
)


class ToyTower(VisionTower):
    """One embedding for each pixel: its three colours and 1. One unit for each row of pixels.

    The colours of a pair of frames are added.
    """

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        for _ in range(pixels.shape[-3]):
            yield
        colours = _added(pixels, pixels.shape)
        return torch.cat([colours, torch.ones(len(colours), 1)], 1)


def _added(pixels: Tensor, shape: Sequence[int]) -> Tensor:
    """[height * width, 3] float32: the colours of an image, or the sums of those of a pair."""
    return pixels.to(torch.float32).view(-1, shape[-3] * shape[-2], 3).sum(0)


def toy_pair(
    seed: int, height: int, width: int, begin: int = 0, *, time_offset: int = 0, first: bool = True
) -> PromptImage:
    """A pair of frames whose pixels follow from a seed.

    Args:
        time_offset: `PromptImage.time_offset`.
        first: whether the pair is the first one of its video.
    """
    colours = bytes((seed * 31 + place * 7) % 256 for place in range(2 * height * width * 3))
    return PromptImage(
        digest=image_digest(height, width, colours),
        begin=begin,
        num_tokens=height * width,
        height=height,
        width=width,
        pixels=colours,
        num_frames=2,
        time_offset=time_offset,
        is_continued=not first,
    )


def toy_image(seed: int, height: int, width: int, begin: int = 0) -> PromptImage:
    """An image whose pixels follow from a seed."""
    colours = bytes((seed * 31 + place * 7) % 256 for place in range(height * width * 3))
    key = height.to_bytes(4, "little") + width.to_bytes(4, "little") + colours
    return PromptImage(
        digest=blake2b(key, digest_size=32).digest(),
        begin=begin,
        num_tokens=height * width,
        height=height,
        width=width,
        pixels=colours,
    )


def with_ends(image: PromptImage) -> PromptImage:
    """The same image with a token that ends each row."""
    return msgspec.structs.replace(
        image, num_tokens=image.height * (image.width + 1), row_tokens=image.width + 1
    )


def toy_embeddings(image: PromptImage) -> Tensor:
    """[num_rows, WIDTH]: what the tower gives for an image."""
    colours = _added(torch.tensor(list(image.pixels)), image.shape)
    return torch.cat([colours, torch.ones(len(colours), 1)], 1)
