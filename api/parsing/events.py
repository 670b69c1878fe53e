"""Events of the answer parser: pieces of reasoning, content and tool calls.

`num_tokens` of an event counts the output tokens of its own text, and the tokens without text
between the previous event and this one. The first `num_unseen` of these tokens have no text in the
event. An example is a marker between reasoning and content. Only `Reasoning` and `Content` have
`num_unseen`. The parsers get no tokens and leave both numbers at 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

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


class Message:
    """The events of one answer, joined."""

    def __init__(self) -> None:
        self._content, self._reasoning = StringIO(), StringIO()
        self._calls: list[tuple[CallBegins, StringIO]] = []  # with the arguments

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._content.write(event.text)
            elif isinstance(event, Reasoning):
                self._reasoning.write(event.text)
            elif isinstance(event, CallBegins):
                self._calls.append((event, StringIO()))
            else:
                self._calls[event.index][1].write(event.text)

    def drop_last_call(self) -> None:
        self._calls.pop()

    @property
    def content(self) -> str:
        return self._content.getvalue()

    @property
    def reasoning(self) -> str:
        return self._reasoning.getvalue()

    @property
    def calls(self) -> list[ToolCall]:
        return [
            ToolCall(
                name=call.name, arguments=text.getvalue(), id=call.id, is_custom=call.is_custom
            )
            for call, text in self._calls
        ]


def merge(events: Iterable[Event]) -> list[Event]:
    """Join consecutive events of the same type, unless tokens without text lie between them.

    The result does not depend on how the text was cut into pieces.
    """
    runs: list[list[Event]] = []
    for event in events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _continues(last: Event, event: Event) -> bool:
    if isinstance(event, CallArguments):
        return isinstance(last, CallArguments) and last.index == event.index
    if isinstance(event, CallBegins):
        return False
    return type(last) is type(event) and not event.num_unseen


def _joined(run: list[Event]) -> Event:
    first = run[0]
    assert not isinstance(first, CallBegins), "the beginning of a call continues nothing"
    text = "".join(one.text for one in run if not isinstance(one, CallBegins))
    return msgspec.structs.replace(first, text=text, num_tokens=sum(one.num_tokens for one in run))
