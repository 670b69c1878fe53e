"""The sizes of log-mel spectrograms; this module imports no torch."""

from __future__ import annotations

import msgspec

__all__ = ("MelSpec",)


class MelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The spectrogram of a window of audio, as `WhisperFeatureExtractor` of transformers has it."""

    sampling_rate: int  # Hz
    num_bins: int  # mel bins
    fft_size: int  # samples
    hop_size: int  # samples between frames
    window_s: int  # seconds of one window; shorter audio is padded with silence

    @property
    def num_frames(self) -> int:
        """Frames of the spectrogram of one window."""
        return self.window_s * self.sampling_rate // self.hop_size
