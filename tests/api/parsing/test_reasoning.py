"""Reasoning between markers, split from the answer."""

from __future__ import annotations

import pytest

from ostinato.api.parsing.events import Content, Event, Reasoning, merge
from ostinato.api.parsing.reasoning import REASONING, ReasoningMarkers, ReasoningSplitter

THINK, MISTRAL = REASONING["think"], REASONING["mistral"]


def split(*pieces: str, markers: ReasoningMarkers = THINK, is_open: bool = False) -> list[Event]:
    splitter = ReasoningSplitter(markers, is_open=is_open)
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return merge(events + splitter.finish())


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("<think>\nSix.\n</think>\n\nIt is 6.\n", [Reasoning("Six."), Content("It is 6.\n")]),
        ("\n<think>a b </think>c", [Reasoning("a b"), Content("c")]),
        ("<think>\n\n</think>\n\nHi", [Content("Hi")]),
        ("Hi <think>x</think>", [Content("Hi <think>x</think>")]),  # not at the beginning
        ("<think>cut off ", [Reasoning("cut off ")]),
        ("<think>cut </thi", [Reasoning("cut </thi")]),
        ("<thin", [Content("<thin")]),
        ("<think>a</think>b</think>", [Reasoning("a"), Content("b</think>")]),
        ("<think>a < b</think>", [Reasoning("a < b")]),
        ("  ", [Content("  ")]),
        ("", []),
    ],
)
def test_whole_answers(text, events):
    assert split(text) == events
    assert split(*text) == events


def test_reasoning_that_the_prompt_opened():
    assert split("so\n</think>\nyes", is_open=True) == [Reasoning("so"), Content("yes")]


def test_the_markers_of_mistral():
    text = "[THINK]a</think>[/THINK]b"
    assert split(text, markers=MISTRAL) == [Reasoning("a</think>"), Content("b")]


def test_nothing_is_held_longer_than_it_must():
    splitter = ReasoningSplitter(THINK, is_open=False)
    assert splitter.feed("<think>one") == [Reasoning("one")]
    assert splitter.feed(" two </th") == [Reasoning(" two")]
    assert splitter.feed("ree") == [Reasoning(" </three")]
    assert splitter.feed("</think>") == []
    assert splitter.feed("done ") == [Content("done ")]
