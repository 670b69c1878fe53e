"""Prepares audio that a Python program gives: arrays, the bytes of files, and paths."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.runtime.audio.audio_inputs import (
    PreparedAudio,
    package_is_there,
    prepare_audio,
    prepare_samples,
    read_audio_file,
)
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.audio import PromptAudio

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = (
    "AudioInput",
    "AudioSamples",
    "audio_list",
    "prepare_input",
    "prepare_one_window",
    "sample_array",
    "sample_pair",
)

AudioSamples = tuple[Any, int]
"""Samples of NumPy or torch, [n], [n, channels] or [channels, n], and the sampling rate in Hz."""

AudioInput = str | os.PathLike[str] | bytes | AudioSamples
"""A path, the bytes of a file, or samples."""


def audio_list(audio: AudioInput | Sequence[AudioInput]) -> list[AudioInput]:
    """A list of audio as it is. A single audio becomes a list of one."""
    return list(cast("list[AudioInput]", audio)) if isinstance(audio, list) else [audio]  # type: ignore[list-item]


def prepare_input(
    audio: AudioInput, spec: AudioSpec, config: AudioConfig, *, param: str
) -> PreparedAudio:
    """The windows of audio of any length.

    Args:
        audio: a path, the bytes of a file, or samples with their rate.
        spec: how the model takes audio.
        config: the limits.
        param: the name of the audio, for errors.

    Raises:
        InvalidRequestError: the audio has another type, cannot be read, or is above a limit. Or
            PyAV, which decodes it, is not installed.
    """
    if isinstance(audio, str | os.PathLike):
        audio = read_audio_file(Path(audio), config, param)
    if isinstance(audio, bytes | bytearray | memoryview):
        with package_is_there(param, "an array of samples with its rate"):
            return prepare_audio(bytes(audio), spec, config, param=param)
    samples, rate = sample_pair(audio, param, "a path, the bytes of a file, or ")
    with package_is_there(param, f"samples of {spec.sampling_rate} Hz"):
        return prepare_samples(samples, rate, spec, config, param=param)


def prepare_one_window(
    audio: object, spec: AudioSpec, config: AudioConfig, *, param: str
) -> PromptAudio:
    """The audio of a prompt, which has at most one window.

    Args:
        audio: `AudioSamples`.
        spec: how the model takes audio.
        config: the limits.
        param: the name of the audio, for errors.

    Raises:
        InvalidRequestError: see `prepare_input`; or the audio is longer than one window.
    """
    samples, rate = sample_pair(audio, param, "")
    # [n, channels] and [channels, n] have more samples than channels.
    seconds = max(samples.shape, default=0) / max(1, rate)
    if seconds > spec.window_s:
        raise InvalidRequestError(
            f"{param}: the audio is {seconds:.1f} s long, and a prompt takes at most one window of"
            f" {spec.window_s} s; use LLM.transcribe, which cuts it into windows",
            param=param,
            code="audio_too_long",
        )
    with package_is_there(param, f"samples of {spec.sampling_rate} Hz"):
        return prepare_samples(samples, rate, spec, config, param=param).windows[0].audio


def sample_pair(audio: object, param: str, others: str) -> tuple[NDArray[Any], int]:
    """The array of `AudioSamples`, and its rate.

    Args:
        audio: what the caller gave.
        param: its name.
        others: what else is allowed, for errors.

    Raises:
        InvalidRequestError: it is something else.
    """
    import numpy as np

    pair = cast("tuple[Any, ...]", audio) if isinstance(audio, tuple) else ()
    if len(pair) == 2:
        array, rate = sample_array(pair[0]), pair[1]
        is_number = isinstance(rate, int | float | np.integer) and rate % 1 == 0
        if array is not None and is_number:
            return array, int(rate)
    raise InvalidRequestError(
        f"{param} must be {others}(samples, sampling_rate): an array of NumPy or torch, and its"
        f" rate in Hz, a whole number; got {reprlib.repr(audio)}",
        param=param,
        code="invalid_audio",
    )


def sample_array(value: object) -> NDArray[Any] | None:
    """An array of NumPy or torch as one of NumPy; None = it is neither."""
    import numpy as np

    if hasattr(value, "detach"):  # a tensor of torch, which this module does not import
        tensor: Any = cast("Any", value).detach().cpu()
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return cast("NDArray[Any]", value) if isinstance(value, np.ndarray) else None
