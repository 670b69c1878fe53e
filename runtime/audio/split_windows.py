"""Cuts audio into windows at quiet places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ("split_windows",)


def split_windows(
    samples: NDArray[np.float32], sampling_rate: int, window_s: int
) -> list[tuple[int, int]]:
    """Cut audio into windows of at most `window_s`.

    A cut lies in the last second of its window, in the middle of the 100 ms with the least energy.
    Of equal places, it is the last one.

    Args:
        samples: [n] float32, at least one.
        sampling_rate: in Hz.
        window_s: seconds.

    Returns:
        First sample, and the sample after the last one, of each window. Every sample is in exactly
        one window, and no window is empty.
    """
    longest = window_s * sampling_rate
    windows: list[tuple[int, int]] = []
    begin = 0
    while len(samples) - begin > longest:
        end = begin + longest
        cut = end - sampling_rate + _quietest(samples[end - sampling_rate : end], sampling_rate)
        cut = max(cut, begin + 1)
        windows.append((begin, cut))
        begin = cut
    windows.append((begin, len(samples)))
    return windows


def _quietest(second: NDArray[np.float32], sampling_rate: int) -> int:
    """The index in the middle of the quietest 100 ms."""
    length = max(1, sampling_rate // 10)
    sums = np.concatenate(([0.0], np.cumsum(np.square(second, dtype=np.float64))))
    energies = sums[length:] - sums[:-length]
    # Sums of silence differ by rounding.
    places = np.flatnonzero(energies <= energies.min() + 1e-12 * sums[-1])
    return int(places[-1]) + length // 2
