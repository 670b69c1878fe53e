"""`prepare_audio` gives the windows of a file with their spectrograms."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.runtime.audio.audio_inputs import (
    max_audio_memory,
    prepare_audio,
    prepare_samples,
)
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.media_kinds import most_bytes
from ostinato.runtime.types.audio import audio_digest
from tests.arch.tree import ROOT
from tests.runtime.audio.audio_files import RATE, audio_spec, encode, tone

CONFIG = AudioConfig()


@pytest.mark.parametrize("num_bins", [80, 128])
def test_each_window_has_the_spectrogram_of_its_samples(num_bins: int):
    samples = tone(70.0)
    data = encode(samples, RATE, "wav", "pcm_f32le")
    prepared = prepare_audio(data, audio_spec(num_bins=num_bins), CONFIG)
    assert prepared.seconds == 70.0
    assert [window.begin_s for window in prepared.windows[1:]] == [
        window.end_s for window in prepared.windows[:-1]
    ]
    assert (prepared.windows[0].begin_s, prepared.windows[-1].end_s) == (0.0, 70.0)
    assert len(prepared.windows) == 3
    extractor = WhisperFeatureExtractor(feature_size=num_bins)
    for window in prepared.windows:
        audio = window.audio
        part = samples[round(window.begin_s * RATE) : round(window.end_s * RATE)]
        expected = extractor(part, sampling_rate=RATE, return_tensors="np").input_features[0]
        found = np.frombuffer(audio.features, np.float32).reshape(audio.num_bins, audio.num_frames)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        assert audio.digest == audio_digest(num_bins, 3000, audio.features)
    assert len({window.audio.digest for window in prepared.windows}) == 3


def test_samples_give_what_their_file_gives():
    samples = tone(35.0)
    spec = audio_spec()
    data = encode(samples, RATE, "wav", "pcm_f32le")
    assert prepare_samples(samples, RATE, spec, CONFIG) == prepare_audio(data, spec, CONFIG)


def test_equal_audio_has_equal_digests():
    samples = tone(5.0)
    files = [encode(samples, RATE, *kind) for kind in (("wav", "pcm_s16le"), ("flac", "flac"))]
    assert files[0] != files[1]
    digests = {
        prepare_audio(data, audio_spec(), CONFIG).windows[0].audio.digest
        for data in [*files, files[0]]
    }
    assert len(digests) == 1
    other = prepare_audio(encode(tone(5.0, hertz=450), RATE), audio_spec(), CONFIG)
    assert other.windows[0].audio.digest not in digests


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (AudioConfig(max_mib=0.01), "audio_too_large"),
        (AudioConfig(max_seconds=4.9), "audio_too_long"),
    ],
)
def test_the_limits_are_those_of_the_configuration(config: AudioConfig, code: str):
    data = encode(tone(5.0), RATE)
    assert prepare_audio(data, audio_spec(), CONFIG).seconds == 5.0
    with pytest.raises(InvalidRequestError) as caught:
        prepare_audio(data, audio_spec(), config, param="speech")
    assert (caught.value.param, caught.value.code) == ("speech", code)
    assert most_bytes(config) == int(config.max_mib * 1024 * 1024)


def test_the_memory_is_that_which_is_stated():
    """In a process of its own, whose largest memory is measured."""
    config = AudioConfig(max_seconds=600)
    data = encode(np.tile(tone(10.0, 44_100), 60), 44_100, "ogg", "libopus")
    script = (
        "import resource, sys\n"
        "from ostinato.conf.sections.audio_schema import AudioConfig\n"
        "from ostinato.runtime.audio.audio_inputs import *\n"
        "from tests.runtime.audio.audio_files import audio_spec\n"
        "preload_audio()\n"
        "data = sys.stdin.buffer.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "prepared = prepare_audio(data, audio_spec(), AudioConfig(max_seconds=600.1))\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(prepared.seconds, (after - before) * 1024, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=data, capture_output=True, check=True, cwd=ROOT
    )
    seconds, grown, has_torch = done.stdout.split()
    assert abs(float(seconds) - 600) < 0.1
    assert int(grown) < max_audio_memory(audio_spec(), config)
    assert has_torch == b"False"


def test_importing_the_module_imports_neither_numpy_nor_pyav():
    script = (
        "import sys, ostinato.runtime.audio.audio_inputs\n"
        "print({'numpy', 'av', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == b"set()"
