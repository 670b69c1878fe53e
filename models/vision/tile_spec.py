"""How a model cuts the images in prompts into tiles.

A large image is resized to a grid of square tiles of one size, and is followed by the whole image
in the size of one tile. No patch of a tile sees another tile, so the engine encodes and caches each
tile alone, like an image. This module imports no torch.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = ("MAX_RESIZED_EDGE", "TileGrid", "TileSpec")

MAX_RESIZED_EDGE = 4096
"""`TileGrid.longest`: pixels that the longer edge is not resized above (Idefics3)."""


class TileGrid(StrEnum):
    """How the rows and columns of tiles follow from the size of an image."""

    # Of all grids within the limits, that whose width divided by its height is nearest to that of
    # the image (InternVL, arXiv:2404.16821, section 3.3).
    nearest = "nearest"
    # The longer edge is resized to `longest_edge`, and both edges are rounded up to whole tiles
    # (Idefics3, arXiv:2408.12637).
    longest = "longest"


class TileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model cuts images into tiles, and which texts stand around them."""

    grid: TileGrid
    edge: int  # pixels of a tile's edge
    is_split: bool = True  # False = every image is one tile
    # `TileGrid.nearest`: the least and the most tiles of a grid.
    min_tiles: int = 1
    max_tiles: int = 1
    longest_edge: int = 0  # `TileGrid.longest`: pixels
    start: str  # the text before an image, and the text after it
    end: str
    # With names, `start` is before each tile, and the name of the tile after it. `whole_name` is
    # that of the whole image; empty = tiles have no names.
    whole_name: str = ""

    @property
    def max_grid(self) -> int:
        """Tiles of the largest grid, without the whole image."""
        if not self.is_split:
            return 1
        if self.grid is TileGrid.nearest:
            return self.max_tiles
        # An edge of an odd length is rounded up to an even one.
        longest = min(self.longest_edge + self.longest_edge % 2, MAX_RESIZED_EDGE)
        return (-(-longest // self.edge)) ** 2

    @property
    def max_parts(self) -> int:
        """Tiles of the largest image, with the whole image."""
        return 1 if self.max_grid == 1 else self.max_grid + 1
