"""`prepare_sound` gives the features and the numbers of tokens of transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AudioFlamingo3Processor, Qwen2AudioProcessor

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.runtime.audio.sound_inputs import max_sound_memory, max_sound_seconds, prepare_sound
from ostinato.runtime.audio.sound_sources import GivenSamples
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.audio import PromptSound, audio_digest
from tests.api.media.sound_apps import noise, sound_spec, wav
from tests.arch.tree import ROOT
from tests.models.audio.sound_models import PLACEHOLDERS, make_sound_model
from tests.runtime.audio.audio_files import RATE, encode, tone

CONFIG = AudioConfig()
NAME = "messages: sound 1"


def prepare(content: Any, config: AudioConfig = CONFIG, **fields: Any) -> tuple[PromptSound, ...]:
    return prepare_sound(content, sound_spec(9, **fields), config, NAME)


def given(samples: Any, rate: int | None = None) -> GivenSamples:
    return GivenSamples(samples, rate)


def refused(content: Any, config: AudioConfig = CONFIG, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        prepare(content, config, **fields)
    assert str(caught.value).startswith(f"{NAME}: ")
    return caught.value


def features(window: PromptSound) -> np.ndarray:
    """[bins, frames]"""
    assert window.digest == audio_digest(window.num_bins, window.num_frames, window.features)
    assert window.begin == 0
    values = np.frombuffer(window.features, np.float32)
    return values.reshape(window.num_bins, window.num_frames)


def num_tokens(windows: tuple[PromptSound, ...]) -> list[int]:
    return [window.num_tokens for window in windows]


class Processors:
    """The processors of transformers, whose windows last 30 seconds, like those of `spec`."""

    def __init__(self, directory: Path) -> None:
        self.qwen = Qwen2AudioProcessor.from_pretrained(
            make_sound_model(directory / "qwen", "qwen2_audio")
        )
        self.flamingo = AudioFlamingo3Processor.from_pretrained(
            make_sound_model(directory / "flamingo", "audioflamingo3")
        )

    def run(self, family: str, samples: np.ndarray) -> tuple[int, np.ndarray]:
        """The number of placeholder tokens, and the features [windows, bins, frames]."""
        processor = self.qwen if family == "qwen2_audio" else self.flamingo
        found = processor(
            text=[PLACEHOLDERS[family]], audio=[samples], sampling_rate=RATE, return_tensors="pt"
        )
        count = int((found.input_ids == processor.audio_token_id).sum())
        return count, found.input_features.numpy()


def whole_spec(family: str) -> SoundSpec:
    most = 1 if family == "qwen2_audio" else 20
    return sound_spec(9, window_s=30, num_bins=128, max_windows=most)


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Processors:
    return Processors(tmp_path_factory.mktemp("processors"))


@pytest.mark.parametrize(
    ("family", "num_samples"),
    [
        *(("qwen2_audio", count) for count in (321, 480, 481, 16_000, 16_001, 100_123)),
        *(("qwen2_audio", 480_000 - short) for short in (641, 320, 161, 1, 0)),
        *(("audioflamingo3", count) for count in (641, 33_333, 480_000)),
        *(("audioflamingo3", 480_000 + more) for more in (321, 640, 16_000, 480_000, 481_234)),
    ],
)
def test_features_and_tokens_are_those_of_the_processors(
    processors: Processors, family: str, num_samples: int
):
    samples = noise(num_samples / RATE, seed=num_samples)
    windows = prepare_sound(given(samples), whole_spec(family), CONFIG, NAME)
    count, expected = processors.run(family, samples)
    assert sum(num_tokens(windows)) == count
    assert len(windows) == len(expected)
    for window, spectrogram in zip(windows, expected, strict=True):
        found = features(window)
        assert found.shape[1] // 4 == window.num_tokens
        np.testing.assert_allclose(found, spectrogram[:, : found.shape[1]], rtol=0, atol=1e-4)
    assert all(window.num_frames == 3000 for window in windows[:-1])


@pytest.mark.parametrize("num_samples", [480_001, 480_160, 480_320])
def test_a_last_window_without_an_embedding_is_left_out(processors: Processors, num_samples: int):
    """transformers gives it no placeholder token either."""
    samples = noise(num_samples / RATE)
    windows = prepare_sound(given(samples), whole_spec("audioflamingo3"), CONFIG, NAME)
    count, expected = processors.run("audioflamingo3", samples)
    assert (num_tokens(windows), count, len(expected)) == ([750], 750, 2)


def test_the_frames_are_those_that_the_states_read():
    """State n of the encoder reads the frames 2n to 2n + 2."""
    samples = noise(1.0)
    for num_samples in [*range(1, 16_001, 97), 16_000]:
        num_heard = -(-num_samples // 160)
        states = [state for state in range(50) if 2 * state < num_heard]
        if len(states) < 2:
            assert refused(given(samples[:num_samples])).code == "invalid_audio"
            continue
        (window,) = prepare(given(samples[:num_samples]))
        assert window.num_tokens == len(states) // 2
        assert window.num_frames == min(100, 2 * states[-1] + 3)
        assert window.num_frames // 2 == len(states)


def test_windows_are_cut_exactly():
    samples = noise(2.5)
    windows = prepare(given(samples))
    assert num_tokens(windows) == [25, 25, 12]
    parts = [samples[:RATE], samples[RATE : 2 * RATE], samples[2 * RATE :]]
    assert windows == tuple(one for part in parts for one in prepare(given(part)))
    assert len({window.digest for window in windows}) == 3


def test_all_forms_of_a_sound(tmp_path: Path):
    samples = noise(1.3)
    (tmp_path / "a.wav").write_bytes(wav(1.3))
    (tmp_path / "b.mp3").write_bytes(encode(samples, RATE, "flac", "flac"))
    expected = prepare(wav(1.3))
    for content in (
        encode(samples, RATE, "flac", "flac"),
        tmp_path / "a.wav",
        tmp_path / "b.mp3",  # the bytes decide the format
        given(samples),
        given(samples, RATE),
        given((samples * 32768).astype(np.int16)),
        given(np.stack([samples, samples]), RATE),
        given(np.stack([samples, samples], axis=1), RATE),
    ):
        assert prepare(content) == expected
    for found in (prepare(wav(1.4)), prepare(wav(1.3, seed=1)), prepare(given(samples, 15_000))):
        assert found != expected


@pytest.mark.parametrize("container", ["wav", "mp3", "adts", "ipod"])
def test_the_longest_sound(container: str):
    """The silence that encoders add is cut off."""
    codec = {"wav": "pcm_s16le", "mp3": "libmp3lame"}.get(container, "aac")
    windows = prepare(encode(tone(3.0, 44_100), 44_100, container, codec))
    assert num_tokens(windows) == [25, 25, 25]
    error = refused(encode(tone(3.3, 44_100), 44_100, container, codec))
    assert error.code == "audio_too_long"
    assert "longer than the 3 s that the model takes at once; send it in parts" in str(error)


def test_the_longest_samples():
    assert num_tokens(prepare(given(noise(3.0)))) == [25, 25, 25]
    assert len(prepare(given(tone(3.0, 11_025), 11_025))) == 3
    error = refused(given(noise(3.001)))
    assert error.code == "audio_too_long"
    assert "longer than the 3 s that the model takes at once" in str(error)
    error = refused(given(noise(2.5)), AudioConfig(max_seconds=2))
    assert "longer than the 2 s that are allowed (audio.max_seconds)" in str(error)
    # Many samples in a short time are no long sound.
    channels = np.stack([noise(1.0)] * 8)
    assert len(prepare(given(channels, RATE))) == 1


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        (given(noise(0.02)), "invalid_audio", "is 20 ms long, and the model takes audio of more"),
        (given(noise(1 / RATE)), "invalid_audio", "0.0625 ms long"),
        (wav(0.0199), "invalid_audio", "more than 20 ms; send a longer one"),
        (given(noise(1.0), 999), "invalid_audio", "the sampling rate is 999 Hz"),
        (given(noise(1.0), 0), "invalid_audio", "the sampling rate is 0 Hz"),
        (given(np.full(9000, np.nan, np.float32)), "invalid_audio", "no finite numbers"),
        (given(np.zeros((2, 2, 9))), "invalid_audio", "shape [2, 2, 9]"),
        (given(np.zeros(0)), "invalid_audio", "not be empty"),
        (b"", "invalid_audio", "the file is empty"),
        (b"no sound at all", "invalid_audio", "cannot be read as audio"),
        (wav(3.0)[:-40_000], "invalid_audio", "damaged or cut short"),
        (Path("/nowhere/a.wav"), "invalid_audio", "cannot be read"),
    ],
)
def test_what_is_refused(content: Any, code: str, text: str):
    error = refused(content)
    assert (error.code, text in str(error)) == (code, True), str(error)


def test_files_that_are_too_large(tmp_path: Path):
    (tmp_path / "a.wav").write_bytes(wav(1.0))
    small = AudioConfig(max_mib=0.01)
    for content in (wav(1.0), tmp_path / "a.wav"):
        error = refused(content, small)
        assert (error.code, "audio.max_mib" in str(error)) == ("audio_too_large", True)


def test_a_missing_package_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch):
    expected = prepare(given(noise(1.0)))
    monkeypatch.setattr("ostinato.runtime.media_files.pyav.find_spec", lambda name: None)
    error = refused(wav(1.0))
    assert error.code == "missing_package"
    assert "or give an array of samples with its rate" in str(error)
    error = refused(given(noise(1.0), 8000))
    assert "or give samples of 16000 Hz" in str(error)
    assert prepare(given(noise(1.0), RATE)) == expected


def test_the_seconds_of_the_longest_sound():
    spec = sound_spec(9, window_s=30, max_windows=20)
    assert max_sound_seconds(spec, CONFIG) == 600
    assert max_sound_seconds(spec, AudioConfig(max_seconds=7.5)) == 7.5


def test_the_memory_is_that_which_is_stated():
    """In a process of its own, whose largest memory is measured."""
    data = encode(np.tile(tone(10.0, 24_000), 60), 24_000)
    script = (
        "import resource, sys\n"
        "from ostinato.conf.sections.audio_schema import AudioConfig\n"
        "from ostinato.runtime.audio.audio_inputs import preload_audio\n"
        "from ostinato.runtime.audio.sound_inputs import *\n"
        "from tests.api.media.sound_apps import sound_spec\n"
        "preload_audio()\n"
        "data = sys.stdin.buffer.read()\n"
        "spec = sound_spec(9, window_s=30, num_bins=128, max_windows=20)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "windows = prepare_sound(data, spec, AudioConfig(max_mib=30), 'sound 1')\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(sum(one.num_tokens for one in windows), (after - before) * 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=data, capture_output=True, check=True, cwd=ROOT
    )
    tokens, grown = map(int, done.stdout.split())
    assert tokens == 15_000
    spec = sound_spec(9, window_s=30, num_bins=128, max_windows=20)
    assert grown < max_sound_memory(spec, CONFIG, 0)


def test_importing_the_module_imports_neither_numpy_nor_pyav():
    script = (
        "import sys, ostinato.runtime.audio.sound_inputs\n"
        "print({'numpy', 'av', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == b"set()"
