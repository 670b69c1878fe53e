"""Makes the segments of a transcript from the tokens that a model wrote for each window."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import msgspec

from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.runtime.types.outputs import TranscriptionSegment

__all__ = ("Decode", "WindowTranscript", "compression_ratio", "text_ids", "transcript_segments")

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens, with the space before it."""

_LOWEST = -9999.0  # JSON has no -infinity


class WindowTranscript(msgspec.Struct, frozen=True, kw_only=True):
    """What a model wrote for one window of audio."""

    token_ids: list[int]  # the output, with or without the end token
    logprobs: list[float]  # of the output's tokens, the end token included; empty = not known
    begin_s: float  # the window, in seconds from the beginning of the file
    end_s: float
    temperature: float = 0.0
    no_speech_prob: float = 0.0


class _Piece(msgspec.Struct):
    """Tokens between two timestamps, with the timestamps."""

    start_s: float
    end_s: float
    token_ids: list[int]


def text_ids(token_ids: Sequence[int], spec: AudioSpec) -> list[int]:
    """The tokens that are text: their ids are smaller than that of the end token."""
    return [token for token in token_ids if token < spec.end_id]


def compression_ratio(text: str) -> float:
    """Bytes of the text divided by its bytes after zlib, as Whisper computes it. "" has 0."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def transcript_segments(
    windows: Sequence[WindowTranscript], spec: AudioSpec, decode: Decode
) -> list[TranscriptionSegment]:
    """The segments of a file, in the order of time.

    A segment begins with a timestamp and ends with the next timestamp. Text before the first
    timestamp begins with the window. Text after the last one ends with the window. Times outside
    the window are moved to its ends, and no segment begins before the end of the one before it. So
    all text is in a segment. Tokens between two timestamps that have no text make no segment.

    Args:
        windows: the windows of the file, in the order of time.
        spec: how the model takes audio.
        decode: returns the text of tokens.
    """
    segments = list[TranscriptionSegment]()
    for window in windows:
        ratio = compression_ratio(decode(text_ids(window.token_ids, spec)).strip())
        logprobs = [max(value, _LOWEST) for value in window.logprobs]
        mean = sum(logprobs) / len(logprobs) if logprobs else 0.0
        frames_per_s = spec.sampling_rate / spec.hop_size
        for piece in _pieces(window, spec):
            text = decode(text_ids(piece.token_ids, spec))
            if not text.strip():
                continue
            segments.append(
                TranscriptionSegment(
                    id=len(segments),
                    seek=round(window.begin_s * frames_per_s),
                    start=round(piece.start_s, 3),
                    end=round(piece.end_s, 3),
                    text=text,
                    tokens=piece.token_ids,
                    temperature=window.temperature,
                    avg_logprob=mean,
                    compression_ratio=ratio,
                    no_speech_prob=window.no_speech_prob,
                )
            )
    return segments


def _pieces(window: WindowTranscript, spec: AudioSpec) -> list[_Piece]:
    """Cut a window's tokens at its timestamps. Every token of text is in one piece."""
    latest = window.begin_s
    pieces = list[_Piece]()
    open_ids, has_text = list[int](), False
    for token in window.token_ids:
        if token == spec.end_id:
            continue
        if token < spec.first_timestamp_id:
            open_ids.append(token)
            has_text = has_text or token < spec.end_id
            continue
        steps = token - spec.first_timestamp_id
        time_s = min(window.begin_s + steps * spec.timestamp_step_s, window.end_s)
        start, latest = latest, max(latest, time_s)
        if has_text:
            pieces.append(_Piece(start, latest, [*open_ids, token]))
            open_ids, has_text = [], False
        else:
            open_ids = [token]
    if has_text:
        pieces.append(_Piece(latest, max(latest, window.end_s), open_ids))
    return pieces
