"""`PromptImage`: one prepared image of a prompt, as sent to the engine process.

A tile of a larger image is an image of its own. A pair of frames of a video is an image with two
frames.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

__all__ = (
    "ImageDetail",
    "PreparedImages",
    "PromptImage",
    "count_extra_positions",
    "image_digest",
)

ImageDetail = Literal["auto", "low", "high", "original"]
"""The field `detail` of a request's image. docs/images.md defines `low`; all others are the size
that the model's checkpoint states."""


def image_digest(height: int, width: int, pixels: bytes | memoryview) -> bytes:
    """BLAKE2b, 32 bytes, over the size and the pixels of a prepared image."""
    digest = hashlib.blake2b(struct.pack("<II", height, width), digest_size=32)
    digest.update(pixels)
    return digest.digest()


class PromptImage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A prepared image in a prompt."""

    digest: bytes  # `image_digest`
    begin: int  # index of its first placeholder token in the prompt
    # Its tokens: a placeholder for each embedding, and with `row_tokens` the ends of rows.
    num_tokens: int
    height: int  # pixels, after resizing
    width: int
    pixels: bytes = b""  # `shape` uint8 RGB; empty where they were left out
    num_frames: int = 1  # 2 = a pair of frames of a video
    # Of a pair whose video has positions in time: how many it lies after the video's first pair.
    time_offset: int = 0
    # The pair before it belongs to the same video, and both count positions from the same place.
    is_continued: bool = False
    # Tokens of each row. The last one ends the row and has no embedding of the image. 0 = no token
    # ends a row.
    row_tokens: int = 0

    @property
    def end(self) -> int:
        """The index after its last token."""
        return self.begin + self.num_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the media tables that its embeddings take."""
        return self.num_tokens - (self.num_tokens // self.row_tokens if self.row_tokens else 0)

    @property
    def cache_key(self) -> bytes:
        """What the keys and values of its tokens depend on, besides the tokens before it."""
        if not (self.is_continued or self.time_offset):
            return self.digest
        return self.digest + struct.pack("<q?", self.time_offset, self.is_continued)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `data`: [height, width, 3], of a pair [2, height, width, 3]."""
        frames = () if self.num_frames == 1 else (self.num_frames,)
        return *frames, self.height, self.width, 3

    @property
    def data(self) -> bytes:
        """What the vision tower reads."""
        return self.pixels

    def without_data(self) -> PromptImage:
        """The same image without its pixels."""
        return msgspec.structs.replace(self, pixels=b"")

    def with_data(self, data: bytes) -> PromptImage:
        """The same image with these pixels, which are known to have its digest."""
        return msgspec.structs.replace(self, pixels=data)

    def with_checked_data(self, data: bytes) -> PromptImage:
        """The same image with these pixels.

        Raises:
            ValueError: they have another digest.
        """
        if image_digest(self.height, self.width, data) != self.digest:
            raise ValueError("the pixels of an image have another digest")
        return self.with_data(data)

    @property
    def num_bytes(self) -> int:
        """Bytes of `data`."""
        return self.num_frames * self.height * self.width * 3


class PreparedImages(NamedTuple):
    """The parts of an image or of a video: the image, its tiles, or the pairs of frames."""

    parts: tuple[PromptImage, ...]  # with `begin` 0
    # The text that stands for them in the prompt, with the placeholder once for each part. Empty =
    # the placeholders alone.
    text: str = ""


def count_extra_positions(images: Sequence[PromptImage]) -> int:
    """How many more positions a prompt can take than a text with as many tokens takes.

    Only a video takes more. It does if its pairs are further apart in time than they have tokens.

    Args:
        images: images and pairs in the order of their tokens.
    """
    extra, num_tokens = 0, 0
    last_video = 0  # those of the video that the image belongs to
    for image in images:
        if not image.is_continued:
            extra, last_video, num_tokens = extra + last_video, 0, 0
        num_tokens += image.num_tokens
        last_video = max(last_video, image.time_offset + 1 - num_tokens)
    return extra + last_video
