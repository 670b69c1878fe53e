"""The patches of an image: their order, their positions, and the windows that they form.

A tower that merges patches has them in the order of the merged squares: first all patches of the
first square, row by row, then those of the square to its right. So consecutive rows of a matrix are
merged by a change of its shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = (
    "Windows",
    "interpolation_taps",
    "patch_places",
    "rotary_rows",
    "split_patches",
    "windows_of",
)


class Windows(NamedTuple):
    """The windows of an image. Windows of one size are neighbours."""

    order: Tensor  # [squares] int64: the squares in the order of the windows
    groups: tuple[tuple[int, int], ...]  # (number of windows, squares of each of them)


def split_patches(pixels: Tensor, patch_size: int, merge_size: int = 1) -> Tensor:
    """Cut an image or a pair of frames into patches.

    Args:
        pixels: [height, width, 3], or [frames, height, width, 3] for F frames; height and width are
            multiples of `patch_size * merge_size`.
        patch_size: pixels of a patch's edge.
        merge_size: patches of the edge of a merged square.

    Returns:
        [patches, 3 * F * patch_size ** 2] in the dtype of `pixels`, F = 1 for an image: for each
        patch the values of the first colour, frame by frame and row by row, then those of the
        other colours.
    """
    height, width, _ = pixels.shape[-3:]
    rows, columns = height // patch_size // merge_size, width // patch_size // merge_size
    cut = pixels.view(-1, rows, merge_size, patch_size, columns, merge_size, patch_size, 3)
    return cut.permute(1, 4, 2, 5, 7, 0, 3, 6).reshape(rows * columns * merge_size**2, -1)


def patch_places(
    rows: int, columns: int, merge_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The row and the column of each patch, in the order of `split_patches`.

    Args:
        rows: rows of patches.
        columns: patches of a row.
        merge_size: patches of the edge of a merged square.
        device: where the result is made.

    Returns:
        Two tensors [patches] int64.
    """
    shape = (rows // merge_size, merge_size, columns // merge_size, merge_size)
    places = torch.arange(rows * columns, device=device).view(shape).transpose(1, 2).reshape(-1)
    return places // columns, places % columns


def rotary_rows(
    rows: Tensor, columns: Tensor, head_dim: int, theta: float, *, alternates: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of patches for rotary positions on two axes.

    The first half of the rotated pairs turns with the row, and the second half with the column.

    Args:
        rows: [patches] int64.
        columns: [patches] int64.
        head_dim: elements of a head; a multiple of 4.
        theta: the base of the frequencies.
        alternates: the frequencies of a head belong in turn to the row and the column (Pixtral);
            otherwise both axes have the same ones.

    Returns:
        cos, sin: [patches, head_dim / 2] float32.
    """
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=rows.device)
    of_rows = 1.0 / theta ** (exponents / half)
    of_columns = 1.0 / theta ** ((exponents + 1) / half) if alternates else of_rows
    angles = torch.cat(
        (rows[:, None].float() * of_rows, columns[:, None].float() * of_columns), dim=1
    )
    return angles.cos(), angles.sin()


def windows_of(rows: int, columns: int, edge: int, device: torch.device) -> Windows:
    """Divide the merged squares of an image into windows.

    The windows begin at the first row and the first column. Those at the end can be smaller. The
    order of windows is free, because no layer depends on it.

    Args:
        rows: rows of squares.
        columns: squares of a row.
        edge: squares of a window's edge.
        device: where the result is made.
    """
    places = torch.arange(rows * columns, device=device).view(rows, columns)
    pieces: list[Tensor] = []
    groups: list[tuple[int, int]] = []
    for first_row, num_rows, height in _window_spans(rows, edge):
        for first_column, num_columns, width in _window_spans(columns, edge):
            part = places[
                first_row : first_row + num_rows * height,
                first_column : first_column + num_columns * width,
            ]
            cut = part.reshape(num_rows, height, num_columns, width)
            pieces.append(cut.transpose(1, 2).reshape(-1))
            groups.append((num_rows * num_columns, height * width))
    return Windows(torch.cat(pieces), tuple(groups))


def _window_spans(length: int, edge: int) -> list[tuple[int, int, int]]:
    """(start, number of windows, length of each) along one axis: the whole ones, then the rest."""
    count, rest = divmod(length, edge)
    spans = [(0, count, edge), (length - rest, 1, rest)]
    return [span for span in spans if span[1] and span[2]]


def interpolation_taps(
    rows: Tensor, columns: Tensor, size: tuple[int, int], edge: int
) -> tuple[Tensor, Tensor]:
    """Where an image's patches lie in a square table of positions, for bilinear interpolation.

    The first and the last patch of an axis lie on the first and the last entry of the table.

    Args:
        rows: [patches] int64, each below `size[0]`.
        columns: [patches] int64, each below `size[1]`.
        size: rows and columns of patches.
        edge: entries of the table's edge.

    Returns:
        places: [patches, 4] int64, rows of the table.
        weights: [patches, 4] float32; the four weights of a patch add up to 1.
    """
    row_places, row_weights = _axis_taps(rows, size[0], edge)
    column_places, column_weights = _axis_taps(columns, size[1], edge)
    places = row_places[:, :, None] * edge + column_places[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return places.view(-1, 4), weights.view(-1, 4)


def _axis_taps(index: Tensor, size: int, edge: int) -> tuple[Tensor, Tensor]:
    """[patches, 2] int64 the two entries around each patch, [patches, 2] float32 their weights."""
    place = index.float() * (edge - 1) / max(size - 1, 1)
    below = place.floor()
    share = place - below
    first = below.long()
    entries = torch.stack((first, first + 1), dim=1).clamp_(max=edge - 1)
    return entries, torch.stack((1 - share, share), dim=1)
