"""Reads and writes tool calls in the form of Python calls: `get_weather(city="Oslo", days=3)`."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from ostinato.api.parsing.bodies.body_reader import (
    Begun,
    Calls,
    NotACall,
    behind_space,
    json_text,
)
from ostinato.api.parsing.bodies.parameter_schemas import Parameter, listed, parameters_of
from ostinato.api.parsing.bodies.python_values import ValueEnd, ValueScanner, literal
from ostinato.api.parsing.custom_tools import RAW_BEGIN, RAW_END, raw_arguments
from ostinato.api.parsing.events import ToolCall
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.stop_strings import num_held
from ostinato.runtime.types.structured_outputs import ToolCallFormat

__all__ = ("OnePythonBody", "PythonBody", "PythonLayout")

_NAME = re.compile(r"[\w.-]{1,129}")
_KEY = re.compile(r"[^\W\d]\w{0,127}")


class PythonLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a list of calls is written. Each call is `NAME(KEY=VALUE, KEY=VALUE)`."""

    begin: str = "["  # the text before the first call; empty = no text
    separator: str = ","  # the text between calls; empty = white space
    end: str = "]"

    def written(self, arguments: str) -> str:
        """Convert arguments from JSON to this layout."""
        given = json.loads(arguments).items()
        return ", ".join(f"{key}={_python_text(value)}" for key, value in given)

    def part(self, function: str, schema: dict[str, Any] | None, *, strict: bool) -> dict[str, Any]:
        """The xgrammar format of the arguments of a function.

        Raises:
            InvalidRequestError: `strict` is true, and the schema cannot be enforced. Or the name of
                a parameter is not a name in Python of at most 128 characters.
        """
        parameters = parameters_of(function, schema, strict=strict, limits_text=True)
        if parameters is None:
            return _any_arguments()
        for one in parameters:
            if not _KEY.fullmatch(one.name):
                raise InvalidRequestError(
                    f"tools: the parameter {one.name!r} of {function!r} must be a name in Python,"
                    " because this model writes calls with named arguments",
                    param="tools",
                    code="invalid_value",
                )
        return listed(parameters, _argument, ", ")

    def raw_ends(self, key: str) -> tuple[str, str]:
        """The texts before and after an argument that has a grammar of its own."""
        return RAW_BEGIN, RAW_END


def _any_arguments() -> dict[str, Any]:
    key = {"type": "regex", "pattern": r"[A-Za-z_][A-Za-z0-9_]{0,63}="}
    value = {"type": "json_schema", "json_schema": True}
    one = {"type": "tag", "begin": "", "content": _sequence([key, value]), "end": ""}
    return {"type": "tags_with_separator", "tags": [one], "separator": ", ", "at_least_one": False}


def _argument(one: Parameter, separator: str) -> dict[str, Any]:
    begin = f"{separator}{one.name}="
    content: dict[str, Any] = {"type": "json_schema", "json_schema": one.schema}
    if one.types == ("boolean",):
        words = [{"type": "const_string", "value": text} for text in ("True", "False")]
        content = {"type": "or", "elements": words}
    return {"type": "tag", "begin": begin, "content": content, "end": ""}


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def _python_text(value: Any) -> str:
    """A value as text: True, False or None as in Python, and everything else as in JSON."""
    if isinstance(value, bool) or value is None:
        return str(value)
    return json.dumps(value, ensure_ascii=False)


class _Call:
    """Reads one call from `begin` on. Each `read` continues where the one before stopped."""

    def __init__(self, begin: int) -> None:
        self.end = begin
        self.name = ""
        self._values: dict[str, str] = {}  # argument -> its value as JSON
        self._key = ""
        self._scanner: ValueScanner | None = None
        self._needs_comma = False

    @property
    def arguments(self) -> str:
        """The arguments whose values are complete, as JSON without the closing bracket."""
        return "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in self._values.items())

    def read(self, text: str) -> NotACall | None:
        """Continue to read. None = the call is complete, and `end` is the position after it."""
        while True:
            outcome = self._read_value(text) if self._scanner else self._read_sign(text)
            if outcome is not True:
                return outcome or None

    def _read_sign(self, text: str) -> NotACall | bool:
        """Read the name, or the text before a value; False = the call is complete."""
        self.end = behind_space(text, self.end)
        if self.end == len(text):
            return NotACall.unfinished
        if not self.name:
            name = _NAME.match(text, self.end)
            if name is None or len(name[0]) > 128:
                return NotACall.malformed
            if name.end() == len(text):
                return NotACall.unfinished
            if text[name.end()] != "(":
                return NotACall.malformed
            self.name, self.end = name[0], name.end() + 1
            return True
        if text[self.end] == ")":
            self.end += 1
            return False
        if self._needs_comma:
            if text[self.end] != ",":
                return NotACall.malformed
            self.end, self._needs_comma = self.end + 1, False
            return True
        key = _KEY.match(text, self.end)
        if key is None:
            return NotACall.malformed
        behind = behind_space(text, key.end())
        if behind == len(text):
            return NotACall.unfinished
        if text[behind] != "=" or key[0] in self._values:
            return NotACall.malformed
        self._key, self._scanner = key[0], ValueScanner(behind + 1)
        self.end = behind + 1
        return True

    def _read_value(self, text: str) -> NotACall | bool:
        assert self._scanner is not None, "a value has begun"
        state = self._scanner.scan(text)
        if state is not ValueEnd.found:
            return NotACall.unfinished if state is ValueEnd.open else NotACall.malformed
        value = literal(text[self.end : self._scanner.end])
        written = None if value is None else json_text(value[0])
        if written is None:
            return NotACall.malformed
        self._values[self._key] = written
        self.end, self._scanner, self._needs_comma = self._scanner.end, None, True
        return True


class PythonBody:
    """Reads all calls of a list. If one of them is malformed, none is a call."""

    def __init__(self, layout: PythonLayout) -> None:
        self._layout = layout
        self._position = 0
        self._calls: list[ToolCall] = []
        self._call: _Call | None = None
        self._has_begun = not layout.begin
        self._needs_separator = False

    def read(self, body: str) -> Calls | NotACall:
        layout = self._layout
        while True:
            if self._call is not None:
                outcome = self._call.read(body)
                if outcome is not None:
                    return outcome
                arguments = self._call.arguments + "}"
                self._calls.append(ToolCall(name=self._call.name, arguments=arguments))
                self._position, self._call = self._call.end, None
                self._needs_separator = bool(layout.separator)
            self._position = behind_space(body, self._position)
            rest = body[self._position : self._position + 80]
            if not rest:
                return NotACall.unfinished
            if not self._has_begun:
                if not rest.startswith(layout.begin):
                    return NotACall.malformed
                self._position, self._has_begun = self._position + len(layout.begin), True
            elif self._calls and rest.startswith(layout.end):
                return Calls(self._calls, self._position + len(layout.end))
            elif self._calls and layout.end.startswith(rest):
                return NotACall.unfinished
            elif self._needs_separator:
                if not rest.startswith(layout.separator):
                    return NotACall.malformed
                self._position, self._needs_separator = (
                    self._position + len(layout.separator),
                    False,
                )
            else:
                self._call = _Call(self._position)


class OnePythonBody:
    """Reads a call whose syntax a grammar enforces. Each argument can be sent when it is complete.

    Args:
        shape: how the call is written.
        opening: the marker before the body.
    """

    def __init__(self, shape: ToolCallFormat, opening: str) -> None:
        self._heads = shape.heads(opening)
        self._call: _Call | None = None

    def read(self, body: str) -> Begun | Calls | NotACall:
        if self._call is None:
            # The head of the first call is longer than that of further calls. The text can end
            # within the longer head.
            head = next((one for one in self._heads if body.startswith(one)), None)
            may_come = any(one.startswith(body) and one != body for one in self._heads)
            if head is None or (not head and may_come):
                return NotACall.unfinished if may_come else NotACall.malformed
            self._call = _Call(len(head))
        outcome = self._call.read(body)
        name = self._call.name
        if outcome is None:
            call = ToolCall(name=name, arguments=self._call.arguments + "}")
            return Calls([call], self._call.end)
        if name and body.startswith(RAW_BEGIN, self._begin(body)):
            return self._raw(name, body)
        return (
            Begun(name, self._call.arguments)
            if name and outcome is NotACall.unfinished
            else outcome
        )

    def _begin(self, body: str) -> int:
        """The position at which the arguments begin."""
        return body.index("(") + 1

    def _raw(self, name: str, body: str) -> Begun | Calls:
        """Read the call of a custom tool whose text is written verbatim."""
        begin = self._begin(body) + len(RAW_BEGIN)
        end = RAW_END + ")"
        position = body.find(end, begin)
        if position < 0:
            text = body[begin:]
            known = text[: len(text) - num_held(text, (end,))]
            return Begun(name, raw_arguments(known, is_whole=False))
        arguments = raw_arguments(body[begin:position], is_whole=True)
        return Calls([ToolCall(name=name, arguments=arguments)], position + len(end))
