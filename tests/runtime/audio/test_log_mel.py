"""`log_mel` gives what `WhisperFeatureExtractor` of transformers gives."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from ostinato.runtime.audio.log_mel import log_mel
from tests.runtime.audio.audio_files import audio_spec, tone

TOLERANCE = 1e-4
LONGEST = 30 * 16_000
GENERATOR = np.random.default_rng(7)
SOUNDS = {
    "noise": GENERATOR.normal(0, 0.1, LONGEST),
    "quiet noise": GENERATOR.normal(0, 1e-5, LONGEST),
    "tone": tone(30.0),
    "chirp": np.sin(np.arange(LONGEST) ** 2 * 2e-6),
    "clicks": np.where(np.arange(LONGEST) % 5000 == 0, 1.0, 0.0),
    "silence": np.zeros(LONGEST),
    "constant": np.full(LONGEST, 0.5),
}


def reference(samples: NDArray[np.float32], **settings: int) -> NDArray[np.float32]:
    extractor = WhisperFeatureExtractor(**settings)
    features = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="np")
    return features.input_features[0]


@pytest.mark.parametrize("num_bins", [80, 128])
@pytest.mark.parametrize("name", SOUNDS)
@pytest.mark.parametrize("length", [1, 159, 16_000, 77_777, LONGEST - 300, LONGEST - 150, LONGEST])
def test_spectrograms_are_those_of_transformers(name: str, length: int, num_bins: int):
    samples = SOUNDS[name][:length].astype(np.float32)
    found = log_mel(samples, audio_spec(num_bins=num_bins))
    assert (found.shape, found.dtype) == ((num_bins, 3000), np.float32)
    expected = reference(samples, feature_size=num_bins)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")
@pytest.mark.parametrize(
    "sizes",
    [
        {"n_fft": 512},
        {"n_fft": 398},
        {"n_fft": 100},
        {"hop_length": 100},
        {"hop_length": 500},  # some samples are in no frame
        {"chunk_length": 7},
        {"feature_size": 40},
        {"sampling_rate": 8000, "hop_length": 80, "n_fft": 200},
        {"sampling_rate": 24_000},
    ],
    ids=str,
)
def test_other_sizes(sizes: dict[str, int]):
    settings = {
        "feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30,
        "n_fft": 400, **sizes,
    }  # fmt: skip
    spec = audio_spec(
        num_bins=settings["feature_size"],
        sampling_rate=settings["sampling_rate"],
        hop_size=settings["hop_length"],
        window_s=settings["chunk_length"],
        fft_size=settings["n_fft"],
    )
    longest = spec.window_s * spec.sampling_rate
    for length in (longest // 3, longest):
        samples = np.resize(SOUNDS["noise"], length).astype(np.float32)
        found = log_mel(samples, spec)
        assert found.shape == (spec.num_bins, spec.num_frames)
        np.testing.assert_allclose(found, reference(samples, **settings), rtol=0, atol=TOLERANCE)


def test_the_samples_are_not_changed():
    samples = tone(30.0)
    before = samples.copy()
    first, second = log_mel(samples, audio_spec()), log_mel(samples, audio_spec())
    assert (samples == before).all()
    assert (first == second).all()
