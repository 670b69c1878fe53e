"""Audio as sent to the engine process.

`PromptAudio` is what an encoder-decoder model transcribes. `PromptSound` stands in the prompt of
a chat model.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Self

import msgspec

__all__ = ("PromptAudio", "PromptSound", "audio_digest")


def audio_digest(num_bins: int, num_frames: int, features: bytes | memoryview) -> bytes:
    """BLAKE2b, 32 bytes, over the sizes and the values of a log-mel spectrogram."""
    digest = hashlib.blake2b(struct.pack("<II", num_bins, num_frames), digest_size=32)
    digest.update(features)
    return digest.digest()


class _Spectrogram(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One window of audio, as a log-mel spectrogram."""

    digest: bytes  # `audio_digest`
    num_bins: int  # mel bins
    num_frames: int
    features: bytes = b""  # [num_bins, num_frames] float32; empty where they were left out

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of `data`."""
        return self.num_bins, self.num_frames

    @property
    def data(self) -> bytes:
        """What the encoder reads."""
        return self.features

    def without_data(self) -> Self:
        """The same window without its features."""
        return msgspec.structs.replace(self, features=b"")

    def with_data(self, data: bytes) -> Self:
        """The same window with these features, which are known to have its digest."""
        return msgspec.structs.replace(self, features=data)

    def with_checked_data(self, data: bytes) -> Self:
        """The same window with these features.

        Raises:
            ValueError: they have another digest.
        """
        if audio_digest(self.num_bins, self.num_frames, data) != self.digest:
            raise ValueError("the features of audio have another digest")
        return self.with_data(data)

    @property
    def num_bytes(self) -> int:
        """Bytes of `data`."""
        return self.num_bins * self.num_frames * 4


class PromptAudio(_Spectrogram, frozen=True, kw_only=True, array_like=True, gc=False):
    """One window of audio that an encoder-decoder model transcribes."""

    @property
    def num_rows(self) -> int:
        """Windows of the caches of cross attention that it takes."""
        return 1


class PromptSound(_Spectrogram, frozen=True, kw_only=True, array_like=True, gc=False):
    """One window of a sound.

    A sound that is longer than a window is several windows, whose tokens follow each other. A
    window has the frames that the encoder's states depend on: 2n + 1 for n states, or those of a
    full window. Frames of the silence after them are left out.
    """

    begin: int  # index of its first placeholder token in the prompt
    num_tokens: int  # its placeholder tokens, one for each embedding

    @property
    def end(self) -> int:
        """The index after its last placeholder token."""
        return self.begin + self.num_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the media tables that its embeddings take."""
        return self.num_tokens

    @property
    def cache_key(self) -> bytes:
        """What the keys and values of its tokens depend on, besides the tokens before it."""
        return self.digest
