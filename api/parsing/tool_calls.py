"""Finds tool calls in an answer's content, incrementally.

Without a grammar, a call becomes an event when it is complete and valid: its text matches the
format, its arguments are a JSON object, and its name is one of the offered functions. If a grammar
enforces the format, a call becomes an event as soon as its name is known, and its arguments are
streamed. All other text is content, and is not changed. Whitespace next to a call belongs to the
call.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ostinato.api.parsing.bodies.body_reader import (
    Begun,
    BodyReader,
    Calls,
    NotACall,
    ParameterTypes,
    behind_space,
)
from ostinato.api.parsing.call_format import CallFormat
from ostinato.api.parsing.events import CallArguments, CallBegins, Content, Event, ToolCall
from ostinato.runtime.text.stop_strings import num_held

__all__ = ("CallParser",)

_HEAD = 256  # more characters than any marker has


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
        self._openings = re.compile("|".join(map(re.escape, sorted(form.openings))) or "(?!)")
        self._buffer = ""
        self._at = 0  # the text before this position of the buffer has been taken
        self._is_read = False  # the reader has read the beginning of the body
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
        return num_opening + len(self._buffer) - self._at

    def feed(self, text: str) -> list[Event]:
        """The events of new text."""
        self._buffer, self._at = self._buffer[self._at :] + text, 0
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
                self._at = len(self._buffer)
                break
            self._to_content(events)
        behind_call = self.num_calls > 0 and self._state in (self._behind_call, self._at_bracket)
        rest = self._buffer[self._at :]
        if rest and not (behind_call and not rest.strip()):
            events.append(Content(rest))
        self._buffer, self._at = "", 0
        return events

    # Each state is a method. It takes text from the buffer and returns whether to run the next
    # state. The text after a marker that opens no call is parsed again, and there can be thousands
    # of markers. So a state copies only the text that it takes.

    def _at_bracket(self, events: list[Event]) -> bool:
        """The state at the beginning of the text and after a call: here a bracket opens a call."""
        begin = behind_space(self._buffer, self._at)
        text = self._buffer[begin : begin + _HEAD]
        if not text:
            return False
        is_next = self.num_calls > 0
        openings = self._form.next_openings if is_next else ()
        brackets = self._form.brackets + (self._form.next_brackets if is_next else "")
        opening = next((one for one in openings if text.startswith(one)), None)
        if opening is None and any(one.startswith(text) for one in openings):
            return False
        if opening is not None or text[0] in brackets:
            self._open(begin + len(opening or ""), opening or "")
        else:
            self._state = self._in_content
        return True

    def _in_content(self, events: list[Event]) -> bool:
        found = self._openings.search(self._buffer, self._at)
        if found is not None:
            self._show(found.start(), events)
            self._open(found.end(), found[0])
            return True
        tail = self._buffer[max(self._at, len(self._buffer) - _HEAD) :]
        self._show(len(self._buffer) - num_held(tail, self._form.openings), events)
        return False

    def _show(self, end: int, events: list[Event]) -> None:
        """Emit the text up to `end` as content, without the whitespace before `end`."""
        text = self._buffer[self._at : end].rstrip()
        if text:
            events.append(Content(text))
            self._at += len(text)

    def _open(self, begin: int, opening: str) -> None:
        """Go on with a body that begins at `begin`, after whitespace and the opening marker."""
        self._opening, self._at = self._buffer[self._at : begin], begin
        self._reader, self._is_read = self._form.reader(opening, self._types), False
        self._state = self._in_body

    def _read(self) -> Begun | Calls | NotACall:
        """What the reader finds. Most bodies that are no call are malformed in their beginning."""
        if not self._is_read:
            self._is_read = True
            outcome = self._reader.read(self._buffer[self._at : self._at + _HEAD])
            if outcome is NotACall.malformed or isinstance(outcome, Calls):
                return outcome
        return self._reader.read(self._buffer[self._at :])

    def _in_body(self, events: list[Event]) -> bool:
        outcome = self._read()
        if outcome is NotACall.unfinished:
            return False
        if isinstance(outcome, Begun) and outcome.name in self._names:
            self._give(ToolCall(name=outcome.name, arguments=outcome.arguments), events)
            return False
        if isinstance(outcome, Calls) and all(one.name in self._names for one in outcome.calls):
            self._at += outcome.end
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
        """Emit the opening marker as content. The text after it is parsed again."""
        if self._opening:
            events.append(Content(self._opening))
            self._opening = ""
        self._state = self._in_content

    def _behind_call(self, events: list[Event]) -> bool:
        begin = behind_space(self._buffer, self._at)
        text = self._buffer[begin : begin + _HEAD]
        for closing in self._form.closings:
            if text.startswith(closing):
                self._at = begin + len(closing)
                return True
        if not text or any(one.startswith(text) for one in self._form.closings):
            return False
        self._at = begin
        self._state = self._at_bracket
        return True

    def _enough(self, events: list[Event]) -> bool:
        self._at = len(self._buffer)
        return False
