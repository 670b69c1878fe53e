"""Computes the log-mel spectrogram of a window, as `WhisperFeatureExtractor` of transformers does.

Sums are computed in float64. Products of matrices are avoided, because they may start threads.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ostinato.models.audio.mel_spec import MelSpec

__all__ = ("log_mel",)

_MAX_HERTZ = 8000.0  # of the mel filters, at every sampling rate
_LEAST_POWER = 1e-10
_RANGE = 8.0  # decades below the loudest value that are kept
_BLOCK_FRAMES = 512  # frames at a time, whose spectra fit into the cache of a core
# The mel scale of Slaney is linear up to 1000 Hz, and logarithmic above.
_LINEAR_HERTZ, _HERTZ_PER_MEL = 1000.0, 200.0 / 3.0
_LOG_STEP = np.log(6.4) / 27.0


def log_mel(samples: NDArray[np.float32], spec: MelSpec) -> NDArray[np.float32]:
    """The spectrogram of one window, which is padded with silence.

    Args:
        samples: [n] float32, at most `window_s` seconds at `sampling_rate`.
        spec: gives the sizes.

    Returns:
        [num_bins, num_frames] float32.
    """
    longest = spec.window_s * spec.sampling_rate
    assert len(samples) <= longest, f"{len(samples)} samples must be at most {longest}"
    half = spec.fft_size // 2
    padded = np.zeros(longest, np.float64)
    padded[: len(samples)] = samples
    padded = np.pad(padded, half, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, spec.fft_size)[:: spec.hop_size]
    num_frames = spec.num_frames
    # The frames after the samples are silent. The last ones can have reflected samples.
    first_silent = min(num_frames, -(-(len(samples) + half) // spec.hop_size))
    reflects = len(samples) > longest - half - 1
    num_heard = num_frames if reflects else first_silent
    window = _hann(spec.fft_size)
    bands = _bands(spec.num_bins, spec.fft_size, spec.sampling_rate)
    mel = np.full((spec.num_bins, num_frames), _LEAST_POWER)
    for begin in range(0, num_heard, _BLOCK_FRAMES):
        end = min(begin + _BLOCK_FRAMES, num_heard)
        spectra = np.fft.rfft(frames[begin:end] * window)
        powers = np.ascontiguousarray((spectra.real**2 + spectra.imag**2).T)
        for mel_bin, first, weights in bands:
            row = np.zeros(end - begin)
            for offset, weight in enumerate(weights):
                row += weight * powers[first + offset]
            mel[mel_bin, begin:end] = row
    logs = np.log10(np.maximum(mel, _LEAST_POWER))
    logs = np.maximum(logs, logs.max() - _RANGE)
    return ((logs + 4.0) / 4.0).astype(np.float32)


@lru_cache(maxsize=4)
def _hann(size: int) -> NDArray[np.float64]:
    """[size] float64: a periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(size) / size)


@lru_cache(maxsize=4)
def _bands(
    num_bins: int, fft_size: int, sampling_rate: int
) -> tuple[tuple[int, int, tuple[float, ...]], ...]:
    """The mel filters without their zeros: mel bin, first frequency, and weights from there on."""
    filters = _mel_filters(num_bins, fft_size, sampling_rate)
    bands: list[tuple[int, int, tuple[float, ...]]] = []
    for mel_bin, weights in enumerate(filters):
        used = np.flatnonzero(weights)
        if len(used):
            first, last = int(used[0]), int(used[-1])
            bands.append((mel_bin, first, tuple(weights[first : last + 1].tolist())))
    return tuple(bands)


def _mel_filters(num_bins: int, fft_size: int, sampling_rate: int) -> NDArray[np.float64]:
    """[num_bins, fft_size // 2 + 1] float64: triangles of equal area on Slaney's scale."""
    edges = _to_hertz(np.linspace(0.0, _to_mel(_MAX_HERTZ), num_bins + 2))
    hertz = np.linspace(0, sampling_rate // 2, fft_size // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (hertz - low) / (middle - low)
    falling = (high - hertz) / (high - middle)
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))


def _to_mel(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz / _HERTZ_PER_MEL
    return _LINEAR_HERTZ / _HERTZ_PER_MEL + float(np.log(hertz / _LINEAR_HERTZ)) / _LOG_STEP


def _to_hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear_mels = _LINEAR_HERTZ / _HERTZ_PER_MEL
    logarithmic = _LINEAR_HERTZ * np.exp(_LOG_STEP * (mels - linear_mels))
    return np.where(mels < linear_mels, mels * _HERTZ_PER_MEL, logarithmic)
