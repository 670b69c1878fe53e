"""Prepares audio for the engine: the windows of a file, each with its log-mel spectrogram."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.media_files.media_kinds import most_bytes
from ostinato.runtime.types.audio import PromptAudio, audio_digest

if TYPE_CHECKING:  # the API process imports this module, and NumPy in its forks only
    from numpy.typing import NDArray

    from ostinato.runtime.audio.decode_audio import AudioLimits, DecodedAudio

__all__ = (
    "CODE_BYTES",
    "AudioWindow",
    "PreparedAudio",
    "max_audio_memory",
    "package_is_there",
    "preload_audio",
    "prepare_audio",
    "prepare_samples",
    "read_audio_file",
)

CODE_BYTES = 64 << 20
"""Bytes of FFmpeg's buffers, and of arrays of one window."""


class AudioWindow(msgspec.Struct, frozen=True):
    """A part of a file that the model transcribes at once."""

    audio: PromptAudio
    begin_s: float  # seconds from the begin of the file
    end_s: float


class PreparedAudio(msgspec.Struct, frozen=True):
    """A file in windows."""

    windows: list[AudioWindow]  # in their order, at least one; without gaps
    seconds: float  # of the whole file


def preload_audio() -> None:
    """Import what `prepare_audio` needs, so that forks of this process share it.

    Raises:
        StartupError: PyAV is not installed.
    """
    from ostinato.runtime.audio import log_mel, split_windows  # noqa: F401 - they have NumPy
    from ostinato.runtime.media_files.pyav import import_av

    import_av()


def max_audio_memory(spec: AudioSpec, config: AudioConfig) -> int:
    """Bytes of memory that `prepare_audio` takes at most, besides its argument and the imports."""
    samples = int(config.max_seconds * spec.sampling_rate)
    # The cuts lie in the last second of a window.
    num_windows = int(config.max_seconds / max(0.5, spec.window_s - 1)) + 1
    features = 4 * spec.num_bins * spec.num_frames
    return CODE_BYTES + 8 * samples + num_windows * features


def prepare_audio(
    data: bytes, spec: AudioSpec, config: AudioConfig, *, param: str = "file"
) -> PreparedAudio:
    """Decode a file, cut it into windows, and compute their spectrograms.

    Args:
        data: the encoded file.
        spec: how the model takes audio.
        config: the limits.
        param: the field that has the file, for errors.

    Raises:
        InvalidRequestError: the code is `audio_too_large`, `audio_too_long` or `invalid_audio`.
        StartupError: PyAV is not installed.
    """
    from ostinato.runtime.audio.decode_audio import decode_audio

    return _windows(decode_audio(data, spec.sampling_rate, _limits(config), param=param), spec)


def prepare_samples(
    samples: NDArray[Any],
    sampling_rate: int,
    spec: AudioSpec,
    config: AudioConfig,
    *,
    param: str = "audio",
) -> PreparedAudio:
    """Like `prepare_audio`, from samples.

    Args:
        samples: [n], or [n, channels] or [channels, n], of which the shorter axis is that of the
            channels. Floats have 1.0 as full scale; uint8, int16 and int32 have the scale of wav.
        sampling_rate: of the samples, in Hz.
        spec: how the model takes audio.
        config: the limits.
        param: the field that has the samples, for errors.

    Raises:
        InvalidRequestError: the code is `audio_too_long` or `invalid_audio`.
        StartupError: PyAV is not installed.
    """
    from ostinato.runtime.audio.decode_audio import mix_samples

    limits = _limits(config)
    return _windows(
        mix_samples(samples, sampling_rate, spec.sampling_rate, limits, param=param), spec
    )


def _limits(config: AudioConfig) -> AudioLimits:
    from ostinato.runtime.audio.decode_audio import AudioLimits

    return AudioLimits(max_bytes=most_bytes(config), max_seconds=config.max_seconds)


def _windows(decoded: DecodedAudio, spec: AudioSpec) -> PreparedAudio:
    from ostinato.runtime.audio.log_mel import log_mel
    from ostinato.runtime.audio.split_windows import split_windows

    rate = spec.sampling_rate
    windows: list[AudioWindow] = []
    for begin, end in split_windows(decoded.samples, rate, spec.window_s):
        features = log_mel(decoded.samples[begin:end], spec)
        num_bins, num_frames = features.shape
        content = features.tobytes()
        audio = PromptAudio(
            digest=audio_digest(num_bins, num_frames, content),
            num_bins=num_bins,
            num_frames=num_frames,
            features=content,
        )
        windows.append(AudioWindow(audio=audio, begin_s=begin / rate, end_s=end / rate))
    return PreparedAudio(windows=windows, seconds=decoded.seconds)


def read_audio_file(path: Path, config: AudioConfig, param: str) -> bytes:
    """The bytes of a file.

    Args:
        path: the file.
        config: its size is limited.
        param: the name of the audio, for errors.

    Raises:
        InvalidRequestError: it cannot be read, or is too large.
    """
    limit = most_bytes(config)
    try:
        size = path.stat().st_size
        if size <= limit:
            return path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(
            f"{param}: the file {path} cannot be read ({error.strerror or error})",
            param=param,
            code="invalid_audio",
        ) from error
    raise InvalidRequestError(
        f"{param}: the file {path} has {size} bytes, but at most {limit} are allowed"
        " (audio.max_mib); set a higher limit, or give a smaller file",
        param=param,
        code="audio_too_large",
    )


@contextmanager
def package_is_there(param: str, instead: str) -> Iterator[None]:
    """A context in which a missing package is an error of the request.

    Args:
        param: the name of the audio, for errors.
        instead: what needs no package.

    Raises:
        InvalidRequestError: the package is missing. The code is `missing_package`.
    """
    try:
        yield
    except StartupError as error:
        raise InvalidRequestError(
            f"{param}: {error}; or give {instead}", param=param, code="missing_package"
        ) from error
