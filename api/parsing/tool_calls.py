"""Finds tool calls in an answer's content, incrementally.

Without a grammar, a call becomes an event when it is complete and valid: its text matches the
format, its arguments are a JSON object, and its name is one of the offered functions. If a grammar
enforces the format, a call becomes an event as soon as its name is known, and its arguments are
streamed. All other text is content, and is not changed. Whitespace next to a call belongs to the
call.
"""

from __future__ import annotations

from collections.abc import Collection

from ostinato.api.parsing.bodies.body_reader import (
    Begun,
    BodyReader,
    Calls,
    NotACall,
    ParameterTypes,
)
from ostinato.api.parsing.call_format import CallFormat
from ostinato.api.parsing.events import CallArguments, CallBegins, Content, Event, ToolCall
from ostinato.runtime.text.stop_strings import num_held

__all__ = ("CallParser",)


class CallParser:
    """Splits the text of one answer: `feed` it, then `finish`.

    Args:
        form: how the model writes calls.
        names: names of the offered functions.
        max_calls: text after this many calls is dropped; None = no limit.
        types: the types of the functions' parameters, for formats that need them.
    """

    def __init__(
        self,
        form: CallFormat,
        names: Collection[str],
        *,
        max_calls: int | None = None,
        types: ParameterTypes | None = None,
    ) -> None:
        self._form = form
        self._names = names
        self._types: ParameterTypes = types or {}
        self._max_calls = max_calls
        self._state = self._at_bracket
        self._buffer = ""
        self._opening = ""  # the text before the body of the present call
        self._reader: BodyReader = form.reader("", self._types)
        # Characters of the arguments that were sent; None = no call has begun.
        self._num_given: int | None = None
        self.num_calls = 0
        self.ends_in_call = False  # set by `finish`: the answer ended within a call that has begun

    @property
    def held_length(self) -> int:
        """Number of characters at the end of the text so far that are held back."""
        num_opening = len(self._opening) if self._state == self._in_body else 0
        return num_opening + len(self._buffer)

    def feed(self, text: str) -> list[Event]:
        """The events of new text."""
        self._buffer += text
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The events of the text that was held back. Call it at the end."""
        events: list[Event] = []
        while True:
            while self._state(events):
                pass
            if self._state != self._in_body:
                break
            if self._num_given is not None:
                self.ends_in_call = True
                self._buffer = ""
                break
            self._to_content(events)
        behind_call = self.num_calls > 0 and self._state in (self._behind_call, self._at_bracket)
        if self._buffer and not (behind_call and not self._buffer.strip()):
            events.append(Content(self._buffer))
        self._buffer = ""
        return events

    # Each state is a method. It takes text from the buffer and returns whether to run the next
    # state.

    def _at_bracket(self, events: list[Event]) -> bool:
        """The state at the beginning of the text and after a call: here a bracket opens a call."""
        text = self._buffer.lstrip()
        if not text:
            return False
        is_next = self.num_calls > 0
        openings = self._form.next_openings if is_next else ()
        brackets = self._form.brackets + (self._form.next_brackets if is_next else "")
        opening = next((one for one in openings if text.startswith(one)), None)
        if opening is None and any(one.startswith(text) for one in openings):
            return False
        if opening is not None or text[0] in brackets:
            self._open(len(self._buffer) - len(text), opening or "")
        else:
            self._state = self._in_content
        return True

    def _in_content(self, events: list[Event]) -> bool:
        found = [
            (position, opening)
            for opening in self._form.openings
            if (position := self._buffer.find(opening)) >= 0
        ]
        if found:
            position, opening = min(found)
            self._show(position, events)
            self._open(len(self._buffer) - len(self._buffer.lstrip()), opening)
            return True
        self._show(len(self._buffer) - num_held(self._buffer, self._form.openings), events)
        return False

    def _show(self, end: int, events: list[Event]) -> None:
        """Emit the buffer up to `end` as content, without the whitespace before `end`."""
        end = len(self._buffer[:end].rstrip())
        if end:
            events.append(Content(self._buffer[:end]))
            self._buffer = self._buffer[end:]

    def _open(self, num_spaces: int, opening: str) -> None:
        begin = num_spaces + len(opening)
        self._opening, self._buffer = self._buffer[:begin], self._buffer[begin:]
        self._reader = self._form.reader(opening, self._types)
        self._state = self._in_body

    def _in_body(self, events: list[Event]) -> bool:
        outcome = self._reader.read(self._buffer)
        if outcome is NotACall.unfinished:
            return False
        if isinstance(outcome, Begun) and outcome.name in self._names:
            self._give(ToolCall(name=outcome.name, arguments=outcome.arguments), events)
            return False
        if isinstance(outcome, Calls) and all(one.name in self._names for one in outcome.calls):
            self._buffer = self._buffer[outcome.end :]
            room = None if self._max_calls is None else self._max_calls - self._num_whole
            for call in outcome.calls[:room]:
                self._give(call, events)
                self._num_given = None
            enough = self._max_calls is not None and self.num_calls >= self._max_calls
            self._state = self._enough if enough else self._behind_call
        else:
            self._to_content(events)
        return True

    @property
    def _num_whole(self) -> int:
        return self.num_calls - (self._num_given is not None)

    def _give(self, call: ToolCall, events: list[Event]) -> None:
        """Emit the new part of a call."""
        if self._num_given is None:
            events.append(CallBegins(self.num_calls, call.name, call.id))
            self.num_calls += 1
            self._num_given = 0
        if len(call.arguments) > self._num_given:
            new = call.arguments[self._num_given :]
            events.append(CallArguments(self.num_calls - 1, new))
            self._num_given = len(call.arguments)

    def _to_content(self, events: list[Event]) -> None:
        """Emit the opening marker as content. The rest of the buffer is parsed again."""
        if self._opening:
            events.append(Content(self._opening))
            self._opening = ""
        self._state = self._in_content

    def _behind_call(self, events: list[Event]) -> bool:
        text = self._buffer.lstrip()
        for closing in self._form.closings:
            if text.startswith(closing):
                self._buffer = text[len(closing) :]
                return True
        if not text or any(one.startswith(text) for one in self._form.closings):
            return False
        self._buffer = text
        self._state = self._at_bracket
        return True

    def _enough(self, events: list[Event]) -> bool:
        self._buffer = ""
        return False
