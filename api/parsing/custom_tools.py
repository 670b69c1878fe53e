"""Calls of custom tools, which a model writes as calls of a function with one text, `input`.

If the tool has a Lark grammar, the grammar cannot be enforced within a JSON string. Then the text
is written verbatim. In formats with JSON or Python arguments, it stands between quote marks, with a
line end before the closing quote mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any

from ostinato.api.parsing.events import CallArguments, CallBegins, Event

__all__ = ("INPUT_SCHEMA", "RAW_BEGIN", "RAW_END", "CustomInputs", "as_arguments", "raw_arguments")

INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
# The texts before and after the verbatim text of a tool with a Lark grammar.
RAW_BEGIN, RAW_END = '"', '\n"'
_BEFORE_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a surrogate pair
# Whole characters of a JSON string. A first half counts as a character only if the text after it is
# known not to be the second half.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rf"|{_HALF}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}"
    rf"|{_HALF}(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F])))*"
)


def as_arguments(text: str) -> dict[str, Any]:
    """The arguments of the function that stands for a custom tool."""
    return {"input": text}


def raw_arguments(text: str, *, is_whole: bool) -> str:
    """The arguments as JSON, from verbatim text.

    If the text is not complete, the closing quote and bracket are left out. So the result for the
    first part of a text is the beginning of the result for the whole text.
    """
    written = json.dumps(as_arguments(text), ensure_ascii=False)
    return written if is_whole else written[: -len('"}')]


class CustomInputs:
    """Replaces the JSON arguments of custom tools by the text in them.

    Args:
        names: the names of the custom tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._json: str | None = None  # unread JSON of a custom tool's call; None = another tool
        self._is_inside = False  # the JSON string of the text has begun

    def feed(self, events: Iterable[Event]) -> list[Event]:
        """Convert events of custom tools. An event without new text is left out."""
        if not self._names:
            return list(events)
        result: list[Event] = []
        for event in events:
            if isinstance(event, CallBegins):
                is_custom = event.name in self._names
                self._json, self._is_inside = "" if is_custom else None, False
                result.append(CallBegins(event.index, event.name, event.id, is_custom))
            elif isinstance(event, CallArguments) and self._json is not None:
                self._json += event.text
                text = self._read()
                if text:
                    result.append(CallArguments(event.index, text, is_custom=True))
            else:
                result.append(event)
        return result

    def _read(self) -> str:
        """Read the complete characters. Half of a surrogate pair becomes U+FFFD."""
        assert self._json is not None, "the call is one of a custom tool"
        if not self._is_inside:
            begin = _BEFORE_INPUT.match(self._json)
            if begin is None:
                return ""
            self._is_inside, self._json = True, self._json[begin.end() :]
        whole = _WHOLE.match(self._json)
        end = 0 if whole is None else whole.end()
        text = json.loads(f'"{self._json[:end]}"', strict=False)
        self._json = self._json[end:]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
