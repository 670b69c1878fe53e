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

__all__ = (
    "Begun",
    "BodyReader",
    "Calls",
    "NotACall",
    "ParameterTypes",
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


def load_json(text: str) -> Any:
    """The JSON value; None for text that is not JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def json_text(value: Any) -> str | None:
    """A value as JSON text; None if JSON or UTF-8 cannot express the value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
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
