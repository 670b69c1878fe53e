"""Files of all formats give the samples back that were written into them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.runtime.audio.decode_audio import AudioLimits, decode_audio, mix_samples
from ostinato.runtime.errors import InvalidRequestError, StartupError
from tests.runtime.audio.audio_files import (
    ENCODINGS,
    RATE,
    encode,
    tone,
    video_with_sound,
)

LIMITS = AudioLimits(max_bytes=1 << 24, max_seconds=60)


def decoded(data: bytes) -> NDArray[np.float32]:
    found = decode_audio(data, RATE, LIMITS)
    assert found.samples.dtype == np.float32
    assert abs(len(found.samples) / RATE - found.seconds) < 2 / RATE
    return found.samples


def error(samples: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The root of the mean square of the difference, without the ends, where codecs ring."""
    length = min(len(samples), len(expected))
    assert length > 2 * 800
    difference = samples[800 : length - 800] - expected[800 : length - 800]
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


@pytest.mark.parametrize("num_channels", [1, 2])
@pytest.mark.parametrize("name", ENCODINGS)
def test_samples_come_back_at_the_rate_of_the_model(name: str, num_channels: int):
    encoding = ENCODINGS[name]
    written = tone(3.0, 44_100)
    if num_channels == 2:  # the average of the channels is the tone
        written = np.stack([1.5 * written, 0.5 * written], axis=1)
    data = encode(written, 44_100, encoding.container, encoding.codec)
    samples = decoded(data)
    begin = round(encoding.delay_s * RATE)
    assert 3.0 * RATE <= len(samples) <= 3.06 * RATE
    assert error(samples[begin:], tone(3.0)) < encoding.tolerance


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 48_000, 96_000, 192_000])
def test_every_rate_is_changed_to_that_of_the_model(rate: int):
    samples = decoded(encode(tone(2.0, rate), rate, "wav", "pcm_f32le"))
    assert len(samples) == 2 * RATE
    assert error(samples, tone(2.0)) < 1e-3


def test_samples_at_the_rate_of_the_model_are_not_changed():
    written = tone(2.5)
    assert (decoded(encode(written, RATE, "wav", "pcm_f32le")) == written).all()
    whole = np.round(written * 32768).clip(-32768, 32767).astype(np.int16)
    assert (decoded(encode(written, RATE)) == whole / np.float32(32768)).all()


def test_the_channels_are_averaged():
    generator = np.random.default_rng(0)
    channels = generator.uniform(-1, 1, (RATE, 6)).astype(np.float32)
    samples = decoded(encode(channels, RATE, "wav", "pcm_f32le"))
    np.testing.assert_allclose(samples, channels.mean(axis=1), atol=1e-6)


def test_full_scale_is_one():
    square = np.sign(tone(1.0)).astype(np.float32)
    for codec, step in (("pcm_u8", 2**-7), ("pcm_s16le", 2**-15), ("pcm_s24le", 2**-23)):
        samples = decoded(encode(square, RATE, "wav", codec))
        assert samples.min() == -1
        assert 1 - step <= samples.max() <= 1


def test_the_sound_of_a_video_is_decoded():
    samples = decoded(video_with_sound(tone(2.0, 44_100)))
    assert error(samples, tone(2.0)) < 1e-2


def test_vorbis():
    stereo = np.stack([tone(3.0, 44_100)] * 2, axis=1)
    data = encode(stereo, 44_100, "ogg", "vorbis", options={"strict": "experimental"})
    assert error(decoded(data), tone(3.0)) < 0.1  # the encoder of FFmpeg is a rough one


def test_a_rate_that_changes_within_a_file():
    """Two files of mp3 after each other are one file of mp3."""
    parts = [encode(tone(2.0, rate), rate, "mp3", "libmp3lame") for rate in (44_100, 22_050)]
    samples = decoded(b"".join(parts))
    assert abs(len(samples) - 4 * RATE) < 0.2 * RATE
    assert error(samples[: 2 * RATE], tone(2.0)) < 2e-2
    assert np.abs(samples[3 * RATE :]).max() > 0.3


def test_lengths_are_not_limited_by_the_header():
    """Programs that write to a pipe do not know the length, and state the largest one."""
    data = bytearray(encode(tone(2.0), RATE))
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff\xff\xff\xff"
    data[4:8] = b"\xff\xff\xff\xff"
    assert len(decoded(bytes(data))) == 2 * RATE


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u1", "i2", "i4", ">f4", ">i2"])
@pytest.mark.parametrize("shape", ["mono", "samples first", "channels first"])
def test_arrays_of_samples(dtype: str, shape: str):
    values = tone(2.0, 44_100)
    scaled = {
        "u1": values * 128 + 128, "i2": values * 2**15, "i4": values.astype(float) * 2**31,
    }.get(dtype[-2:], values)  # fmt: skip
    array = scaled.astype(dtype)
    if shape != "mono":
        array = np.stack([array, array], axis=1 if shape == "samples first" else 0)
    found = mix_samples(array, 44_100, RATE, LIMITS, param="audio")
    assert found.seconds == 2.0
    assert len(found.samples) == 2 * RATE
    assert error(found.samples, tone(2.0)) < (2e-2 if dtype == "u1" else 1e-3)


def test_an_array_gives_what_its_file_gives():
    values = tone(9.3, 22_050)
    found = mix_samples(values, 22_050, RATE, LIMITS, param="audio").samples
    np.testing.assert_allclose(
        found, decoded(encode(values, 22_050, "wav", "pcm_f32le")), atol=1e-6
    )


@pytest.mark.parametrize(
    ("array", "rate", "message"),
    [
        (np.zeros(0, np.float32), RATE, r"the array has the shape \[0\]"),
        (np.zeros((2, 2, 2), np.float32), RATE, "must be .samples. or .samples, channels."),
        (np.zeros(9, np.complex64), RATE, "the array is of complex64"),
        (np.zeros(9, np.int64), RATE, "the array is of int64"),
        (np.zeros((99, 50), np.float32), RATE, "has 50 channels; it must have from 1 to 32"),
        (np.zeros(9, np.float32), 10, "the sampling rate is 10 Hz; it must be from 1000"),
        (np.full(99, np.nan, np.float32), RATE, "no finite numbers"),
        (np.full(99, 1e300), 44_100, "no finite numbers"),
        (np.zeros(61 * RATE, np.int16), RATE, "longer than the 60 s"),
        (np.zeros((8, 800_000), np.int16), 384_000, "8 channels at 384000 Hz can be 2 s long"),
    ],
)
def test_arrays_that_are_no_audio_are_refused(array: NDArray[np.generic], rate: int, message: str):
    with pytest.raises(InvalidRequestError, match=rf"^audio: .*{message}") as caught:
        mix_samples(array, rate, RATE, LIMITS, param="audio")
    code = "audio_too_long" if "long" in message else "invalid_audio"
    assert (caught.value.param, caught.value.code) == ("audio", code)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(StartupError, match=r'pip install "ostinato\[audio\]"'):
        decode_audio(b"RIFF", RATE, LIMITS)
