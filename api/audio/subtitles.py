"""Writes segments as subtitles: SubRip (srt) and WebVTT (vtt), in the form that Whisper writes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ostinato.runtime.types.outputs import TranscriptionSegment

__all__ = ("srt_text", "vtt_text")

_ARROW = re.compile("--+>")


def srt_text(segments: Iterable[TranscriptionSegment]) -> str:
    """The segments as SubRip, numbered from 1."""
    return "".join(
        f"{number}\n{_times(segment, ',')}\n{_one_line(segment.text)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def vtt_text(segments: Iterable[TranscriptionSegment]) -> str:
    """The segments as WebVTT. `&` and `<` are escaped, because WebVTT has tags and entities."""
    cues = "".join(
        f"{_times(segment, '.')}\n{_escaped(_one_line(segment.text))}\n\n" for segment in segments
    )
    return f"WEBVTT\n\n{cues}"


def _times(segment: TranscriptionSegment, mark: str) -> str:
    return f"{_time(segment.start, mark)} --> {_time(segment.end, mark)}"


def _time(seconds: float, mark: str) -> str:
    """HH:MM:SS and milliseconds; hours have more digits from 100 on."""
    rest, milliseconds = divmod(round(seconds * 1000), 1000)
    rest, seconds_left = divmod(rest, 60)
    hours, minutes = divmod(rest, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds_left:02d}{mark}{milliseconds:03d}"


def _one_line(text: str) -> str:
    """The text as one line: an empty line would end a subtitle, and `-->` would begin one."""
    lines = (line.strip() for line in text.splitlines())
    return _ARROW.sub("->", " ".join(line for line in lines if line))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
