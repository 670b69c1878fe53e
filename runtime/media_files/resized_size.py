"""The size that a picture gets, if its shape is kept and it must consist of whole patches."""

from __future__ import annotations

import math

from ostinato.models.vision.image_spec import MAX_ASPECT_RATIO
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("check_shape", "resized_size", "shrunk_size")


def check_shape(
    height: int, width: int, name: str, *, noun: str = "image", code: str = "invalid_image"
) -> None:
    """Refuse long and narrow pictures, whose resized edge could have any length.

    Args:
        height: of the picture, in pixels.
        width: of the picture, in pixels.
        name: the part of the request that has the picture, for errors.
        noun: what the picture is.
        code: of the error.

    Raises:
        InvalidRequestError: the longer edge is too long.
    """
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequestError(
            f"{name}: the {noun} is {width}x{height} pixels, but the longer edge must be at most "
            f"{MAX_ASPECT_RATIO} times the shorter one; cut the {noun} into parts",
            param=name,
            code=code,
        )


def resized_size(
    height: int,
    width: int,
    unit: int,
    least: int,
    most: int,
    *,
    num_pictures: int = 1,
    num_counted: int = 1,
) -> tuple[int, int]:
    """The height and width as multiples of `unit`, with the volume within limits.

    These are the functions `smart_resize` of transformers for Qwen2-VL and Qwen3-VL.

    Args:
        height: of the picture, in pixels.
        width: of the picture, in pixels.
        unit: pixels of the edge of a merged patch.
        least: the least volume: pictures * height * width, before it is rounded to units.
        most: the largest volume. An edge has at least one unit, even above it.
        num_pictures: how many pictures of this size there are.
        num_counted: how many of them count for the comparison with the limits.
    """
    new_height, new_width = (round(edge / unit) * unit for edge in (height, width))
    volume = num_counted * new_height * new_width
    if volume > most:
        scale = math.sqrt(num_pictures * height * width / most)
        new_height, new_width = (
            max(unit, math.floor(edge / scale / unit) * unit) for edge in (height, width)
        )
    elif volume < least:
        scale = math.sqrt(least / (num_pictures * height * width))
        new_height, new_width = (math.ceil(edge * scale / unit) * unit for edge in (height, width))
    return new_height, new_width


def shrunk_size(height: int, width: int, unit: int, most: tuple[int, int]) -> tuple[int, int]:
    """The height and width within limits, rounded up to multiples of `unit`.

    This is the function `get_resize_output_image_size` of transformers for Pixtral. There, an edge
    can become 0. Here, it has at least one unit.

    Args:
        height: of the picture, in pixels.
        width: of the picture, in pixels.
        unit: pixels of the edge of a merged patch.
        most: the largest height and width before they are rounded up.
    """
    ratio = max(height / most[0], width / most[1])
    if ratio > 1:
        height, width = (max(1, math.floor(edge / ratio)) for edge in (height, width))
    return -(-height // unit) * unit, -(-width // unit) * unit
