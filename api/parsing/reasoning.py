"""Splits reasoning between two markers from the rest of an answer, incrementally.

Whitespace next to a marker belongs to the marker. Text that may be part of a marker is held back,
so the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import msgspec

from ostinato.api.parsing.events import Content, Event, Reasoning
from ostinato.runtime.text.stop_strings import num_held

__all__ = ("MISTRAL", "THINK", "ReasoningMarkers", "ReasoningSplitter")


class ReasoningMarkers(msgspec.Struct, frozen=True):
    begin: str
    end: str


THINK = ReasoningMarkers("<think>", "</think>")  # Qwen3, DeepSeek R1, and most others
MISTRAL = ReasoningMarkers("[THINK]", "[/THINK]")


class ReasoningSplitter:
    """Splits one answer; `feed` its text, then `finish`.

    Args:
        markers: around the reasoning.
        is_open: the prompt ended with the first marker, so the answer begins within reasoning.
    """

    def __init__(self, markers: ReasoningMarkers, *, is_open: bool) -> None:
        self._markers = markers
        self._state = self._after_begin if is_open else self._at_start
        self._buffer = ""

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._state in (self._after_begin, self._inside)

    def feed(self, text: str) -> list[Event]:
        """The events of new text."""
        self._buffer += text
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The events of the text that was held back; call it at the end."""
        text, self._buffer = self._buffer, ""
        if not text or self._state == self._after_end:
            return []
        return [Reasoning(text) if self.is_inside else Content(text)]

    # Each state is a method. It takes text from the buffer and returns whether to run the next
    # state.

    def _at_start(self, events: list[Event]) -> bool:
        text = self._buffer.lstrip()
        begin = self._markers.begin
        if text.startswith(begin):
            self._buffer = text[len(begin) :]
            self._state = self._after_begin
            return True
        if begin.startswith(text):
            return False
        self._state = self._outside
        return True

    def _after_begin(self, events: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._inside
        return bool(self._buffer)

    def _inside(self, events: list[Event]) -> bool:
        end = self._markers.end
        position = self._buffer.find(end)
        if position >= 0:
            shown, self._buffer = self._buffer[:position].rstrip(), self._buffer[position:]
            self._buffer = self._buffer[len(end) :]
            self._state = self._after_end
        else:
            kept = len(self._buffer) - num_held(self._buffer, (end,))
            kept = len(self._buffer[:kept].rstrip())
            shown, self._buffer = self._buffer[:kept], self._buffer[kept:]
        if shown:
            events.append(Reasoning(shown))
        return position >= 0

    def _after_end(self, events: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._outside
        return bool(self._buffer)

    def _outside(self, events: list[Event]) -> bool:
        if self._buffer:
            events.append(Content(self._buffer))
            self._buffer = ""
        return False
