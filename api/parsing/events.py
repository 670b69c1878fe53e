"""Events of the answer parser: pieces of reasoning, content and tool calls.

`num_tokens` of an event counts the output tokens of its own text, and the tokens without text
between the previous event and this one. The first `num_unseen` of these tokens have no text in the
event. An example is a marker between reasoning and content. Only `Reasoning` and `Content` have
`num_unseen`. The parsers get no tokens and leave both numbers at 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = (
    "CallArguments",
    "CallBegins",
    "Content",
    "Event",
    "Message",
    "Reasoning",
    "ToolCall",
    "merge",
)


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the reasoning."""

    text: str
    num_tokens: int = 0
    num_unseen: int = 0


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str
    num_tokens: int = 0
    num_unseen: int = 0


class CallBegins(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a tool call. Its arguments follow in one or several pieces.

    The arguments of a function are JSON text. Those of a custom tool are its input text.
    """

    index: int  # index of the call in the answer
    name: str
    id: str | None = None  # the id that the model wrote; None = no id
    is_custom: bool = False
    num_tokens: int = 0


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str
    is_custom: bool = False
    num_tokens: int = 0


Event = Reasoning | Content | CallBegins | CallArguments


class ToolCall(msgspec.Struct, kw_only=True):
    """One complete call."""

    name: str
    arguments: str
    id: str | None = None
    is_custom: bool = False


class Message(msgspec.Struct, kw_only=True):
    """The events of one answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallBegins):
                self.calls.append(
                    ToolCall(name=event.name, arguments="", id=event.id, is_custom=event.is_custom)
                )
            else:
                self.calls[event.index].arguments += event.text


def merge(events: Iterable[Event]) -> list[Event]:
    """Join consecutive events of the same type, unless tokens without text lie between them.

    The result does not depend on how the text was cut into pieces.
    """
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if (
            isinstance(event, Content | Reasoning)
            and isinstance(last, Content | Reasoning)
            and type(last) is type(event)
            and not event.num_unseen
        ):
            merged[-1] = type(event)(
                last.text + event.text, last.num_tokens + event.num_tokens, last.num_unseen
            )
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == event.index
        ):
            merged[-1] = CallArguments(
                event.index,
                last.text + event.text,
                event.is_custom,
                last.num_tokens + event.num_tokens,
            )
        else:
            merged.append(event)
    return merged
