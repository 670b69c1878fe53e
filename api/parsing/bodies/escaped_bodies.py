"""Reads and writes calls of FunctionGemma: `call:get_weather{city:<escape>Oslo<escape>,days:3}`.

Strings stand between `<escape>` marks, also inside lists and objects. Keys have no quotes. All
other values are written as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from ostinato.api.parsing.bodies.body_reader import (
    Begun,
    Calls,
    NotACall,
    OpenText,
    behind_space,
    json_text,
    value_of_text,
)
from ostinato.api.parsing.bodies.parameter_schemas import Parameter, listed, parameters_of
from ostinato.api.parsing.events import ToolCall

__all__ = ("EscapedBody", "EscapedLayout")

_MARK = "<escape>"
_HEAD = re.compile(r"\s*call:([\w.-]{1,128})\{")
_HEAD_BEGIN = re.compile(r"\s*(c(a(l(l(:[\w.-]{0,128})?)?)?)?)?")
_SIGN = re.compile(rf'{_MARK}|[{{}}\[\]"]')
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_KEY = re.compile(r"\s*([^:,{}\[\]]{1,256}?)\s*:\s*")
_WORD = re.compile(r"[^,\[\]{}]*")
_MAX_DEPTH = 64


class EscapedLayout(msgspec.Struct, frozen=True):
    """How the arguments of a call are written: `KEY:VALUE,KEY:VALUE`."""

    def written(self, arguments: str) -> str:
        """Convert arguments from JSON to this layout."""
        return _text(json.loads(arguments))[1:-1]

    def part(self, function: str, schema: dict[str, Any] | None, *, strict: bool) -> dict[str, Any]:
        """The xgrammar format of the arguments of a function.

        Raises:
            InvalidRequestError: `strict` is true, and the schema has a keyword that cannot be
                enforced.
        """
        parameters = parameters_of(function, schema, strict=strict, limits_text=False)
        if parameters is None:
            key = {"type": "regex", "pattern": r"[A-Za-z_][A-Za-z0-9_]{0,63}:"}
            value = {"type": "json_schema", "json_schema": True}
            content = {"type": "sequence", "elements": [key, value]}
            one = {"type": "tag", "begin": "", "content": content, "end": ""}
            return {
                "type": "tags_with_separator",
                "tags": [one],
                "separator": ",",
                "at_least_one": False,
            }
        return listed(parameters, _argument, ",")

    def raw_ends(self, key: str) -> tuple[str, str]:
        """The texts before and after the value of `key`, if it is the only argument and a text."""
        return f"{key}:{_MARK}", _MARK


def _argument(one: Parameter, separator: str) -> dict[str, Any]:
    begin = f"{separator}{one.name}:"
    if one.choices:
        texts = [{"type": "const_string", "value": f"{_MARK}{text}{_MARK}"} for text in one.choices]
        content: dict[str, Any] = {"type": "or", "elements": texts}
        return {"type": "tag", "begin": begin, "content": content, "end": ""}
    if one.may_be_text:
        text = {"type": "any_text"}
        return {"type": "tag", "begin": begin + _MARK, "content": text, "end": _MARK}
    content = {"type": "json_schema", "json_schema": one.schema}
    return {"type": "tag", "begin": begin, "content": content, "end": ""}


def _text(value: Any) -> str:
    match value:
        case str():
            return f"{_MARK}{value}{_MARK}"
        case dict():
            return "{" + ",".join(f"{key}:{_text(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value)


class EscapedBody:
    """Reads one tool call. Each `read` continues where the one before stopped.

    Args:
        streams: a grammar enforces the syntax, so arguments can be sent as they arrive.
    """

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams
        self._name = ""
        self._position = 0
        self._depth = 0
        self._opened = 0  # position of the last bracket that opened the value of an argument
        self._is_text = False  # the position is between two marks
        self._entries: list[str] = []  # `"key": value` of each complete argument
        self._keys: set[str] = set()
        self._next = 0  # position behind the last complete argument, or behind the comma after it
        self._needs_comma = False
        self._open = OpenText()  # the argument that is being written, if it is a text
        self._is_malformed = False

    def read(self, body: str) -> Begun | Calls | NotACall:
        if not self._name:
            head = _HEAD.match(body)
            if head is None:
                may_come = _HEAD_BEGIN.fullmatch(body) is not None
                return NotACall.unfinished if may_come else NotACall.malformed
            self._name, self._position, self._next = head[1], head.end() - 1, head.end()
        is_whole = self._find_end(body)
        if not is_whole and not self._streams:
            return NotACall.unfinished
        if not self._is_malformed:
            self._read_entries(body, is_whole=is_whole)
        arguments = "{" + ", ".join(self._entries)
        if not is_whole:
            return Begun(self._name, arguments + self._open_text(body))
        end = behind_space(body, self._next)
        # A comma at the end is malformed, except that there can be no argument at all.
        is_complete = self._needs_comma or not self._entries
        is_closed = end == self._position - 1 and body[end] == "}"
        if self._is_malformed or not is_complete or not is_closed:
            return NotACall.malformed
        return Calls([ToolCall(name=self._name, arguments=arguments + "}")], self._position)

    def _read_entries(self, body: str, *, is_whole: bool) -> None:
        """Read the arguments that later text cannot change, from the last complete one on."""
        while True:
            at = behind_space(body, self._next)
            if self._needs_comma:
                if not body.startswith(",", at):
                    return
                self._next, self._needs_comma = at + 1, False
                continue
            key = _KEY.match(body, at)
            if key is None or (not is_whole and self._is_open(body, key.end())):
                return
            begin = key.end()
            name = key[1].strip('"')
            try:
                value, end = _value(body, begin, 1)
            except ValueError:
                # A value with brackets is read when they are closed.
                has_brackets = body.startswith(("{", "["), begin)
                self._is_malformed = is_whole or (has_brackets and self._position > begin)
                return
            if not is_whole and end == len(body) and not body.startswith((_MARK, *'"{['), begin):
                return  # a word can go on
            quoted, written = json_text(name), json_text(value)
            if quoted is None or written is None:
                self._is_malformed = True
                return
            if name not in self._keys:  # a repeated argument has no effect
                self._entries.append(f"{quoted}: {written}")
                self._keys.add(name)
            self._next, self._needs_comma, self._open = end, True, OpenText()

    def _is_open(self, body: str, begin: int) -> bool:
        """Whether the value that begins at `begin` is a text or has brackets that are open."""
        if body.startswith(_MARK, begin):
            return body.find(_MARK, begin + len(_MARK)) < 0
        return self._depth > 1 and self._opened == begin

    def _open_text(self, body: str) -> str:
        """The part of the JSON of an open text that later text cannot change."""
        key = None if self._needs_comma else _KEY.match(body, behind_space(body, self._next))
        if key is None or self._is_malformed or not body.startswith(_MARK, key.end()):
            return ""
        name = key[1].strip('"')
        quoted = None if name in self._keys else json_text(name)
        written = self._open.written(body, key.end() + len(_MARK), (_MARK,))
        if quoted is None or written is None:
            return ""
        separator = ", " if self._entries else ""
        return f"{separator}{quoted}: {written}"

    def _find_end(self, body: str) -> bool:
        """Move the position behind the bracket that closes the arguments, if the text has it."""
        while True:
            if self._is_text:
                end = body.find(_MARK, self._position)
                if end < 0:
                    self._position = max(self._position, len(body) - len(_MARK) + 1)
                    return False
                self._position, self._is_text = end + len(_MARK), False
            sign = _SIGN.search(body, self._position)
            if sign is None:
                self._position = max(self._position, len(body) - len(_MARK) + 1)
                return False
            if sign[0] == '"':
                text = _JSON_STRING.match(body, sign.start())
                if text is None:
                    return False
                self._position = text.end()
                continue
            self._position = sign.end()
            if sign[0] == _MARK:
                self._is_text = True
                continue
            self._depth += 1 if sign[0] in "{[" else -1
            if self._depth == 2 and sign[0] in "{[":
                self._opened = sign.start()
            if self._depth == 0:
                return True


def _value(text: str, begin: int, depth: int) -> tuple[Any, int]:
    """The value that begins at `begin`, and where it ends.

    Raises:
        ValueError: there is no value.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("the value is nested too deeply")
    if text.startswith(_MARK, begin):
        end = text.index(_MARK, begin + len(_MARK))
        return text[begin + len(_MARK) : end], end + len(_MARK)
    if text.startswith('"', begin):
        return json.JSONDecoder(strict=False).raw_decode(text, begin)
    if text.startswith("{", begin):
        found: dict[str, Any] = {}

        def entry(at: int) -> int:
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError("a key is missing")
            value, end = _value(text, key.end(), depth + 1)
            found.setdefault(key[1].strip('"'), value)
            return end

        return found, _entries(text, begin + 1, "}", entry)
    if text.startswith("[", begin):
        items: list[Any] = []

        def item(at: int) -> int:
            value, end = _value(text, behind_space(text, at), depth + 1)
            items.append(value)
            return end

        return items, _entries(text, begin + 1, "]", item)
    word = _WORD.match(text, begin)
    if word is None or not word[0].strip():
        raise ValueError("a value is missing")
    return value_of_text(word[0].strip(), ()), word.end()


def _entries(text: str, begin: int, closing: str, read: Callable[[int], int]) -> int:
    """Read entries that are separated by commas; returns where the closing bracket ends."""
    position = behind_space(text, begin)
    if text.startswith(closing, position):
        return position + 1
    while True:
        position = behind_space(text, read(position))
        if text.startswith(closing, position):
            return position + 1
        if not text.startswith(",", position):
            raise ValueError("a comma is missing")
        position = behind_space(text, position + 1)
