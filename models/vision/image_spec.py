"""How a model takes the images in prompts.

An image is decoded and resized by the process that prepares the request (runtime/images). The
engine computes its embeddings with the vision tower. In a prompt, each embedding stands in the
place of one placeholder token. This module imports no torch.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from ostinato.models.vision.tile_spec import TileSpec
from ostinato.models.vision.video_spec import VideoSpec

__all__ = ("MAX_ASPECT_RATIO", "ImageSizing", "ImageSpec")

MAX_ASPECT_RATIO = 200
"""The longer edge of an image is at most this many times the shorter one, if its shape is kept."""


class ImageSizing(StrEnum):
    """How the size of a prepared image follows from that of the image."""

    fixed = "fixed"  # all images get the same size (CLIP, SigLIP)
    dynamic = "dynamic"  # the size is kept within limits and rounded to whole patches (Qwen-VL)
    # The edges of a larger image are shortened, and all edges are rounded up to whole patches
    # (Pixtral).
    shrunk = "shrunk"
    tiles = "tiles"  # an image is cut into tiles of one size (InternVL, Idefics3)


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes images: size, colours, and the tokens that stand for an image."""

    sizing: ImageSizing
    placeholder_id: int  # the token that stands for one embedding
    # The text of the placeholder token. A chat template writes it once for each image.
    placeholder: str
    # What to write for an image if the chat template does not show images: the placeholder, with
    # the tokens around it that the model was trained with.
    marked_placeholder: str
    # What stands for the placeholder when a text is encoded; has the token `placeholder_id` once.
    # Empty = the placeholder itself, which is the text of that token.
    encoded_as: str = ""
    mean: tuple[float, float, float]  # of the colours R, G, B, subtracted after `rescale`
    std: tuple[float, float, float]
    rescale: float = 1 / 255  # factor of the stored colours 0 to 255
    resample: int = 3  # number of Pillow's filter: 2 = bilinear, 3 = bicubic
    patch_size: int  # pixels of a patch's edge
    merge_size: int = 1  # patches of the edge of the square that gives one embedding
    # Fixed sizing, in pixels. In this order: pad to a square, resize, crop. If neither
    # `shortest_edge` nor `size` is set, the image is not resized.
    pads_to_square: bool = False  # with the mean colour
    shortest_edge: int = 0  # the length to which the shorter edge is resized; 0 = `size` is used
    size: tuple[int, int] = (0, 0)  # (height, width) to which the image is resized
    crop: tuple[int, int] = (0, 0)  # (height, width) that are cut out of the middle; 0 = no cut
    num_tokens: int = 0  # embeddings of every image, or of every tile
    # Dynamic sizing: limits of height * width.
    min_pixels: int = 0
    max_pixels: int = 0
    # Shrunk sizing: the longest (height, width), before they are rounded up.
    max_edges: tuple[int, int] = (0, 0)
    # The tokens that follow a row of embeddings, and the last row; None = rows follow each other.
    row_ends: tuple[int, int] | None = None
    tiles: TileSpec | None = None  # with `ImageSizing.tiles`
    video: VideoSpec | None = None  # None = the model takes no videos

    def text_to_encode(self, text: str) -> str:
        """A prompt as it is encoded: with what stands for each placeholder."""
        return text.replace(self.placeholder, self.encoded_as) if self.encoded_as else text

    @property
    def has_one_size(self) -> bool:
        """Whether all prepared images, or all tiles, have one size."""
        return self.sizing in (ImageSizing.fixed, ImageSizing.tiles)

    @property
    def unit(self) -> int:
        """Pixels of the edge of the square that gives one embedding."""
        return self.patch_size * self.merge_size

    @property
    def fixed_size(self) -> tuple[int, int]:
        """(height, width) of every prepared image or tile; (0, 0) with dynamic sizing."""
        if self.tiles is not None:
            return self.tiles.edge, self.tiles.edge
        return self.crop if self.crop != (0, 0) else self.size

    def count_tokens(self, height: int, width: int) -> int:
        """Embeddings of a prepared image or tile of this size."""
        if self.has_one_size:
            return self.num_tokens
        return height * width // self.unit**2

    def count_prompt_tokens(self, height: int, width: int) -> int:
        """Tokens of a prompt that stand for a prepared image or tile, with those that end rows."""
        if self.row_ends is None:
            return self.count_tokens(height, width)
        return height // self.unit * self.count_row_tokens(width)

    def count_row_tokens(self, width: int) -> int:
        """Tokens of a row of a prepared image, with the one that ends it; 0 = nothing ends rows."""
        return 0 if self.row_ends is None else width // self.unit + 1

    @property
    def max_tokens(self) -> int:
        """Embeddings of the largest image, in all its tiles."""
        return self.max_encoded_tokens * (1 if self.tiles is None else self.tiles.max_parts)

    @property
    def max_encoded_tokens(self) -> int:
        """Embeddings of the largest image or tile, which the tower makes at once."""
        if self.has_one_size:
            return self.num_tokens
        if self.sizing is ImageSizing.shrunk:
            return math.prod(-(-edge // self.unit) for edge in self.max_edges)
        return self._most_tokens(self.min_pixels, self.max_pixels)

    @property
    def least_pixels(self) -> int:
        """The smallest limit of height * width that all prepared images can keep."""
        if self.has_one_size:
            return math.prod(self.fixed_size)
        return self.unit**2 if self.sizing is ImageSizing.shrunk else self.min_pixels

    def limited(self, max_pixels: int) -> ImageSpec:
        """The same for prepared images of at most so many pixels, at least `least_pixels`."""
        if self.sizing is ImageSizing.dynamic:
            return msgspec.structs.replace(self, max_pixels=min(self.max_pixels, max_pixels))
        if self.has_one_size:
            return self
        # The largest square of whole units keeps the limit, so a part of it keeps it too.
        most = math.isqrt(max_pixels) // self.unit * self.unit
        height, width = (min(edge, most) for edge in self.max_edges)
        return msgspec.structs.replace(self, max_edges=(height, width))

    @property
    def max_pair_tokens(self) -> int:
        """Embeddings of the largest pair of frames of a video; 0 = the model takes no videos."""
        return 0 if self.video is None else self._most_tokens(*self.video.frame_limits)

    def _most_tokens(self, min_pixels: int, max_pixels: int) -> int:
        """Embeddings of the largest image with an area within these limits."""
        # A long and narrow image can have more than `max_pixels`, because an edge has at least one
        # unit. With the area in units and edges of ratio r, the edges are sqrt(area / r) and
        # sqrt(area * r). If an image is enlarged to `min_pixels`, both are rounded up.
        area = self.unit**2
        narrow = math.isqrt(MAX_ASPECT_RATIO * max_pixels // area)
        least = min_pixels / area
        enlarged = math.prod(
            math.sqrt(least * r) + 1 for r in (MAX_ASPECT_RATIO, 1 / MAX_ASPECT_RATIO)
        )
        return max(1, max_pixels // area, narrow, math.floor(enlarged))
