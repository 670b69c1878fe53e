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
    """`{"name": ..., "arguments": {...}}`, or a list of such objects."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    def read(self, body: str) -> Calls | NotACall:
        state = self._scanner.scan(body)
        key = self._scanner.first_key
        # An answer that is JSON but not a call is released before its end.
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
    """The call that an object describes; None for another object."""
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
    """What stands between the marker that opens a call and its arguments.

    White space may stand between the parts.
    """

    before: tuple[str, ...] = ()  # texts before the name, each of which may be missing
    id_marker: str = ""  # the call's id stands behind it, before the arguments; it may be missing
    after: tuple[str, ...] = ()  # texts before the arguments, each of which may be missing
    name_is_id: bool = False  # `functions.NAME:3` is the call's id


_RUN = re.compile(r"[\w.:-]{0,161}")
_NAME_OF_ID = re.compile(r"(?:functions\.)?([\w.-]{1,128}?)(?::\d+)?")
_NAME = re.compile(r"[\w.-]{1,128}")


class NamedBody:
    """The function's name, then the arguments as a JSON object, with markers of the format."""

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
        """The name, the id, and where the arguments begin."""
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

    `is_open` is whether the text ended where further text may change what was read.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0
        self.is_open = False

    def skip(self, piece: str) -> bool:
        """Whether the piece comes next; it is passed then."""
        rest = self._rest()
        if rest.startswith(piece):
            self.position += len(piece)
            return True
        self.is_open |= piece.startswith(rest)
        return False

    def run(self) -> str:
        """The letters, digits and signs of a name that come next."""
        self._rest()
        found = _RUN.match(self._text, self.position)
        run = "" if found is None else found[0]
        self.position += len(run)
        self.is_open |= self.position == len(self._text) and len(run) <= 160
        return run

    def at(self, piece: str) -> bool:
        return self._rest().startswith(piece)

    def _rest(self) -> str:
        """The next characters, as many as a piece has at most, behind white space."""
        text = self._text
        while self.position < len(text) and text[self.position].isspace():
            self.position += 1
        self.is_open |= self.position == len(text)
        return text[self.position : self.position + 80]


class ListOrNamedBody:
    """A list of calls as `JsonBody` reads it, or one call as `NamedBody` does."""

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
    """A call whose shape a grammar enforces, so its arguments are certain as they arrive.

    Args:
        opening: the marker before the body.
    """

    def __init__(self, shape: ToolCallFormat, opening: str) -> None:
        self._shape = shape
        # The head of the first call, and that of a further one.
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
        """The call of a custom tool with verbatim text; `length` is the length of the body."""
        end = RAW_END + self._shape.end
        position = text.find(end)
        if position < 0:
            known = text[: len(text) - num_held(text, (end,))]
            return Begun(name, raw_arguments(known, is_whole=False))
        arguments = raw_arguments(text[:position], is_whole=True)
        done = length - len(text) + position + len(end)
        return Calls([ToolCall(name=name, arguments=arguments)], done)
