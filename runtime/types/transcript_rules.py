"""`TranscriptRules`: which tokens a transcript may have where, as sent to the engine."""

from __future__ import annotations

import msgspec

__all__ = ("TranscriptRules",)


class TranscriptRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of Whisper's decoding (arXiv:2212.04356), which sampling applies to the logits."""

    suppressed: tuple[int, ...] = ()  # tokens that are never written
    suppressed_first: tuple[int, ...] = ()  # tokens that are not the first of the output
    end_id: int  # <|endoftext|>; with smaller ids, it is a text token
    # <|0.00|>; later timestamps have the ids after it. None = the prompt asks for no timestamps.
    first_timestamp_id: int | None = None
    no_timestamps_id: int | None = None  # <|notimestamps|>, which timestamps exclude
    max_initial_timestamp: int | None = None  # steps that the first timestamp can have at most
