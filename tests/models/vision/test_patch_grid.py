"""Orders and positions of patches against the functions of transformers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import vision_utils

from ostinato.models.vision.patch_grid import (
    interpolation_taps,
    patch_places,
    split_patches,
    windows_of,
)

CPU = torch.device("cpu")
SQUARES = st.integers(1, 9)


@given(rows=SQUARES, columns=SQUARES, merge=st.integers(1, 3))
def test_places_are_those_of_transformers(rows: int, columns: int, merge: int) -> None:
    grid = torch.tensor([[1, rows * merge, columns * merge]])
    found = patch_places(rows * merge, columns * merge, merge, CPU)
    assert torch.equal(torch.stack(found, 1), vision_utils.get_vision_position_ids(grid, merge))


@given(rows=SQUARES, columns=SQUARES, merge=st.integers(1, 2), patch=st.integers(1, 3))
def test_a_patch_has_the_pixels_of_its_place(
    rows: int, columns: int, merge: int, patch: int
) -> None:
    size = rows * merge * patch, columns * merge * patch, 3
    pixels = torch.arange(size[0] * size[1] * 3).view(size)
    patches = split_patches(pixels, patch, merge)
    places = patch_places(rows * merge, columns * merge, merge, CPU)
    for values, row, column in zip(patches, *(each.tolist() for each in places), strict=True):
        own = pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        assert torch.equal(values, own.permute(2, 0, 1).flatten())


@given(rows=SQUARES, columns=SQUARES, merge=st.integers(1, 2), patch=st.integers(1, 3))
def test_a_patch_of_a_pair_has_the_pixels_of_both_frames(
    rows: int, columns: int, merge: int, patch: int
) -> None:
    size = 2, rows * merge * patch, columns * merge * patch, 3
    pixels = torch.arange(2 * size[1] * size[2] * 3).view(size)
    patches = split_patches(pixels, patch, merge).view(-1, 3, 2, patch**2)
    for frame in (0, 1):
        own = split_patches(pixels[frame], patch, merge).view(-1, 3, patch**2)
        assert torch.equal(patches[:, :, frame], own)


@given(rows=SQUARES, columns=SQUARES, edge=st.integers(1, 5))
def test_windows_have_the_squares_of_those_of_transformers(
    rows: int, columns: int, edge: int
) -> None:
    """The order of the windows may differ, but not their squares, nor the order inside."""
    order, bounds = vision_utils.get_vision_window_index(
        torch.tensor([[1, rows, columns]]), spatial_merge_size=1, window_size=edge, patch_size=1
    )
    expected = {tuple(part.tolist()) for part in order.split(bounds.diff().tolist())}
    windows = windows_of(rows, columns, edge, CPU)
    sizes = [size for count, size in windows.groups for _ in range(count)]
    found = [tuple(part.tolist()) for part in windows.order.split(sizes)]
    assert set(found) == expected
    assert len(found) == len(expected)


@given(rows=SQUARES, columns=SQUARES, edge=st.integers(1, 12))
def test_interpolation_is_that_of_transformers(rows: int, columns: int, edge: int) -> None:
    grid = torch.tensor([[1, 2 * rows, 2 * columns]])
    places, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid, edge, align_corners=True, spatial_merge_size=2
    )
    own = patch_places(2 * rows, 2 * columns, 2, CPU)
    found, shares = interpolation_taps(*own, (2 * rows, 2 * columns), edge)
    table = torch.randn(edge * edge, 3, generator=torch.Generator().manual_seed(0))
    expected = (table[places] * weights[:, :, None]).sum(1)
    torch.testing.assert_close((table[found] * shares[:, :, None]).sum(1), expected)
