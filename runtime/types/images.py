"""`PromptImage`: one prepared image of a prompt, as sent to the engine process."""

from __future__ import annotations

import hashlib
import struct

import msgspec

__all__ = ("PromptImage", "image_digest")


def image_digest(height: int, width: int, pixels: bytes | memoryview) -> bytes:
    """BLAKE2b, 32 bytes, over the size and the pixels of a prepared image."""
    digest = hashlib.blake2b(struct.pack("<II", height, width), digest_size=32)
    digest.update(pixels)
    return digest.digest()


class PromptImage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A prepared image in a prompt."""

    digest: bytes  # `image_digest`
    begin: int  # index of its first placeholder token in the prompt
    num_tokens: int  # its placeholder tokens, one for each embedding
    height: int  # pixels, after resizing
    width: int
    pixels: bytes = b""  # [height, width, 3] uint8 RGB; empty where they were left out

    @property
    def end(self) -> int:
        """The index after its last placeholder token."""
        return self.begin + self.num_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the image tables that its embeddings take."""
        return self.num_tokens

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of `data`."""
        return self.height, self.width, 3

    @property
    def data(self) -> bytes:
        """What the vision tower reads."""
        return self.pixels

    def without_data(self) -> PromptImage:
        """The same image without its pixels."""
        return msgspec.structs.replace(self, pixels=b"")

    def with_data(self, data: bytes) -> PromptImage:
        """The same image with these pixels.

        Raises:
            ValueError: they have another digest.
        """
        if image_digest(self.height, self.width, data) != self.digest:
            raise ValueError("the pixels of an image have another digest")
        return msgspec.structs.replace(self, pixels=data)

    @property
    def num_bytes(self) -> int:
        """Bytes of `data`."""
        return self.height * self.width * 3
