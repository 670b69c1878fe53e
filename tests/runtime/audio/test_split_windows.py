"""Windows have every sample once, and are cut at quiet places."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.audio.split_windows import split_windows
from tests.runtime.audio.audio_files import RATE, tone


@given(
    length=st.integers(1, 5000),
    rate=st.integers(1, 400),
    window_s=st.integers(1, 5),
    loudness=st.lists(st.floats(0, 100, width=32), min_size=1, max_size=20),
    seed=st.integers(0, 9),
)
def test_windows_have_every_sample_once(
    length: int, rate: int, window_s: int, loudness: list[float], seed: int
):
    envelope = np.repeat(loudness, -(-length // len(loudness)))[:length]
    noise = np.random.default_rng(seed).normal(size=length)
    samples = (envelope * noise).astype(np.float32)
    windows = split_windows(samples, rate, window_s)
    assert windows[0][0] == 0
    assert windows[-1][1] == length
    assert all(end == begin for (_, end), (begin, _) in pairwise(windows))
    assert all(0 < end - begin <= window_s * rate for begin, end in windows)
    # Cuts lie in the last second.
    assert all(end - begin >= (window_s - 1) * rate for begin, end in windows[:-1])


@given(
    pauses=st.lists(st.floats(29.0, 29.9), min_size=1, max_size=4),
    window_s=st.just(30),
)
def test_cuts_are_in_the_pauses(pauses: list[float], window_s: int):
    """Each pause of 100 ms lies in the last second of the window that begins at the cut before."""
    parts: list[np.ndarray] = []
    cuts: list[float] = []
    begin = 0.0
    for pause in pauses:
        parts += [tone(begin + pause - sum(len(part) for part in parts) / RATE)]
        parts += [np.zeros(RATE // 10, np.float32)]
        begin += pause + 0.05
        cuts.append(begin)
    parts.append(tone(1.5))
    windows = split_windows(np.concatenate(parts), RATE, window_s)
    found = [end / RATE for _, end in windows[:-1]]
    np.testing.assert_allclose(found, cuts, atol=0.003)


def test_of_equal_places_the_last_one_is_cut():
    for samples in (np.zeros(65 * RATE, np.float32), np.full(65 * RATE, 0.3, np.float32)):
        windows = split_windows(samples, RATE, 30)
        assert [round(end / RATE, 2) for _, end in windows] == [29.95, 59.9, 65]


def test_audio_of_one_window_is_not_cut():
    assert split_windows(tone(30.0), RATE, 30) == [(0, 30 * RATE)]
    assert split_windows(np.ones(1, np.float32), RATE, 30) == [(0, 1)]
