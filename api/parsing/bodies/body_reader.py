"""The interface of readers of a tool call's body, and functions that read values.

The body of a call is the text between the markers of the call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, NoReturn, Protocol

import msgspec

from ostinato.api.parsing.events import ToolCall
from ostinato.runtime.text.stop_strings import num_held

__all__ = (
    "Begun",
    "BodyReader",
    "Calls",
    "NotACall",
    "OpenText",
    "ParameterTypes",
    "behind_space",
    "json_text",
    "load_json",
    "object_text",
    "value_of_text",
)

# Function -> parameter -> the JSON types that the parameter's schema allows; () = any.
ParameterTypes = Mapping[str, Mapping[str, tuple[str, ...]]]


class NotACall(Enum):
    """Results of a reader for a body that is not a call, or is not known to be one yet."""

    unfinished = "unfinished"
    malformed = "malformed"


class Calls(msgspec.Struct, frozen=True):
    """A complete body."""

    calls: list[ToolCall]
    end: int  # length of the body


class Begun(msgspec.Struct, frozen=True):
    """An incomplete body that is certainly a call, with the arguments so far."""

    name: str
    arguments: str


class BodyReader(Protocol):
    """Reads one body. `read` always gets the whole text of the body so far."""

    def read(self, body: str) -> Begun | Calls | NotACall: ...


def behind_space(text: str, position: int) -> int:
    """The position of the first character from `position` on that is not white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Each call of `json.loads` or `json.dumps` with options would make an object of these classes.
_decode = json.JSONDecoder(strict=False, parse_constant=_refuse_constant).decode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def load_json(text: str) -> Any:
    """The JSON value; None for text that is not JSON."""
    try:
        return _decode(text)
    except (ValueError, RecursionError):
        return None


def json_text(value: Any) -> str | None:
    """A value as JSON text; None if JSON or UTF-8 cannot express the value."""
    try:
        text = _encode(value)
        text.encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return text


def object_text(value: Any) -> str | None:
    """Arguments as the JSON text of an object. Some models write this text in a JSON string."""
    if isinstance(value, str):
        value = load_json(value)
    return json_text(value) if isinstance(value, dict) else None


_TYPES = {dict: "object", list: "array", bool: "boolean", int: "integer", float: "number"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def value_of_text(text: str, types: tuple[str, ...]) -> Any:
    """The value that a model wrote as bare text, without quotes around strings.

    If the parameter's schema allows other types than string, the text is read as JSON, or as
    Python's True, False or None. Text without a value of an allowed type is a string.

    Args:
        text: the text.
        types: the JSON types that the parameter's schema allows; empty = any.
    """
    if types == ("string",):
        return text
    word = text.strip()
    word = _PYTHON_WORDS.get(word, word)
    value = load_json(word)
    if value is None and word != "null":
        return text
    kind = "null" if value is None else _TYPES.get(type(value), "string")
    allowed = {*types, *(("integer",) if "number" in types else ())}
    is_string = kind == "string" and "string" in allowed | ({"string"} if not types else set())
    if is_string or (types and kind not in allowed) or json_text(value) is None:
        return text
    return value


class OpenText:
    """The JSON of a text that grows. Each call encodes only what is new."""

    def __init__(self) -> None:
        self._length = 0  # number of characters that are encoded
        self._json = '"'

    def written(self, body: str, begin: int, ends: tuple[str, ...]) -> str | None:
        """The JSON of the text from `begin` on, without the closing quote.

        A beginning of one of `ends` at the end of the text is left out. Only `body` may differ
        between calls, and only by text at its end. None = JSON cannot express the text.
        """
        new = body[begin + self._length :]
        new = new[: len(new) - num_held(new, ends)]
        encoded = json_text(new)
        if encoded is None:
            return None
        self._length += len(new)
        self._json += encoded[1:-1]
        return self._json
