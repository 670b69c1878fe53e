"""Cuts an image into tiles, as InternVL and Idefics3 take them.

The sizes and the pixels are those of the image processors of transformers on Pillow, and the texts
are those of its processors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from PIL import Image

from ostinato.models.vision.tile_spec import MAX_RESIZED_EDGE, TileGrid, TileSpec

__all__ = ("CutImage", "cut_image", "text_of_tiles", "tile_grid")


class CutImage(NamedTuple):
    """The tiles of an image, row by row, then the whole image in the size of a tile.

    An image of one tile is that tile alone.
    """

    rows: int
    columns: int
    tiles: list[Image.Image]


def cut_image(image: Image.Image, spec: TileSpec, resample: int) -> CutImage:
    """Resize an image and cut it into tiles.

    Args:
        image: of mode RGB.
        spec: the size and the grid of the tiles.
        resample: the number of Pillow's filter.
    """
    edge = spec.edge
    rows, columns = tile_grid(image.height, image.width, spec)
    if spec.grid is TileGrid.longest:
        height, width = _longest_size(image.height, image.width, spec.longest_edge)
        image = image.resize((width, height), resample)
    resized = image.resize((columns * edge, rows * edge), resample)
    if rows * columns == 1:
        return CutImage(1, 1, [resized])
    # The whole image of Idefics3 is made from the resized one.
    source = resized if spec.grid is TileGrid.longest else image
    tiles = [*_pieces(resized, edge), source.resize((edge, edge), resample)]
    return CutImage(rows, columns, tiles)


def tile_grid(height: int, width: int, spec: TileSpec) -> tuple[int, int]:
    """The rows and columns of tiles of an image with these pixels."""
    if not spec.is_split:
        return 1, 1
    if spec.grid is TileGrid.nearest:
        return _nearest_grid(height, width, spec)
    return _covering_grid(*_longest_size(height, width, spec.longest_edge), spec.edge)


def text_of_tiles(rows: int, columns: int, spec: TileSpec, placeholder: str) -> str:
    """The text of an image in a prompt.

    Args:
        rows: rows of tiles.
        columns: tiles of a row.
        spec: has the texts around tiles.
        placeholder: the text of the placeholder token, which stands once for each tile.
    """
    count = rows * columns
    if not spec.whole_name:
        return f"{spec.start}{placeholder * (count + (count > 1))}{spec.end}"
    whole = f"{spec.start}{spec.whole_name}{placeholder}{spec.end}"
    if count == 1:
        return whole
    lines = [
        "".join(f"{spec.start}<row_{row}_col_{column}>{placeholder}" for column in _from_1(columns))
        for row in _from_1(rows)
    ]
    return "".join(f"{line}\n" for line in lines) + f"\n{whole}"


def _from_1(count: int) -> range:
    return range(1, count + 1)


def _pieces(image: Image.Image, edge: int) -> Iterator[Image.Image]:
    """The squares of an image, row by row."""
    for top in range(0, image.height, edge):
        for left in range(0, image.width, edge):
            yield image.crop((left, top, left + edge, top + edge))


def _nearest_grid(height: int, width: int, spec: TileSpec) -> tuple[int, int]:
    """The rows and columns of the grid with the nearest ratio of width to height.

    Of several, the last one wins whose tiles have less than twice as many pixels as the image, or
    else the smallest.
    """
    if spec.max_tiles == 1:
        return 1, 1
    ratio, area = width / height, width * height
    least, best = math.inf, (1, 1)
    for rows, columns in _grids(spec.min_tiles, spec.max_tiles):
        difference = abs(ratio - columns / rows)
        covers = area > 0.5 * spec.edge * spec.edge * columns * rows
        if difference < least or (difference == least and covers):
            least, best = difference, (rows, columns)
    return best


@lru_cache(maxsize=8)
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """All (rows, columns) with so many tiles, those with fewer tiles first."""
    found = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= least
    ]
    return tuple(sorted(found, key=math.prod))


def _longest_size(height: int, width: int, longest: int) -> tuple[int, int]:
    """The height and width of an image whose longer edge gets `longest` pixels.

    The shorter edge is rounded down, then up to an even number. An edge above `MAX_RESIZED_EDGE` is
    reduced to it.
    """
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_RESIZED_EDGE:
        width, height = MAX_RESIZED_EDGE, int(MAX_RESIZED_EDGE / ratio)
    elif height > width and height > MAX_RESIZED_EDGE:
        height, width = MAX_RESIZED_EDGE, int(MAX_RESIZED_EDGE * ratio)
    return max(height, 1), max(width, 1)


def _covering_grid(height: int, width: int, edge: int) -> tuple[int, int]:
    """The rows and columns of the tiles to which an image is enlarged.

    The longer edge is rounded up to whole tiles. The shorter edge keeps its share of the longer
    one, and is rounded up too.
    """
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / edge)
        return math.ceil(int(columns * edge / ratio) / edge), columns
    rows = math.ceil(height / edge)
    return rows, math.ceil(int(rows * edge * ratio) / edge)
