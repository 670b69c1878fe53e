"""Segments: literal outputs, transformers as a slow twin, and properties of any output."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from ostinato.runtime.audio.segments import (
    WindowTranscript,
    compression_ratio,
    text_ids,
    transcript_segments,
)
from ostinato.runtime.types.outputs import TranscriptionSegment
from tests.api.audio.whisper_spec import MULTILINGUAL

END, FIRST = MULTILINGUAL.end_id, MULTILINGUAL.first_timestamp_id


def decode(token_ids: Sequence[int]) -> str:
    """A text in which every token can be found again."""
    return "".join(f" w{token}" for token in token_ids)


def at(seconds: float) -> int:
    return FIRST + round(seconds / 0.02)


def window(token_ids: list[int], begin: float = 0.0, end: float = 30.0, **more) -> WindowTranscript:
    return WindowTranscript(token_ids=token_ids, logprobs=[], begin_s=begin, end_s=end, **more)


def segments_of(*windows: WindowTranscript) -> list[TranscriptionSegment]:
    return transcript_segments(windows, MULTILINGUAL, decode)


def times(*windows: WindowTranscript) -> list[tuple[float, float, str]]:
    return [(one.start, one.end, one.text) for one in segments_of(*windows)]


def test_pairs_of_timestamps() -> None:
    ids = [at(0), 5, 6, at(2), at(2.5), 7, at(4), at(4), END]
    assert times(window(ids)) == [(0.0, 2.0, " w5 w6"), (2.5, 4.0, " w7")]
    assert [one.tokens for one in segments_of(window(ids))] == [
        [at(0), 5, 6, at(2)],
        [at(2.5), 7, at(4)],
    ]


def test_text_without_timestamps_takes_the_whole_window() -> None:
    assert times(window([5, 6, END], 3.0, 7.5)) == [(3.0, 7.5, " w5 w6")]


def test_text_after_the_last_timestamp_ends_with_the_window() -> None:
    assert times(window([at(0), 5, at(1), at(1), 6], 10, 20)) == [
        (10.0, 11.0, " w5"),
        (11.0, 20.0, " w6"),
    ]


def test_silence_has_no_segments() -> None:
    assert segments_of(window([END])) == []
    assert segments_of(window([at(0), at(30), END])) == []
    assert segments_of() == []


def test_windows_follow_each_other() -> None:
    first = window([at(0), 5, at(29)], 0.0, 29.3)
    second = window([at(0.5), 6, at(3)], 29.3, 32.0, temperature=0.4, no_speech_prob=0.25)
    segments = segments_of(first, second)
    assert [(one.id, one.seek, one.start, one.end) for one in segments] == [
        (0, 0, 0.0, 29.0),
        (1, 2930, 29.8, 32.0),  # 32.3 lies after the end of the window
    ]
    assert [(one.temperature, one.no_speech_prob) for one in segments] == [(0.0, 0.0), (0.4, 0.25)]


def test_the_figures_of_a_window_are_in_all_of_its_segments() -> None:
    ids = [at(0), 5, at(1), at(1), 6, at(2), END]
    one = msgspec.structs.replace(window(ids), logprobs=[-0.5, -1.0, 0, 0, -2.5, -3.0, 0.0])
    text = b"w5 w6"
    for segment in segments_of(one):
        assert segment.avg_logprob == pytest.approx(-1.0)
        assert segment.compression_ratio == len(text) / len(zlib.compress(text))
    repeated = compression_ratio("na " * 200)
    assert compression_ratio("") == 0.0
    assert repeated > 20


def test_an_impossible_token_has_a_number_in_json() -> None:
    one = msgspec.structs.replace(window([5, END]), logprobs=[-math.inf, 0.0])
    (segment,) = segments_of(one)
    assert segment.avg_logprob == -9999.0 / 2
    assert b"null" not in msgspec.json.encode(segment)


# What a model writes under the rules of timestamps: text between timestamps that do not fall.
@st.composite
def ruled_outputs(draw: st.DrawFn) -> list[int]:
    words = st.lists(st.integers(0, END - 1), min_size=1, max_size=4)
    count = draw(st.integers(1, 4))
    gaps = draw(st.lists(st.integers(0, 180), min_size=2 * count, max_size=2 * count))
    # A segment takes at least one step.
    steps = list(accumulate(gap + index % 2 for index, gap in enumerate(gaps)))
    ids = list[int]()
    for index in range(count):
        ids += [FIRST + steps[2 * index], *draw(words), FIRST + steps[2 * index + 1]]
    if draw(st.booleans()):
        ids.append(ids[-1])
    return ids


@given(ids=ruled_outputs(), begin_s=st.integers(0, 100_000).map(lambda count: count / 100))
def test_pairs_are_those_of_transformers(ids: list[int], begin_s: float) -> None:
    expected, _ = WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(ids),
        seek_outputs=[{}],
        time_offset=torch.tensor([begin_s], dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([3000]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    got = segments_of(window(ids, begin_s, begin_s + 30))
    assert [text_ids(one.tokens, MULTILINGUAL) for one in got] == [
        text_ids(one["tokens"].tolist(), MULTILINGUAL) for one in expected
    ]
    starts = [float(one["start"]) for one in expected]
    if len(got) == 1 and ids[-1] != ids[-2]:
        # transformers ignores the first timestamp of an output without two timestamps in a row.
        starts = [begin_s + (ids[0] - FIRST) * 0.02]
    assert [one.start for one in got] == pytest.approx(starts, abs=1e-3)
    assert [one.end for one in got] == pytest.approx(
        [float(one["end"]) for one in expected], abs=1e-3
    )


any_token = st.integers(0, 60) | st.integers(END - 2, END + 110) | st.integers(FIRST, FIRST + 1500)


@given(
    outputs=st.lists(st.lists(any_token, max_size=12), max_size=3),
    lengths=st.lists(st.floats(0.01, 30), min_size=3, max_size=3),
)
def test_any_output_keeps_its_text_and_its_times_rise(
    outputs: list[list[int]], lengths: list[float]
) -> None:
    windows, begin = list[WindowTranscript](), 0.0
    for ids, length in zip(outputs, lengths, strict=False):
        windows.append(window(ids, begin, begin + length))
        begin += length
    segments = segments_of(*windows)
    text = "".join(decode(text_ids(ids, MULTILINGUAL)) for ids in outputs)
    assert "".join(one.text for one in segments) == text
    assert [one.id for one in segments] == list(range(len(segments)))
    edges = [0.0, *(edge for one in segments for edge in (one.start, one.end)), begin + 0.001]
    assert edges == sorted(edges)
