"""Reads Python literals: strings, numbers, True, False, None, lists, tuples and dictionaries.

The words of JSON (true, false, null) are read too, because models mix both. Nothing is evaluated.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

__all__ = ("ValueEnd", "ValueScanner", "literal")

MAX_DEPTH = 64
_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<sign>[\[\](){},:])"
    r"|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))|(?P<word>[A-Za-z]+(?!\w))"
    r"|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")",
    re.DOTALL,
)
_WORDS = {
    "True": True, "true": True, "False": False, "false": False, "None": None, "null": None,
}  # fmt: skip
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_SHORT = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": "",
    "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip
_CLOSING = {"(": ")", "[": "]", "{": "}"}
# Characters that do not affect where a value ends.
_PLAIN = re.compile(r"[^'\"\[\](){},]+")
# One way to match, so no possessive quantifiers: Python before 3.11.5 matches them wrongly.
_IN_STRING = {
    quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in "'\""
}


class _NotALiteral(ValueError):
    pass


def literal(text: str) -> tuple[Any] | None:
    """The value of a literal, in a tuple; None if the text is not a literal."""
    try:
        tokens = _tokens(text)
        value, end = _value(tokens, 0)
    except (_NotALiteral, ValueError, RecursionError, OverflowError, IndexError):
        return None
    return (value,) if end == len(tokens) else None


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise _NotALiteral
        if match.lastgroup != "space":
            found.append((match.lastgroup, match[0]))
        position = match.end()
    return found


def _value(tokens: list[tuple[str, str]], at: int, depth: int = 0) -> tuple[Any, int]:
    kind, text = tokens[at]
    if depth > MAX_DEPTH:
        raise _NotALiteral
    if kind == "number":
        return (float(text) if any(sign in text for sign in ".eE") else int(text)), at + 1
    if kind == "word" and text in _WORDS:
        return _WORDS[text], at + 1
    if kind == "string":
        parts: list[str] = []
        while at < len(tokens) and tokens[at][0] == "string":  # adjacent strings are one string
            parts.append(_ESCAPE.sub(_character, tokens[at][1][1:-1]))
            at += 1
        # Two escapes of a surrogate pair, as in JSON, are one character.
        return "".join(parts).encode("utf-16-le", "surrogatepass").decode("utf-16-le"), at
    if kind == "sign" and text in _CLOSING:
        return _collection(tokens, at, depth)
    raise _NotALiteral


def _collection(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[Any, int]:
    begin = tokens[at][1]
    closing = ("sign", _CLOSING[begin])
    items: list[Any] = []
    keys: list[str] = []
    at, has_comma = at + 1, False
    while tokens[at] != closing:
        value, at = _value(tokens, at, depth + 1)
        if begin == "{":
            if not isinstance(value, str) or tokens[at] != ("sign", ":"):
                raise _NotALiteral
            keys.append(value)
            value, at = _value(tokens, at + 1, depth + 1)
        items.append(value)
        has_comma = tokens[at] == ("sign", ",")
        if has_comma:
            at += 1
        elif tokens[at] != closing:
            raise _NotALiteral
    if begin == "{":
        return dict(zip(keys, items, strict=True)), at + 1
    if begin == "(" and len(items) == 1 and not has_comma:
        return items[0], at + 1
    return items, at + 1


def _character(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is not None:
        return chr(int(code, 16))
    if match[4] is not None:
        return chr(int(match[4], 8))
    return _SHORT.get(match[5], match[0])


class ValueEnd(Enum):
    """Results of a scan for the end of a value."""

    open = "open"
    found = "found"
    broken = "broken"


class ValueScanner:
    """Finds the comma or the closing bracket after a value, in a growing text.

    Attributes:
        end: the position where the value ends; valid after `scan` has returned `found`.
    """

    def __init__(self, begin: int) -> None:
        self.end = begin
        self._stack: list[str] = []
        self._quote = ""

    def scan(self, text: str) -> ValueEnd:
        """Continue where the last scan stopped. `text` is the whole text so far."""
        while self.end < len(text):
            if self._quote:
                match = _IN_STRING[self._quote].match(text, self.end)
                self.end = match.end() if match else self.end
                if self.end >= len(text) or text[self.end] == "\\":
                    return ValueEnd.open
                self._quote = ""
                self.end += 1
                continue
            plain = _PLAIN.match(text, self.end)
            if plain is not None:
                self.end = plain.end()
                continue
            character = text[self.end]
            if character in "'\"":
                self._quote = character
            elif character in _CLOSING:
                if len(self._stack) >= MAX_DEPTH:
                    return ValueEnd.broken
                self._stack.append(_CLOSING[character])
            elif character != ",":
                if not self._stack:
                    return ValueEnd.found
                if self._stack.pop() != character:
                    return ValueEnd.broken
            elif not self._stack:
                return ValueEnd.found
            self.end += 1
        return ValueEnd.open
