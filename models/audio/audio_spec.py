"""How a model takes audio that it transcribes.

The process that prepares a request decodes the audio, cuts it into windows and computes a log-mel
spectrogram of each window (runtime/audio). The engine computes the states of the encoder, and the
keys and values of cross attention. This module imports no torch.
"""

from __future__ import annotations

from ostinato.models.audio.mel_spec import MelSpec

__all__ = ("AudioSpec",)


class AudioSpec(MelSpec, frozen=True, kw_only=True):
    """How Whisper (arXiv:2212.04356) takes audio: spectrograms, and tokens of prompts."""

    start_id: int  # <|startoftranscript|>
    end_id: int  # <|endoftext|>
    no_timestamps_id: int  # <|notimestamps|>
    first_timestamp_id: int  # <|0.00|>; later timestamps have the ids after it
    # Language code (such as "en") -> token. Empty = an English model, whose prompts have neither a
    # language nor a task.
    languages: dict[str, int] = {}  # noqa: RUF012 - never changed
    transcribe_id: int | None = None  # the task of writing the spoken language; None without tasks
    translate_id: int | None = None  # the task of writing English
    start_of_previous_id: int | None = None  # <|startofprev|>; None = prompts have no earlier text
    no_speech_id: int | None = None  # <|nospeech|>
    timestamp_step_s: float = 0.02  # seconds between successive timestamps
    # The first timestamp of a window is at most this many steps; None = any.
    max_initial_timestamp: int | None = None
    suppressed: tuple[int, ...] = ()  # tokens that are never written
    suppressed_first: tuple[int, ...] = ()  # tokens that are not written first
