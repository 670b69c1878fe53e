"""The responses of `/v1/audio/transcriptions` and `/v1/audio/translations`: as in OpenAI.

The bodies of requests are forms, not JSON; see `api/audio/form_fields.py`.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ostinato.api.base.timeline import Timeline
from ostinato.runtime.types.outputs import TranscriptionSegment

__all__ = (
    "DurationUsage",
    "InputTokenDetails",
    "TextDelta",
    "TextDone",
    "TokenUsage",
    "Transcription",
    "TranscriptionLogprob",
    "TranscriptionVerbose",
    "Translation",
    "duration_usage",
)

UNSET = msgspec.UNSET


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a response that is not a stream."""

    type: Literal["duration"] = "duration"
    seconds: float  # seconds of audio; `duration_usage` rounds them up, as OpenAI does


class InputTokenDetails(msgspec.Struct, frozen=True, kw_only=True):
    audio_tokens: int  # positions of the encoder's output, of all windows
    text_tokens: int  # tokens of the decoder's prompts, of all windows


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a stream, in its last event."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails | msgspec.UnsetType = UNSET


class TranscriptionLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability of one token of the text; with `include[]=logprobs`."""

    token: str
    bytes: list[int]
    logprob: float


class Transcription(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format=json` of a transcription."""

    text: str
    logprobs: list[TranscriptionLogprob] | msgspec.UnsetType = UNSET
    usage: DurationUsage
    trace: Timeline | msgspec.UnsetType = UNSET  # with the header x-trace: 1


class Translation(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format=json` of a translation."""

    text: str
    trace: Timeline | msgspec.UnsetType = UNSET


class TranscriptionVerbose(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format=verbose_json` of both endpoints. A translation has no usage."""

    task: Literal["transcribe", "translate"]
    language: str  # the English name in lower case; "english" for translations
    duration: float  # seconds of audio
    text: str
    segments: list[TranscriptionSegment]
    usage: DurationUsage | msgspec.UnsetType = UNSET
    trace: Timeline | msgspec.UnsetType = UNSET


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: text that follows the text before it."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str
    logprobs: list[TranscriptionLogprob] | msgspec.UnsetType = UNSET


class TextDone(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a stream, with the whole text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    logprobs: list[TranscriptionLogprob] | msgspec.UnsetType = UNSET
    usage: TokenUsage


def duration_usage(seconds: float) -> DurationUsage:
    """The usage of a response for `seconds` of audio, rounded up to whole seconds."""
    return DurationUsage(seconds=math.ceil(seconds))
