"""Positions on three axes for prompts with images and videos (M-RoPE, arXiv:2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.types.images import PromptImage

__all__ = ("grid_positions",)


def grid_positions(
    num_tokens: int, images: Sequence[PromptImage], spec: ImageSpec
) -> tuple[NDArray[np.int64], int]:
    """The positions of a prompt's tokens in time, height and width (section 2.1 of the paper).

    A text token has one position on all axes, one higher than the highest before it. The tokens of
    an image have the same position in time, and their row and column in height and width, counted
    from there. So an image of 4 x 6 embeddings raises the positions after it by 6, not by 24.

    The pairs of frames of a video count from one place. Their positions in time differ by
    `PromptImage.time_offset`.

    Args:
        num_tokens: tokens of the prompt.
        images: images and pairs in the order of their tokens, none of which is beyond the prompt.
        spec: gives the pixels of an embedding's edge.

    Returns:
        [num_tokens, 3] int64, and a delta: token i after the prompt has position i + delta on all
        axes.

    Raises:
        ValueError: an image begins before the end of the one before it, or ends after the prompt;
            or a pair continues a video, and its tokens do not follow those of another pair.
    """
    positions = np.empty((num_tokens, 3), np.int64)
    unit = spec.unit
    end, position = 0, 0  # of what is filled in
    base = 0  # where the image, or the first pair of the video, begins
    for image in images:
        if image.begin < end or image.end > num_tokens:
            raise ValueError(
                f"an image at the tokens {image.begin} to {image.end} must be between token {end} "
                f"and the prompt's end {num_tokens}"
            )
        if image.is_continued and (image.begin > end or not end):
            raise ValueError(
                f"a pair at token {image.begin} continues a video, and must begin at its end, "
                f"token {end}"
            )
        num_text = image.begin - end
        positions[end : image.begin] = np.arange(position, position + num_text)[:, None]
        position += num_text
        if not image.is_continued:
            base = position
        rows, columns = image.height // unit, image.width // unit
        grid = positions[image.begin : image.end].reshape(rows, columns, 3)
        grid[:, :, 0] = base + image.time_offset
        grid[:, :, 1] = np.arange(base, base + rows)[:, None]
        grid[:, :, 2] = np.arange(base, base + columns)
        position = max(position, base + max(rows, columns, image.time_offset + 1))
        end = image.end
    positions[end:] = np.arange(position, position + num_tokens - end)[:, None]
    return positions, position - end
