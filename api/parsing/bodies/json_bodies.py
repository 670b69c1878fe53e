"""Readers of calls whose arguments are a JSON object."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ostinato.api.parsing.bodies.body_reader import (
    Begun,
    Calls,
    NotACall,
    load_json,
    object_text,
)
from ostinato.api.parsing.custom_tools import RAW_BEGIN, RAW_END, raw_arguments
from ostinato.api.parsing.events import ToolCall
from ostinato.api.parsing.json_scanner import JsonScanner, JsonState
from ostinato.runtime.text.stop_strings import num_held
from ostinato.runtime.types.structured_outputs import ToolCallFormat

__all__ = ("Header", "JsonBody", "ListOrNamedBody", "NamedBody", "ShapedBody")

_MAX_NAME = 64
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *_ARGUMENT_KEYS)
_LIST_OF_OTHERS = re.compile(r"\s*\[\s*[^\s{]")


class JsonBody:
    """Reads `{"name": ..., "arguments": {...}}`, or a list of such objects."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    def read(self, body: str) -> Calls | NotACall:
        state = self._scanner.scan(body)
        key = self._scanner.first_key
        # JSON that is not a call is recognised before its end, so that its text can be shown.
        if _LIST_OF_OTHERS.match(body) or (
            key is not None and body[key[0] + 1 : key[1] - 1] not in _KEYS
        ):
            return NotACall.malformed
        if state is not JsonState.done:
            return NotACall.unfinished if state is JsonState.open else NotACall.malformed
        value = load_json(body[: self._scanner.end])
        items = value if isinstance(value, list) else [value]
        calls = [_call(item) for item in items]
        good = [call for call in calls if call is not None]
        if not good or len(good) < len(calls):
            return NotACall.malformed
        return Calls(good, self._scanner.end)


def _call(item: Any) -> ToolCall | None:
    """The call that an object describes; None if it describes no call."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    given = [item[key] for key in _ARGUMENT_KEYS if key in item]
    if len(given) > 1:
        return None
    arguments = object_text(given[0] if given else {})
    call_id = item.get("id")
    if arguments is None:
        return None
    return ToolCall(
        name=item["name"],
        arguments=arguments,
        id=call_id if isinstance(call_id, str) and call_id else None,
    )


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The text between the marker that opens a call and the call's arguments.

    There may be white space between the parts.
    """

    before: tuple[str, ...] = ()  # optional texts before the name
    id_marker: str = ""  # an optional text after the name; the call's id follows it
    after: tuple[str, ...] = ()  # optional texts before the arguments
    name_is_id: bool = False  # the name is written as `functions.NAME:3`, which is also the id


_RUN = re.compile(r"[\w.:-]{0,161}")
_NAME_OF_ID = re.compile(r"(?:functions\.)?([\w.-]{1,128}?)(?::\d+)?")
_NAME = re.compile(r"[\w.-]{1,128}")


class NamedBody:
    """Reads the function's name with the markers of the header, then the arguments as JSON."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._scanner = JsonScanner()

    def read(self, body: str) -> Calls | NotACall:
        found = self._read_header(body)
        if isinstance(found, NotACall):
            return found
        name, call_id, begin = found
        state = self._scanner.scan(body[begin:])
        if state is not JsonState.done:
            return NotACall.unfinished if state is JsonState.open else NotACall.malformed
        end = begin + self._scanner.end
        arguments = object_text(load_json(body[begin:end]))
        if arguments is None:
            return NotACall.malformed
        return Calls([ToolCall(name=name, arguments=arguments, id=call_id)], end)

    def _read_header(self, body: str) -> tuple[str, str | None, int] | NotACall:
        """Read the header; returns the name, the id, and where the arguments begin."""
        header, reader = self._header, _Pieces(body)
        for text in header.before:
            reader.skip(text)
        run = reader.run()
        call_id = None
        if header.id_marker and reader.skip(header.id_marker):
            call_id = reader.run()
        for text in header.after:
            reader.skip(text)
        has_arguments = reader.at("{")
        if reader.is_open:
            return NotACall.unfinished
        matched = (_NAME_OF_ID if header.name_is_id else _NAME).fullmatch(run)
        if matched is None or not has_arguments:
            return NotACall.malformed
        if header.name_is_id:
            return matched[1], run if run != matched[1] else None, reader.position
        return run, call_id or None, reader.position


class _Pieces:
    """Reads the pieces of a header one after the other.

    `is_open` is true if the text ended at a place where further text can change the result.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0
        self.is_open = False

    def skip(self, piece: str) -> bool:
        """Skip `piece` if it comes next; returns whether it did."""
        rest = self._rest()
        if rest.startswith(piece):
            self.position += len(piece)
            return True
        self.is_open |= piece.startswith(rest)
        return False

    def run(self) -> str:
        """Read the characters of a name that come next."""
        self._rest()
        found = _RUN.match(self._text, self.position)
        run = "" if found is None else found[0]
        self.position += len(run)
        self.is_open |= self.position == len(self._text) and len(run) <= 160
        return run

    def at(self, piece: str) -> bool:
        return self._rest().startswith(piece)

    def _rest(self) -> str:
        """The next 80 characters after white space. No marker is longer."""
        text = self._text
        while self.position < len(text) and text[self.position].isspace():
            self.position += 1
        self.is_open |= self.position == len(text)
        return text[self.position : self.position + 80]


class ListOrNamedBody:
    """Either a list of calls, which `JsonBody` reads, or one call, which `NamedBody` reads."""

    def __init__(self, header: Header) -> None:
        self._list, self._named = JsonBody(), NamedBody(header)

    def read(self, body: str) -> Calls | NotACall:
        text = body.lstrip()
        if not text.startswith("["):
            return self._named.read(body)
        outcome = self._list.read(text)
        if isinstance(outcome, Calls):
            return Calls(outcome.calls, outcome.end + len(body) - len(text))
        return outcome


class ShapedBody:
    """Reads a call whose syntax a grammar enforces. So its arguments can be sent as they arrive.

    Args:
        shape: how the call is written.
        opening: the marker before the body.
    """

    def __init__(self, shape: ToolCallFormat, opening: str) -> None:
        self._shape = shape
        # The text before the name in the first call, and in further calls.
        self._heads = shape.heads(opening)
        self._scanner = JsonScanner()

    def read(self, body: str) -> Begun | Calls | NotACall:
        middle, end = self._shape.middle, self._shape.end
        head = next((one for one in self._heads if body.startswith(one)), None)
        if head is None:
            may_come = any(one.startswith(body) for one in self._heads)
            return NotACall.unfinished if may_come else NotACall.malformed
        position = body.find(middle, len(head))
        if position < 0:
            too_long = len(body) > len(head) + _MAX_NAME + len(middle)
            return NotACall.malformed if too_long else NotACall.unfinished
        name, text = body[len(head) : position], body[position + len(middle) :]
        if text.startswith(RAW_BEGIN):
            return self._raw(name, text.removeprefix(RAW_BEGIN), len(body))
        state = self._scanner.scan(text)
        arguments, rest = text[: self._scanner.known_end], text[self._scanner.known_end :]
        if state is JsonState.open:
            return Begun(name, arguments.lstrip())
        if state is JsonState.done and end.startswith(rest) and rest != end:
            return Begun(name, arguments.lstrip())
        behind = len(end) if rest.startswith(end) else 0
        done = len(body) - len(rest) + behind
        return Calls([ToolCall(name=name, arguments=arguments.lstrip())], done)

    def _raw(self, name: str, text: str, length: int) -> Begun | Calls:
        """Read the call of a custom tool with verbatim text.

        Args:
            name: the tool's name.
            text: the body after the head and `RAW_BEGIN`.
            length: the length of the whole body.
        """
        end = RAW_END + self._shape.end
        position = text.find(end)
        if position < 0:
            known = text[: len(text) - num_held(text, (end,))]
            return Begun(name, raw_arguments(known, is_whole=False))
        arguments = raw_arguments(text[:position], is_whole=True)
        done = length - len(text) + position + len(end)
        return Calls([ToolCall(name=name, arguments=arguments)], done)
