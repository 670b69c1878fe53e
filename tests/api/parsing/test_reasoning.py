"""Reasoning between markers, split from the answer."""

from __future__ import annotations

import pytest

from ostinato.api.chat.content_blocks import ContentBlocks
from ostinato.api.parsing.events import (
    CallArguments,
    CallBegins,
    Content,
    Event,
    Message,
    Reasoning,
    ToolCall,
    merge,
)
from ostinato.api.parsing.reasoning import REASONING, ReasoningMarkers, ReasoningSplitter
from ostinato.api.service.reply_state import CollectedCompletion
from tests.api.dialect_values import output

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


class Unaddable(str):
    """A text that cannot be added to another one, as adding texts one by one copies them all."""

    def __add__(self, other: str) -> str:
        raise AssertionError("a text was added")

    __radd__ = __add__


def test_pieces_are_joined_and_not_added():
    pieces = [Unaddable("ab"), Unaddable("c"), Unaddable("d")]
    events: list[Event] = [Reasoning(piece, 1) for piece in pieces]
    events += [Content(piece, 2) for piece in pieces]
    events += [CallBegins(0, "f"), *(CallArguments(0, piece, num_tokens=3) for piece in pieces)]
    assert merge(events) == [
        Reasoning("abcd", 3),
        Content("abcd", 6),
        CallBegins(0, "f"),
        CallArguments(0, "abcd", num_tokens=9),
    ]
    message = Message()
    message.add(events)
    assert (message.content, message.reasoning) == ("abcd", "abcd")
    assert message.calls == [ToolCall(name="f", arguments="abcd")]
    blocks = ContentBlocks()
    blocks.feed(events)
    assert [block.text for block in blocks.blocks] == ["abcd"] * 3
    one = CollectedCompletion()
    for piece in pieces:
        one.add(output(piece, [1], 1))
    assert one.text == "abcd"
