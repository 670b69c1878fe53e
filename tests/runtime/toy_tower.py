"""A vision tower without weights, and images for it: an embedding says which pixels it comes from."""

from __future__ import annotations

from collections.abc import Generator
from hashlib import blake2b

import torch
from torch import Tensor

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.models.vision.vision_tower import VisionTower
from ostinato.runtime.types.images import PromptImage

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
    """One embedding for each pixel: its three colours and 1. One unit for each row of pixels."""

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        for _ in range(pixels.shape[0]):
            yield
        colours = pixels.reshape(-1, 3).to(torch.float32)
        return torch.cat([colours, torch.ones(len(colours), 1)], 1)


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


def toy_embeddings(image: PromptImage) -> Tensor:
    """[num_tokens, WIDTH]: what the tower gives for an image."""
    colours = torch.tensor(list(image.pixels), dtype=torch.float32).view(-1, 3)
    return torch.cat([colours, torch.ones(len(colours), 1)], 1)
