"""Parses the text of an answer incrementally: reasoning, content and tool calls.

There are two stages: reasoning, then tool calls. Each stage emits the events that later text cannot
change, and holds back the rest of the text. Replies without a stream use the same parser.
"""

from __future__ import annotations

import msgspec

from ostinato.api.parsing.call_format import CallFormat
from ostinato.api.parsing.channels import ChannelSplitter
from ostinato.api.parsing.custom_tools import CustomInputs
from ostinato.api.parsing.events import Content, Event, Reasoning
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.parsing.reasoning import ReasoningMarkers, ReasoningSplitter
from ostinato.api.parsing.tool_calls import CallParser

__all__ = ("AnswerForm", "AnswerParser")


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that an answer can have besides content. Default: none. Can be sent as JSON."""

    reasoning: ReasoningMarkers | None = None
    reasoning_is_open: bool = False  # the prompt ends within reasoning
    shows_reasoning: bool = True
    call_format: str = ""  # the name of one of FORMATS; empty = no calls
    is_constrained: bool = False  # a grammar enforces the syntax of calls
    tool_names: frozenset[str] = frozenset()
    custom_names: frozenset[str] = frozenset()  # the functions that are custom tools
    # Function -> parameter -> the JSON types that its schema allows, for formats that need them.
    parameter_types: dict[str, dict[str, tuple[str, ...]]] = {}
    max_calls: int | None = None
    only_calls: bool = False  # no content; the text of an incomplete call is dropped

    @property
    def calls(self) -> CallFormat | None:
        """The format of tool calls; None = no calls."""
        found = FORMATS.get(self.call_format)
        return found.constrained() if found is not None and self.is_constrained else found

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers that an answer can contain."""
        reasoning = () if self.reasoning is None else self.reasoning.markers
        return reasoning + (() if self.calls is None else self.calls.markers)

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        return AnswerParser(self)


class AnswerParser:
    """Parses one answer: `feed` its text, then `finish`."""

    def __init__(self, form: AnswerForm) -> None:
        self._shows_reasoning = form.shows_reasoning
        self._only_calls = form.only_calls
        self._inputs = CustomInputs(form.custom_names)
        self._reasoning = None if form.reasoning is None else _splitter(form, form.reasoning)
        calls = form.calls
        self._calls = (
            None
            if calls is None
            else CallParser(
                calls, form.tool_names, max_calls=form.max_calls, types=form.parameter_types
            )
        )

    @property
    def has_calls(self) -> bool:
        """Whether there has been a tool call."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def ends_in_call(self) -> bool:
        """Whether the answer ended within a call that had begun. Valid after `finish`."""
        return self._calls is not None and self._calls.ends_in_call

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def held_length(self) -> int:
        """Number of characters at the end of the text so far that are held back."""
        return sum(one.held_length for one in (self._reasoning, self._calls) if one)

    def feed(self, text: str) -> list[Event]:
        """The events of new text."""
        if not text:
            return []
        if self._reasoning is None:
            return self._split_calls(text)
        return self._pass_on(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        """The events of the text that was held back. Call it at the end."""
        events = [] if self._reasoning is None else self._pass_on(self._reasoning.finish())
        if self._calls is None:
            return events
        return events + self._without_content(self._calls.finish())

    def _pass_on(self, events: list[Event]) -> list[Event]:
        """Send the content of the first stage through the second stage."""
        result: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                result += self._split_calls(event.text)
            elif self._shows_reasoning or not isinstance(event, Reasoning):
                result.append(event)
        return result

    def _split_calls(self, text: str) -> list[Event]:
        if self._calls is None:
            return [Content(text)]
        return self._without_content(self._calls.feed(text))

    def _without_content(self, events: list[Event]) -> list[Event]:
        """Convert the arguments of custom tools to texts, and drop content with `only_calls`."""
        events = self._inputs.feed(events)
        if not self._only_calls:
            return events
        return [event for event in events if not isinstance(event, Content)]


def _splitter(form: AnswerForm, markers: ReasoningMarkers) -> ReasoningSplitter | ChannelSplitter:
    if markers.has_channels:
        return ChannelSplitter()
    return ReasoningSplitter(markers, is_open=form.reasoning_is_open)
