"""Subtitles: literal files, and any segments as FFmpeg reads them."""

from __future__ import annotations

import html
import io
import re

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.api.audio.subtitles import srt_text, vtt_text
from ostinato.runtime.types.outputs import TranscriptionSegment


def segment(start: float, end: float, text: str) -> TranscriptionSegment:
    return TranscriptionSegment(
        id=0,
        seek=0,
        start=start,
        end=end,
        text=text,
        tokens=[],
        temperature=0.0,
        avg_logprob=0.0,
        compression_ratio=1.0,
        no_speech_prob=0.0,
    )


TWO = [
    segment(0.0, 3.5, " Hello there."),
    segment(3661.0075, 360000.02, " AT&T <b> a ---> b\n\nc "),
]


def test_srt() -> None:
    assert srt_text(TWO) == (
        "1\n00:00:00,000 --> 00:00:03,500\nHello there.\n\n"
        "2\n01:01:01,008 --> 100:00:00,020\nAT&T <b> a -> b c\n\n"
    )
    assert srt_text([]) == ""


def test_vtt() -> None:
    assert vtt_text(TWO) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:03.500\nHello there.\n\n"
        "01:01:01.008 --> 100:00:00.020\nAT&amp;T &lt;b> a -> b c\n\n"
    )
    assert vtt_text([]) == "WEBVTT\n\n"


def read(text: str, form: str) -> list[tuple[int, int, str]]:
    """(start and length in milliseconds, text) of each subtitle, as FFmpeg reads the file."""
    with av.open(io.BytesIO(text.encode()), format=form) as file:
        return [
            (packet.pts, packet.duration, bytes(packet).decode())
            for packet in file.demux()
            if packet.size
        ]


words = st.text(
    st.sampled_from(list("ab1 é語-><&\n\r\u2028\x0b;")), min_size=1, max_size=12
).filter(lambda text: re.sub(r"[\s;>-]", "", text))


@pytest.mark.parametrize("form", ["srt", "webvtt"])
@given(parts=st.lists(st.tuples(st.integers(1, 10**8), words), min_size=1, max_size=5))
def test_ffmpeg_reads_every_segment(form: str, parts: list[tuple[int, str]]) -> None:
    segments, expected, begin = list[TranscriptionSegment](), [], 0
    for length, text in parts:
        segments.append(segment(begin / 1000, (begin + length) / 1000, text))
        line = " ".join(part.strip() for part in text.splitlines() if part.strip())
        expected.append((begin, length, re.sub("-+->", "->", line)))
        begin += length
    if form == "srt":
        assert read(srt_text(segments), form) == expected
    else:
        got = read(vtt_text(segments), form)
        assert [(start, length, html.unescape(text)) for start, length, text in got] == expected
