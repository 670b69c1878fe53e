"""Reads and writes tool calls that look like XML: each parameter stands between tags.

The text between the tags is either a string, written as it is, or the JSON of a value. The tag and
the function's schema decide which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ostinato.api.parsing.bodies.body_reader import (
    Begun,
    Calls,
    NotACall,
    OpenText,
    ParameterTypes,
    json_text,
    value_of_text,
)
from ostinato.api.parsing.bodies.parameter_schemas import Parameter, parameters_of
from ostinato.api.parsing.events import ToolCall

__all__ = ("TagLayout", "TaggedBody")

_NAME = re.compile(r"[\w.-]{1,129}")
_MAX_KEY = 256


class TagLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is written with tags.

    A call is `function_begin` NAME `name_end`, then for each parameter `key_begin` KEY `key_end`
    `value_begin` VALUE `value_end`, then `function_end`. There may be white space between the
    parts, but not between NAME and `name_end`. White space next to a value is part of the value.

    If the layout has `json_key_end`, the tag of a key tells the type of its value: a string follows
    `key_end`, and JSON follows `json_key_end`. If the function's schema allows only a string, text
    after `json_key_end` is that string. In a layout without `json_key_end`, the schema tells the
    type.
    """

    before: tuple[str, ...] = ()  # optional texts before `function_begin`
    function_begin: str = ""
    name_end: str = ""
    key_begin: str
    key_end: str
    json_key_end: str = ""
    value_begin: str = ""
    value_end: str
    function_end: str
    own_lines: bool = False  # there is a line end before and after a value; neither is part of it

    def written(self, arguments: str) -> str:
        """Convert arguments from JSON to this layout."""
        given = json.loads(arguments).items()
        texts = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for _, value in given
        )
        return "".join(
            f"{self._head(key, is_text=isinstance(value, str))}{text}{self._tail}"
            for (key, value), text in zip(given, texts, strict=True)
        )

    def part(self, function: str, schema: dict[str, Any] | None, *, strict: bool) -> dict[str, Any]:
        """The xgrammar format of the parameters of a function.

        Raises:
            InvalidRequestError: `strict` is true, and the schema cannot be enforced.
        """
        parameters = parameters_of(function, schema, strict=strict, limits_text=False)
        if parameters is None:
            return self._any_parameters()
        if not parameters:
            return {"type": "const_string", "value": ""}
        return {"type": "sequence", "elements": [self._parameter(one) for one in parameters]}

    def raw_ends(self, key: str) -> tuple[str, str]:
        """The texts before and after a parameter that has a grammar of its own."""
        return self._head(key), self._tail

    def _head(self, key: str, *, is_text: bool = True) -> str:
        key_end = self.key_end if is_text else self.json_key_end or self.key_end
        line = "\n" if self.own_lines else ""
        between = "\n" if self.value_begin else ""
        return f"{self.key_begin}{key}{key_end}{between}{self.value_begin}{line}"

    @property
    def _tail(self) -> str:
        return ("\n" if self.own_lines else "") + self.value_end + "\n"

    def _parameter(self, one: Parameter) -> dict[str, Any]:
        content: dict[str, Any] = {"type": "json_schema", "json_schema": one.schema}
        if one.choices:
            texts = [{"type": "const_string", "value": text} for text in one.choices]
            content = {"type": "or", "elements": texts}
        head = self._head(one.name, is_text=bool(one.choices))
        tag = {"type": "tag", "begin": head, "content": content, "end": self._tail}
        if one.may_be_text and not one.choices:
            tag = self._text(self._head(one.name))
        if one.is_required:
            return tag
        return {"type": "or", "elements": [tag, {"type": "const_string", "value": ""}]}

    def _text(self, head: str) -> dict[str, Any]:
        """A parameter of free text. It ends at the closing tag, in the grammar as in `read`."""
        text = {
            "type": "tag",
            "begin": head,
            "content": {"type": "any_text"},
            "end": self.value_end,
        }
        return {"type": "sequence", "elements": [text, {"type": "const_string", "value": "\n"}]}

    def _any_parameters(self) -> dict[str, Any]:
        key = {"type": "regex", "pattern": r"[A-Za-z_][A-Za-z0-9_]{0,63}"}
        value = self._text(self._head("").removeprefix(self.key_begin))
        if self.json_key_end:
            head = self._head("", is_text=False).removeprefix(self.key_begin)
            any_json = {"type": "json_schema", "json_schema": True}
            other = {"type": "tag", "begin": head, "content": any_json, "end": self._tail}
            value = {"type": "or", "elements": [value, other]}
        content = {"type": "sequence", "elements": [key, value]}
        one = {"type": "tag", "begin": self.key_begin, "content": content, "end": ""}
        return {
            "type": "tags_with_separator",
            "tags": [one],
            "separator": "",
            "at_least_one": False,
        }


class TaggedBody:
    """Reads one call with tags. Each `read` continues where the one before stopped.

    Args:
        layout: how the call is written.
        opening: the marker before the body. It can be the beginning of the function's tag.
        types: the types of the functions' parameters.
        streams: a grammar enforces the syntax, so arguments can be sent as they arrive.
    """

    def __init__(
        self, layout: TagLayout, opening: str, types: ParameterTypes, *, streams: bool
    ) -> None:
        self._layout = layout
        self._types = types
        self._streams = streams
        self._position = 0
        self._name = ""
        self._own_types: Mapping[str, tuple[str, ...]] = {}
        self._key: str | None = None  # the parameter whose value is being read
        self._is_json = False  # the tag of `_key` says that its value is JSON
        self._searched = 0  # the value does not end before this position
        self._keys: set[str] = set()
        self._arguments: list[str] = []  # `"key": value` of each complete parameter
        self._open = OpenText()  # the parameter that is being written, if it is a text
        begins_inside = bool(layout.function_begin) and opening == layout.function_begin
        self._skips = () if begins_inside else layout.before
        if opening in layout.before:
            self._skips = layout.before[layout.before.index(opening) + 1 :]
        self._needs_begin = not begins_inside

    def read(self, body: str) -> Begun | Calls | NotACall:
        while True:
            if not self._name:
                outcome = self._read_head(body)
            elif self._key is None:
                outcome = self._read_key(body)
            else:
                outcome = self._read_value(body)
            if outcome is not None:
                break
        if outcome is NotACall.unfinished and self._streams and self._name:
            return Begun(self._name, "{" + ", ".join(self._arguments) + self._open_text(body))
        return outcome

    def _rest(self, body: str) -> str:
        """The beginning of the unread text, without leading white space."""
        while self._position < len(body) and body[self._position].isspace():
            self._position += 1
        return body[self._position : self._position + 80]

    def _read_head(self, body: str) -> NotACall | None:
        begin = self._layout.function_begin
        for text in (*self._skips, *((begin,) if self._needs_begin and begin else ())):
            rest = self._rest(body)
            if rest.startswith(text):
                self._position += len(text)
            elif text.startswith(rest):
                return NotACall.unfinished
            elif text == begin:
                return NotACall.malformed
        self._skips, self._needs_begin = (), False
        rest = self._rest(body)
        name = _NAME.match(body, self._position)
        if name is None:
            return NotACall.malformed if rest else NotACall.unfinished
        behind, name_end = body[name.end() : name.end() + 80], self._layout.name_end
        if len(name[0]) > 128:
            return NotACall.malformed
        if not behind or (len(behind) < len(name_end) and name_end.startswith(behind)):
            return NotACall.unfinished
        if not behind.startswith(name_end):
            return NotACall.malformed
        self._position = name.end() + len(name_end)
        self._name = name[0]
        self._own_types = self._types.get(self._name, {})
        return None

    def _read_key(self, body: str) -> Calls | NotACall | None:
        layout, rest = self._layout, self._rest(body)
        if rest.startswith(layout.function_end):
            end = self._position + len(layout.function_end)
            arguments = "{" + ", ".join(self._arguments) + "}"
            return Calls([ToolCall(name=self._name, arguments=arguments)], end)
        if not rest.startswith(layout.key_begin):
            ends = (layout.key_begin, layout.function_end)
            may_come = any(one.startswith(rest) for one in ends)
            return NotACall.unfinished if may_come else NotACall.malformed
        begin = self._position + len(layout.key_begin)
        end, key_end = self._find_key_end(body, begin)
        if end < 0:
            return NotACall.malformed if len(body) > begin + _MAX_KEY else NotACall.unfinished
        self._is_json = bool(layout.json_key_end) and key_end == layout.json_key_end
        position = end + len(key_end)
        if layout.value_begin:
            text = body[position : position + 80].lstrip()
            if not text.startswith(layout.value_begin):
                may_come = layout.value_begin.startswith(text) and len(body) < position + 80
                return NotACall.unfinished if may_come else NotACall.malformed
            position = body.index(layout.value_begin, position) + len(layout.value_begin)
        key = body[begin:end].strip()
        if not key:
            return NotACall.malformed
        self._key, self._position, self._searched = key, position, position
        return None

    def _find_key_end(self, body: str, begin: int) -> tuple[int, str]:
        """The position where a key ends (-1 = not known yet), and the text that ends it."""
        layout = self._layout
        texts = filter(None, (layout.key_end, layout.json_key_end))
        found = [(body.find(text, begin, begin + _MAX_KEY), text) for text in texts]
        return min((one for one in found if one[0] >= 0), default=(-1, ""))

    def _types_of_key(self, key: str) -> tuple[str, ...]:
        """The types that the value of a key can have; () = any."""
        if self._layout.json_key_end and not self._is_json:
            return ("string",)
        return self._own_types.get(key, ())

    def _read_value(self, body: str) -> NotACall | None:
        assert self._key is not None, "a key was read"
        value_end = self._layout.value_end
        position = body.find(value_end, self._searched)
        if position < 0:
            self._searched = max(self._searched, len(body) - len(value_end) + 1)
            return NotACall.unfinished
        text = body[self._position : position]
        if self._layout.own_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        value = value_of_text(text, self._types_of_key(self._key))
        key, written = json_text(self._key), json_text(value)
        if key is None or written is None:
            return NotACall.malformed
        if self._key not in self._keys:  # a repeated parameter has no effect
            self._arguments.append(f"{key}: {written}")
            self._keys.add(self._key)
        self._key, self._position = None, position + len(value_end)
        self._open = OpenText()
        return None

    def _open_text(self, body: str) -> str:
        """The part of the JSON of the present parameter that later text cannot change."""
        is_text = self._key is not None and self._types_of_key(self._key) == ("string",)
        if self._key is None or not is_text or self._key in self._keys:
            return ""
        begin, end = self._position, self._layout.value_end
        ends = (end, "\n" + end) if self._layout.own_lines else (end,)
        if self._layout.own_lines and body.startswith("\n", begin):
            begin += 1
        key, written = json_text(self._key), self._open.written(body, begin, ends)
        separator = ", " if self._arguments else ""
        return "" if key is None or written is None else f"{separator}{key}: {written}"
