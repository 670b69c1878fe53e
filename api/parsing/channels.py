"""Splits an answer of gpt-oss, a list of messages on channels, into reasoning and content.

A message is `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>TEXT`.
It ends with `<|end|>`, `<|call|>` or `<|return|>`. The prompt ends with the first
`<|start|>assistant`.
Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re

from ostinato.api.parsing.events import Content, Event, Reasoning
from ostinato.runtime.text.stop_strings import num_held

__all__ = ("ChannelSplitter",)

_MESSAGE = "<|message|>"
_STARTS = ("<|start|>", "<|channel|>", "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BORDERS = (*_ENDS, "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_MAX_HEADER = 512


class ChannelSplitter:
    """Splits one answer: `feed` its text, then `finish`.

    Messages on the channel `analysis` are reasoning. All other messages are content. Consecutive
    messages of reasoning, or of content, are joined by a line end. A message to a recipient, such
    as a function, becomes content that begins with `<|channel|>commentary to=RECIPIENT`. The model
    can write the recipient before or after the channel.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._kind: type[Reasoning | Content] | None = None  # event type of the present message
        self._separator = ""  # text to emit before the message's text
        self._last: type[Reasoning | Content] | None = None
        self._skips = 0  # characters at the buffer's beginning in which no message ends

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._kind is Reasoning

    @property
    def held_length(self) -> int:
        """Number of characters at the end of the text so far that are held back."""
        return len(self._buffer)

    def feed(self, text: str) -> list[Event]:
        """The events of new text."""
        self._buffer += text
        events: list[Event] = []
        while self._header() if self._kind is None else self._text(self._kind, events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The events of the text that was held back. Call it at the end."""
        text, self._buffer = self._buffer, ""
        if self._kind is not None:
            return self._shown(self._kind, text)
        is_markup = any(text.lstrip().startswith(one) for one in _STARTS)
        return [] if is_markup or not text.strip() else [Content(text)]

    def _header(self) -> bool:
        """Read the header of a message; returns whether it is complete."""
        text = self._buffer.lstrip()
        if not any(text.startswith(one) for one in _STARTS):
            if any(one.startswith(text) for one in _STARTS):
                return False
            self._begin(Content, "")  # text without a channel
            return True
        position = text.find(_MESSAGE)
        if position < 0 and len(text) <= _MAX_HEADER:
            return False
        if position < 0:
            self._begin(Content, "", skips=1)
            return True
        header, self._buffer = text[:position], text[position + len(_MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            call = f"<|channel|>commentary to={recipient[1]} <|constrain|>json{_MESSAGE}"
            self._begin(Content, call)
        else:
            is_analysis = channel is not None and channel[1] == "analysis"
            self._begin(Reasoning if is_analysis else Content, "")
        return True

    def _begin(self, kind: type[Reasoning | Content], text: str, skips: int = 0) -> None:
        self._separator = "\n" if self._last is kind else ""
        self._kind, self._buffer = kind, text + self._buffer
        self._skips = len(text) or skips  # markers in the header of a call do not end the message

    def _text(self, kind: type[Reasoning | Content], events: list[Event]) -> bool:
        """Emit the text of a message; returns whether the message has ended."""
        found = [
            (at, border)
            for border in _BORDERS
            if (at := self._buffer.find(border, self._skips)) >= 0
        ]
        if found:
            position, border = min(found)
            events += self._shown(kind, self._buffer[:position])
            self._buffer = self._buffer[position:]
            if border in _ENDS:
                self._buffer = self._buffer[len(border) :]
            self._kind = None
            return True
        kept = max(self._skips, len(self._buffer) - num_held(self._buffer, _BORDERS))
        events += self._shown(kind, self._buffer[:kept])
        self._buffer, self._skips = self._buffer[kept:], 0
        return False

    def _shown(self, kind: type[Reasoning | Content], text: str) -> list[Event]:
        if not text:
            return []
        text, self._separator, self._last = self._separator + text, "", kind
        return [kind(text)]
