"""Scans a JSON value incrementally: finds its end, and whether the text can still become JSON."""

from __future__ import annotations

import re
from enum import Enum

__all__ = ("JsonScanner", "JsonState")

MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\n\r]*")
# Control characters are accepted, because models write newlines into strings. The alternatives
# begin with different characters, so there is one way to match. Without possessive quantifiers:
# Python before 3.11.5 matches them wrongly (cpython issue 106052).
_IN_STRING = re.compile(r'[^"\\]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\]*)*')
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_WHOLE_WORD = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
# Matches the beginnings of the words that `_WHOLE_WORD` matches.
_WORD_BEGINNING = re.compile(
    r"t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
    r"|-?(?:(?:0|[1-9][0-9]*)(?:(?:\.[0-9]+)?[eE][-+]?[0-9]*|\.[0-9]*)?)?"
)


class JsonState(Enum):
    open = "open"  # more text is needed
    done = "done"
    broken = "broken"  # no further text can make it JSON


class _Next(Enum):
    """What the grammar of JSON allows next."""

    any_value = "value"
    value_or_end = "value or ]"
    key = "key"
    key_or_end = "key or }"
    colon = "colon"
    comma_or_end = "comma or closing bracket"


_VALUES = (_Next.any_value, _Next.value_or_end)


class JsonScanner:
    """Scans one JSON object or array at the beginning of a growing text.

    Attributes:
        end: the position after the value; valid after `scan` has returned `done`.
        known_end: the text before this position is known to be the beginning of a JSON value. The
            position does not depend on how the text was cut into pieces.
        first_key: begin and end of the first key with its quotes; None until the key is complete.
    """

    def __init__(self) -> None:
        self.end = 0
        self.known_end = 0
        self.first_key: tuple[int, int] | None = None
        self._stack: list[str] = []  # the closing brackets that are still missing
        self._next = _Next.any_value
        self._state = JsonState.open
        self._string_end = 0  # how far an open string has been scanned

    def scan(self, text: str) -> JsonState:
        """Continue where the last scan stopped.

        Args:
            text: the whole text so far. It begins with the text of the last scan.
        """
        if self._state is JsonState.open:
            self._state = self._go_on(text)
        return self._state

    def _go_on(self, text: str) -> JsonState:
        while True:
            match = _SPACE.match(text, self.end)
            position = match.end() if match else self.end
            if position == len(text):
                self.known_end = max(self.known_end, position)
                return JsonState.open
            begin = self.known_end = position
            if not self._may_begin(text[begin]):
                return JsonState.broken
            token_end = self._token(text, begin)
            if token_end is None:
                return JsonState.broken
            if token_end < 0:
                return JsonState.open
            self.end = token_end
            if not self._take(text[begin], begin):
                return JsonState.broken
            self.known_end = token_end
            if not self._stack:
                return JsonState.done

    def _token(self, text: str, begin: int) -> int | None:
        """The end of the token at `begin`; -1 = it is incomplete; None = there is no token."""
        character = text[begin]
        if character in "{}[]:,":
            return begin + 1
        if character == '"':
            return self._string(text, begin)
        word = _WORD.match(text, begin)
        if word is None:
            return None
        beginning = _WORD_BEGINNING.match(text, begin)
        self.known_end = beginning.end() if beginning else begin
        if word.end() == len(text):
            return -1
        return word.end() if _WHOLE_WORD.fullmatch(word[0]) else None

    def _string(self, text: str, begin: int) -> int | None:
        """Like `_token`, for a string. No character is scanned twice."""
        match = _IN_STRING.match(text, max(begin + 1, self._string_end))
        end = self.known_end = match.end() if match else begin + 1
        if end == len(text) or _OPEN_ESCAPE.fullmatch(text, end):
            self._string_end = end
            return -1
        return end + 1 if text[end] == '"' else None

    def _may_begin(self, character: str) -> bool:
        """Whether a token that begins with `character` is allowed here.

        Strings and words are checked before they are complete, because `known_end` can lie within
        them. Brackets, colons and commas are checked in `_take`.
        """
        if character in "{}[]:,":
            return True
        expected = (*_VALUES, _Next.key, _Next.key_or_end) if character == '"' else _VALUES
        return bool(self._stack) and self._next in expected

    def _take(self, character: str, begin: int) -> bool:
        """Process the token that begins with `character`; False if JSON does not allow it."""
        expected = self._next
        if character in "{[":
            if (
                expected not in (_Next.any_value, _Next.value_or_end)
                or len(self._stack) >= MAX_DEPTH
            ):
                return False
            self._stack.append("}" if character == "{" else "]")
            self._next = _Next.key_or_end if character == "{" else _Next.value_or_end
            return True
        if not self._stack:
            return False
        if character in "}]":
            wanted = _Next.key_or_end if character == "}" else _Next.value_or_end
            if character != self._stack[-1] or expected not in (wanted, _Next.comma_or_end):
                return False
            self._stack.pop()
            self._next = _Next.comma_or_end
            return True
        if character == ",":
            self._next = _Next.key if self._stack[-1] == "}" else _Next.any_value
            return expected is _Next.comma_or_end
        if character == ":":
            self._next = _Next.any_value
            return expected is _Next.colon
        if expected in (_Next.key, _Next.key_or_end):
            if self.first_key is None:
                self.first_key = (begin, self.end)
            self._next = _Next.colon
            return character == '"'
        self._next = _Next.comma_or_end
        return expected in _VALUES
