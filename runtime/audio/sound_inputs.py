"""Prepares one sound of a prompt for the engine: its windows, each with its log-mel spectrogram."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.models.audio.sound_spec import FRAMES_OF_STATE, STATES_OF_EMBEDDING, SoundSpec
from ostinato.runtime.audio.audio_inputs import (
    CODE_BYTES,
    package_is_there,
    read_audio_file,
)
from ostinato.runtime.audio.sound_sources import GivenSamples
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.media_kinds import most_bytes
from ostinato.runtime.types.audio import PromptSound, audio_digest

if TYPE_CHECKING:  # the API process imports this module, and NumPy in its forks only
    import numpy as np
    from numpy.typing import NDArray

__all__ = ("SoundContent", "max_sound_memory", "max_sound_seconds", "prepare_sound")

SoundContent = bytes | Path | GivenSamples
"""Encoded audio, its path, or its samples."""

# Spectrograms in the process that prepares a request. Samples are there once, of one sound.
_COPIES_OF_SPECTROGRAMS = 3


def max_sound_seconds(spec: SoundSpec, config: AudioConfig) -> float:
    """Seconds of the longest sound."""
    return min(float(spec.max_seconds), config.max_seconds)


def max_sound_memory(spec: SoundSpec, config: AudioConfig, num_rows: int) -> int:
    """Bytes of memory for the sounds of one request, besides the files and the imports.

    Args:
        spec: how the model takes sounds.
        config: the limits.
        num_rows: the most embeddings that a request can have.
    """
    samples = int((max_sound_seconds(spec, config) + 1) * spec.sampling_rate)
    num_tokens = num_rows + spec.max_tokens  # one sound is prepared before a 400
    # Of each window, a few frames are not enough for a further embedding.
    rest = FRAMES_OF_STATE * STATES_OF_EMBEDDING * config.max_per_request * spec.max_windows
    num_frames = FRAMES_OF_STATE * STATES_OF_EMBEDDING * num_tokens + rest
    return CODE_BYTES + 8 * samples + _COPIES_OF_SPECTROGRAMS * 4 * spec.num_bins * num_frames


def prepare_sound(
    content: SoundContent, spec: SoundSpec, config: AudioConfig, name: str
) -> tuple[PromptSound, ...]:
    """Decode a sound, cut it every `window_s` seconds, and compute the windows' spectrograms.

    The spectrograms and the numbers of embeddings are those of the processors of transformers. A
    last window without an embedding is left out.

    Args:
        content: the sound.
        spec: how the model takes sounds.
        config: the limits.
        name: the name of the sound in errors.

    Returns:
        The windows, with `begin` 0, at least one.

    Raises:
        InvalidRequestError: the code is `audio_too_large`, `audio_too_long`, `missing_package` if
            PyAV is needed and not installed, or `invalid_audio`, also for a sound that is too short
            for an embedding.
    """
    from ostinato.runtime.audio.decode_audio import AudioLimits, decode_audio, mix_samples

    rate = spec.sampling_rate
    limits = AudioLimits(
        max_bytes=most_bytes(config),
        max_seconds=config.max_seconds,
        model_seconds=spec.max_seconds,
    )
    if isinstance(content, GivenSamples):
        given = rate if content.rate is None else content.rate
        with package_is_there(name, f"samples of {rate} Hz"):
            decoded = mix_samples(content.samples, given, rate, limits, param=name)
    else:
        data = read_audio_file(content, config, name) if isinstance(content, Path) else content
        with package_is_there(name, "an array of samples with its rate"):
            decoded = decode_audio(data, rate, limits, param=name)
    return _windows(decoded.samples, spec, name)


def _windows(samples: NDArray[np.float32], spec: SoundSpec, name: str) -> tuple[PromptSound, ...]:
    """The windows of a sound."""
    longest = spec.window_s * spec.sampling_rate
    # Silence that an encoder has added, and samples that a resampler has.
    samples = samples[: spec.max_windows * longest]
    windows = [
        window
        for begin in range(0, len(samples), longest)
        if (window := _window(samples[begin : begin + longest], spec)) is not None
    ]
    if not windows:
        least = FRAMES_OF_STATE * (STATES_OF_EMBEDDING - 1) * spec.hop_size
        raise InvalidRequestError(
            f"{name}: the audio is {1000 * len(samples) / spec.sampling_rate:g} ms long, and the"
            f" model takes audio of more than {1000 * least / spec.sampling_rate:g} ms; send a"
            " longer one",
            param=name,
            code="invalid_audio",
        )
    return tuple(windows)


def _window(samples: NDArray[np.float32], spec: SoundSpec) -> PromptSound | None:
    """The frames of a window that have samples; None = they are too few for an embedding."""
    from ostinato.runtime.audio.log_mel import log_mel

    num_heard = min(-(-len(samples) // spec.hop_size), spec.num_frames)
    num_states = (num_heard - 1) // FRAMES_OF_STATE + 1
    num_tokens = num_states // STATES_OF_EMBEDDING
    if not num_tokens:
        return None
    # The last state reads one frame more than the states have.
    num_frames = min(FRAMES_OF_STATE * num_states + 1, spec.num_frames)
    content = log_mel(samples, spec)[:, :num_frames].tobytes()
    return PromptSound(
        digest=audio_digest(spec.num_bins, num_frames, content),
        begin=0,
        num_tokens=num_tokens,
        num_bins=spec.num_bins,
        num_frames=num_frames,
        features=content,
    )
