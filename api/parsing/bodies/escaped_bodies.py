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
    json_text,
    value_of_text,
)
from ostinato.api.parsing.bodies.parameter_schemas import Parameter, listed, parameters_of
from ostinato.api.parsing.events import ToolCall
from ostinato.runtime.text.stop_strings import num_held

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
        self._begin = 0  # position of the bracket that opens the arguments
        self._position = 0
        self._depth = 0
        self._is_text = False  # the position is between two marks

    def read(self, body: str) -> Begun | Calls | NotACall:
        if not self._name:
            head = _HEAD.match(body)
            if head is None:
                may_come = _HEAD_BEGIN.fullmatch(body) is not None
                return NotACall.unfinished if may_come else NotACall.malformed
            self._name, self._begin, self._position = head[1], head.end() - 1, head.end() - 1
        if not self._find_end(body):
            if self._streams:
                return Begun(self._name, self._so_far(body))
            return NotACall.unfinished
        try:
            arguments, end = _value(body, self._begin, 0)
        except ValueError:
            return NotACall.malformed
        written = json_text(arguments)
        if end != self._position or written is None:
            return NotACall.malformed
        return Calls([ToolCall(name=self._name, arguments=written)], end)

    def _so_far(self, body: str) -> str:
        """The arguments that later text cannot change, as JSON without the closing bracket."""
        entries: dict[str, str] = {}
        position = self._begin + 1
        while (key := _KEY.match(body, position)) and key[1] not in entries:
            begin = key.end()
            if body.startswith(_MARK, begin) and body.find(_MARK, begin + len(_MARK)) < 0:
                text = body[begin + len(_MARK) :]
                written = json_text(text[: len(text) - num_held(text, (_MARK,))])
                if written is not None:
                    entries[key[1]] = written[:-1]
                break
            try:
                value, end = _value(body, begin, 0)
            except ValueError:
                break
            written = json_text(value)
            may_go_on = end == len(body) and not body.startswith((_MARK, *'"{['), begin)
            if written is None or may_go_on:
                break
            entries[key[1]] = written
            position = _behind_space(body, end)
            if not body.startswith(",", position):
                break
            position += 1
        return "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in entries.items())

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
            value, end = _value(text, _behind_space(text, at), depth + 1)
            items.append(value)
            return end

        return items, _entries(text, begin + 1, "]", item)
    word = _WORD.match(text, begin)
    if word is None or not word[0].strip():
        raise ValueError("a value is missing")
    return value_of_text(word[0].strip(), ()), word.end()


def _entries(text: str, begin: int, closing: str, read: Callable[[int], int]) -> int:
    """Read entries that are separated by commas; returns where the closing bracket ends."""
    position = _behind_space(text, begin)
    if text.startswith(closing, position):
        return position + 1
    while True:
        position = _behind_space(text, read(position))
        if text.startswith(closing, position):
            return position + 1
        if not text.startswith(",", position):
            raise ValueError("a comma is missing")
        position = _behind_space(text, position + 1)


def _behind_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
