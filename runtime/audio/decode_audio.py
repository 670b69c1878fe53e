"""Decodes an audio file into samples of one channel.

The bytes come from clients. So only formats are read whose files contain all their data: a playlist
names other files and URLs, which FFmpeg would open. Only decoders of audio are started. The limits
are checked while the file is decoded, because the lengths in its header can be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.pyav import error_text, import_av, open_media

__all__ = ("AudioLimits", "DecodedAudio", "decode_audio", "mix_samples")

_PADDING_S = 0.2
"""Seconds of silence that encoders of mp3 and aac add, of which the file need not say so."""

Samples = NDArray[np.float32]

_MIN_RATE, _MAX_RATE = 1_000, 384_000  # Hz
_MAX_CHANNELS = 32
_VALUES_PER_SECOND = 2 * 48_000  # samples of all channels, on average over the longest file
_MAX_BAD = 0.1  # packets that cannot be decoded, as a part of all packets
_BLOCK = 1 << 17  # values that are mixed and resampled at a time
_UNKNOWN_SIZE = 0x7FFF_0000  # bytes of a wav file
_CUT_SHORT_S = 1.0  # a file that is shorter than its header says by more than this was cut short
_FORMAT_NAMES = "wav, flac, mp3, ogg, m4a, mp4, webm, aac"
# FFmpeg's demuxers. Some names stand for one demuxer. None of them opens another file.
_DEMUXERS = "wav,flac,mp3,ogg,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac"
_DECODERS = (
    *("aac", "aac_fixed", "aac_latm", "alac", "flac", "opus", "libopus", "vorbis", "libvorbis"),
    *("mp3", "mp3float", "mp2", "mp2float", "mp1", "mp1float"),
    *("pcm_u8", "pcm_s8", "pcm_alaw", "pcm_mulaw", "adpcm_ms", "adpcm_ima_wav"),
    *(
        f"pcm_{kind}{order}"
        for kind in ("s16", "s24", "s32", "f32", "f64")
        for order in ("le", "be")
    ),
)
# The value of FFmpeg's integer samples at full scale, and at silence.
_SCALES = {
    "u8": (128.0, 128.0),
    "s16": (32768.0, 0.0),
    "s32": (2.0**31, 0.0),
    "s64": (2.0**63, 0.0),
}


class AudioLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one audio file."""

    max_bytes: int  # of the encoded file
    max_seconds: float  # of the decoded audio: `audio.max_seconds`
    # Of the decoded audio: the most that the model takes. A file can have `_PADDING_S` more.
    model_seconds: float = math.inf


class DecodedAudio(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one channel."""

    samples: Any  # [n] float32, of which 1.0 is full scale
    seconds: float  # before the sampling rate was changed


def decode_audio(
    data: bytes, sampling_rate: int, limits: AudioLimits, *, param: str = "file"
) -> DecodedAudio:
    """Decode the first audio stream of a file.

    The channels are averaged. At its peak, the memory is about 8 bytes for each sample at
    `sampling_rate`, and 4 MiB.

    Args:
        data: a file of a format in the error's list, with or without video, which is skipped.
        sampling_rate: of the result, in Hz.
        limits: a larger file is refused before it is opened, a longer one while it is decoded.
        param: the field that has the file, for errors.

    Raises:
        InvalidRequestError: the code is `audio_too_large`, `audio_too_long`, or `invalid_audio`:
            the file is empty, of another format, damaged, cut short, or has no audio.
        StartupError: PyAV is not installed.
    """
    av = import_av()
    if len(data) > limits.max_bytes:
        raise InvalidRequestError(
            f"{param}: the file has {len(data)} bytes, but at most {limits.max_bytes} are allowed"
            " (audio.max_mib); send a smaller file, such as mp3 or ogg, or a part of it",
            param=param,
            code="audio_too_large",
        )
    if not data:
        raise _refusal(param, f"the file is empty; send a file of audio ({_FORMAT_NAMES})")
    mixer = _Mixer(sampling_rate, limits, _PADDING_S, param)
    try:
        with open_media(data, _DEMUXERS, _DECODERS) as container:
            if not container.streams.audio:
                raise _refusal(param, "the file has no audio stream; send a file with sound")
            _decode_stream(container, data, mixer, param)
    except av.error.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        if not mixer.seconds:
            raise _refusal(
                param,
                f"the file cannot be read as audio ({error_text(error)}); supported formats: "
                f"{_FORMAT_NAMES}; the file may be damaged or cut short",
            ) from error
        raise _damaged(param, mixer.seconds, error_text(error)) from error
    return mixer.finish()


def mix_samples(
    samples: NDArray[Any], rate: int, sampling_rate: int, limits: AudioLimits, *, param: str
) -> DecodedAudio:
    """Average the channels of an array and change its sampling rate.

    Args:
        samples: [n], or [n, channels] or [channels, n], of which the shorter axis is that of the
            channels. Floats have 1.0 as full scale; uint8, int16 and int32 have the scale of wav.
        rate: of the samples, in Hz.
        sampling_rate: of the result, in Hz.
        limits: longer audio is refused; `max_bytes` has no effect.
        param: the field that has the samples, for errors.

    Raises:
        InvalidRequestError: the code is `audio_too_long` or `invalid_audio`.
        StartupError: PyAV is not installed.
    """
    if samples.ndim not in (1, 2) or not samples.size:
        raise _refusal(
            param,
            f"the array has the shape {list(samples.shape)}; it must be [samples] or "
            "[samples, channels], and not be empty",
        )
    scale = {"u1": "u8", "i2": "s16", "i4": "s32"}.get(samples.dtype.str[1:])
    if scale is None and samples.dtype.kind != "f":
        raise _refusal(
            param, f"the array is of {samples.dtype}; it must be of floats, int16, int32 or uint8"
        )
    if samples.ndim == 1:
        samples = samples[None]
    elif samples.shape[0] > samples.shape[1]:
        samples = samples.T
    mixer = _Mixer(sampling_rate, limits, 0.0, param)
    mixer.check(rate, len(samples))
    if samples.shape[1] > mixer.max_seconds * rate:  # before copies of it are made
        raise mixer.too_long()
    step = _BLOCK // len(samples)
    for begin in range(0, samples.shape[1], step):
        mixer.add(samples[:, begin : begin + step], scale or "", rate)
    return mixer.finish()


def _decode_stream(container: Any, data: bytes, mixer: _Mixer, param: str) -> None:
    """Give all frames of the first audio stream to a mixer."""
    stream = container.streams.audio[0]
    context = stream.codec_context
    if context is None or context.codec.name not in _DECODERS:
        name = "unknown" if context is None else context.codec.name
        raise _refusal(
            param,
            f"the audio is encoded as {name}, which is not supported; convert it to wav, flac or"
            " mp3",
        )
    context.thread_count = 1
    for frame in _frames(container, stream, mixer, param):
        kind, num_channels = frame.format.name, frame.layout.nb_channels
        mixer.check(frame.sample_rate, num_channels)
        values = frame.to_ndarray()
        if not frame.format.is_planar and num_channels > 1:
            values = values.reshape(-1, num_channels).T
        mixer.add(values, kind.removesuffix("p"), frame.sample_rate)
    entries: Any = stream.index_entries if container.format.name.startswith("mov") else ()
    if len(entries) and entries[-1].pos + entries[-1].size > len(data):
        raise _damaged(param, mixer.seconds, "the rest of its sound is missing")
    stated = _stated_seconds(container, stream, data, mixer.seconds)
    if stated > mixer.seconds + _CUT_SHORT_S:
        raise _damaged(param, mixer.seconds, f"its header says that it has {stated:.1f} s")


def _frames(container: Any, stream: Any, mixer: _Mixer, param: str) -> Iterator[Any]:
    """The decoded frames. A few packets may be damaged, as at the begin of a cut mp3 file."""
    av = import_av()
    num_packets, num_bad = 0, 0
    reason = ""
    for packet in container.demux(stream):
        num_packets += 1
        try:
            yield from packet.decode()
        except av.error.FFmpegError as error:
            if isinstance(error, MemoryError):
                raise
            num_bad += 1
            reason = error_text(error)
    if num_bad > 1 + _MAX_BAD * num_packets:
        raise _damaged(
            param, mixer.seconds, f"{num_bad} of {num_packets} packets are damaged: {reason}"
        )


def _stated_seconds(container: Any, stream: Any, data: bytes, seconds: float) -> float:
    """The length that the header states; 0 = none, or it is not exact.

    FFmpeg estimates the lengths of mp3 and aac from bit rates. The header of ogg has none. The
    length of mp4 includes what its edit list leaves out.

    Args:
        container: the opened file.
        stream: its audio.
        data: the file.
        seconds: what was decoded.
    """
    name = container.format.name
    if name == "wav":
        return seconds * _stated_part(data)
    if name == "flac" and stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    if name == "matroska,webm" and len(container.streams) == 1:
        return (container.duration or 0) / 1e6
    return 0.0


def _stated_part(data: bytes) -> float:
    """How many times the samples of a wav file its header states; 0 if it states none."""
    begin = 12  # after RIFF, the size, and WAVE
    while begin + 8 <= len(data):
        size = int.from_bytes(data[begin + 4 : begin + 8], "little")
        begin += 8
        if data[begin - 8 : begin - 4] == b"data":
            # Programs that write to a pipe state the largest size, or one close to it.
            return size / max(1, len(data) - begin) if size < _UNKNOWN_SIZE else 0.0
        begin += size + size % 2
    return 0.0


class _Mixer:
    """Collects samples of one channel, and changes their sampling rate.

    Args:
        sampling_rate: of the result, in Hz.
        limits: longer audio is refused.
        padding_s: seconds that the audio can have above `model_seconds`.
        param: the field that has the audio, for errors.

    Attributes:
        max_seconds: of the longest audio.
    """

    def __init__(
        self, sampling_rate: int, limits: AudioLimits, padding_s: float, param: str
    ) -> None:
        self._seconds = 0.0  # of the samples before those of `_rate`
        self._num_samples = 0  # of `_rate`
        self._num_values = 0  # samples of all channels and rates
        self._sampling_rate = sampling_rate
        self._limits = limits
        self.max_seconds = min(limits.max_seconds, limits.model_seconds + padding_s)
        self._param = param
        self._rate = 0  # of the samples that came last
        # Samples that the resampler has not had, all of one format and number of channels. They are
        # mixed in blocks, because each call of NumPy and of the resampler costs time.
        self._waiting: list[NDArray[Any]] = []
        self._waiting_kind = ("", 0)
        self._num_waiting = 0  # values of all channels
        self._resampler: Any = None
        self._position = 0  # of the resampler's input
        self._done: list[Samples] = []

    @property
    def seconds(self) -> float:
        """The length of what was added."""
        return self._seconds + (self._num_samples / self._rate if self._rate else 0.0)

    def check(self, rate: int, num_channels: int) -> None:
        """Refuse rates and numbers of channels that no recording has."""
        if not _MIN_RATE <= rate <= _MAX_RATE:
            raise _refusal(
                self._param,
                f"the sampling rate is {rate} Hz; it must be from {_MIN_RATE} to {_MAX_RATE} Hz;"
                " convert the audio",
            )
        if not 1 <= num_channels <= _MAX_CHANNELS:
            raise _refusal(
                self._param,
                f"the audio has {num_channels} channels; it must have from 1 to {_MAX_CHANNELS};"
                " convert it to one channel",
            )

    def add(self, values: NDArray[Any], kind: str, rate: int) -> None:
        """Add samples, whose format, rate and channels may differ from those of the ones before.

        Args:
            values: [channels, n].
            kind: the format, as `_to_floats` takes it.
            rate: in Hz.
        """
        if rate != self._rate:
            self._flush()
            self._seconds, self._num_samples, self._rate = self.seconds, 0, rate
        if self._waiting_kind != (kind, len(values)):
            self._resample()
            self._waiting_kind = (kind, len(values))
        self._num_samples += values.shape[1]
        self._num_values += values.size
        if self.seconds > self.max_seconds:
            raise self.too_long()
        if self._num_values > self._limits.max_seconds * _VALUES_PER_SECOND:
            raise self._too_fine(rate, len(values))
        self._waiting.append(values)
        self._num_waiting += values.size
        if self._num_waiting >= _BLOCK:
            self._resample()

    def finish(self) -> DecodedAudio:
        """All samples.

        Raises:
            InvalidRequestError: there are none, or some are not finite.
        """
        self._flush()
        samples = np.concatenate(self._done) if self._done else np.empty(0, np.float32)
        self._done.clear()
        if not len(samples):
            raise _refusal(self._param, "the audio is 0 s long; send audio with samples")
        if not np.isfinite(samples).all():
            raise _refusal(
                self._param, "the audio has samples that are no finite numbers; encode it again"
            )
        return DecodedAudio(samples=samples, seconds=self.seconds)

    def too_long(self) -> InvalidRequestError:
        """The error for audio that is longer than `max_seconds`."""
        most, limit = self._limits.max_seconds, "are allowed (audio.max_seconds)"
        if self.max_seconds < most:
            most, limit = self._limits.model_seconds, "the model takes at once"
        return InvalidRequestError(
            f"{self._param}: the audio is longer than the {most:g} s that {limit}; send it in"
            " parts",
            param=self._param,
            code="audio_too_long",
        )

    def _too_fine(self, rate: int, num_channels: int) -> InvalidRequestError:
        """The error for audio that has more samples than stereo of the longest length."""
        seconds = self._limits.max_seconds * _VALUES_PER_SECOND / (rate * num_channels)
        return InvalidRequestError(
            f"{self._param}: audio of {num_channels} channels at {rate} Hz can be {seconds:.0f} s "
            "long (audio.max_seconds holds for two channels at 48000 Hz); convert it to one channel"
            f" at {self._sampling_rate} Hz",
            param=self._param,
            code="audio_too_long",
        )

    def _resample(self) -> None:
        if not self._waiting:
            return
        floats = _to_floats(np.concatenate(self._waiting, axis=1), self._waiting_kind[0])
        block = floats[0] if len(floats) == 1 else floats.mean(axis=0)
        self._waiting.clear()
        self._num_waiting = 0
        if self._rate == self._sampling_rate:
            self._done.append(block)
            return
        av = import_av()
        if self._resampler is None:
            self._position = 0
            self._resampler = av.AudioResampler(
                format="flt", layout="mono", rate=self._sampling_rate
            )
        frame = av.AudioFrame.from_ndarray(block[None], format="flt", layout="mono")
        frame.sample_rate = self._rate
        frame.time_base = Fraction(1, self._rate)
        frame.pts = self._position
        self._position += len(block)
        self._take(self._resampler.resample(frame))

    def _flush(self) -> None:
        """Give the resampler all samples, and take its last ones."""
        self._resample()
        if self._resampler is not None:
            self._take(self._resampler.resample(None))
            self._resampler = None

    def _take(self, frames: list[Any]) -> None:
        self._done += [frame.to_ndarray()[0] for frame in frames]


def _to_floats(values: NDArray[Any], kind: str) -> Samples:
    """Samples as float32, of which 1.0 is full scale.

    Args:
        values: of any shape.
        kind: FFmpeg's name of the format without a suffix for planes.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # such samples are refused later
        if kind not in _SCALES:
            return values.astype(np.float32)
        scale, silence = _SCALES[kind]
        floats = values.astype(np.float64 if values.dtype.itemsize > 2 else np.float32)
        return ((floats - silence) / scale).astype(np.float32)


def _damaged(param: str, seconds: float, reason: str) -> InvalidRequestError:
    return _refusal(
        param,
        f"the file is damaged or cut short after {seconds:.1f} s ({reason}); send the whole file",
    )


def _refusal(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {message}", param=param, code="invalid_audio")
