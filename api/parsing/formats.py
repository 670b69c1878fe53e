"""The formats in which models write tool calls, and the readers of a call's body.

A format has markers that open and close a call. Without an opening marker a bracket opens a call,
but only at the beginning of an answer or after another call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NoReturn, Protocol

import msgspec

from ostinato.api.parsing.custom_tools import RAW_BEGIN, RAW_END, raw_arguments
from ostinato.api.parsing.events import ToolCall
from ostinato.api.parsing.json_scanner import JsonScanner, JsonState
from ostinato.runtime.text.stop_strings import num_held
from ostinato.runtime.types.structured_outputs import ToolCallFormat

__all__ = ("FORMATS", "Begun", "BodyReader", "CallFormat", "Calls", "NotACall")

_MAX_NAME = 64
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *_ARGUMENT_KEYS)
_LIST_OF_OTHERS = re.compile(r"\s*\[\s*[^\s{]")


class NotACall(Enum):
    """Results of a reader for a body that is not a call, or not yet."""

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
    """Reads one body. Each call of `read` gets the whole text so far."""

    def read(self, body: str) -> Begun | Calls | NotACall: ...


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One format of tool calls."""

    name: str  # its key in FORMATS
    openings: tuple[str, ...] = ()  # markers that open a call anywhere in the answer
    brackets: str = ""  # open a call without a marker
    closings: tuple[str, ...] = ()  # after a call; not part of the content
    reader: Callable[[], BodyReader]
    inner: tuple[str, ...] = ()  # further markers within a body
    shape: ToolCallFormat  # how calls are written if a prompt or a grammar prescribes it
    short_ids: bool = False  # templates require ids of nine letters and digits

    @property
    def markers(self) -> tuple[str, ...]:
        return self.openings + self.closings + self.inner

    def written(self, name: str, arguments: str) -> str:
        """The text of a call in this format."""
        shape = self.shape
        return f"{shape.begin}{name}{shape.middle}{arguments}{shape.end}"

    def constrained(self) -> CallFormat:
        """The format for answers whose grammar enforces `shape`; their arguments are streamed."""
        opening = next((one for one in self.openings if self.shape.begin.startswith(one)), "")
        return msgspec.structs.replace(
            self,
            openings=(opening,) if opening else (),
            reader=lambda: ShapedBody(self.shape, opening),
        )


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
        value = _load(body[: self._scanner.end])
        items = value if isinstance(value, list) else [value]
        calls = [_call(item) for item in items]
        good = [call for call in calls if call is not None]
        if not good or len(good) < len(calls):
            return NotACall.malformed
        return Calls(good, self._scanner.end)


_MISTRAL_NAME = re.compile(
    r"\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_MISTRAL_BEGINNING = re.compile(r"\s*[\w.-]{0,128}\s*(?:\[[\w\]]{0,128}\s*)*")


class MistralBody:
    """A list of calls, or `name{...}`, with `[CALL_ID]id` and `[ARGS]` if the model has them."""

    def __init__(self) -> None:
        self._list = JsonBody()
        self._scanner = JsonScanner()

    def read(self, body: str) -> Calls | NotACall:
        text = body.lstrip()
        if text.startswith("["):
            outcome = self._list.read(text)
            if isinstance(outcome, Calls):
                return Calls(outcome.calls, outcome.end + len(body) - len(text))
            return outcome
        name = _MISTRAL_NAME.match(body)
        if name is None:
            may_become = "{" not in body and _MISTRAL_BEGINNING.fullmatch(body)
            return NotACall.unfinished if may_become else NotACall.malformed
        state = self._scanner.scan(body[name.end() :])
        if state is not JsonState.done:
            return NotACall.unfinished if state is JsonState.open else NotACall.malformed
        end = name.end() + self._scanner.end
        arguments = _arguments(_load(body[name.end() : end]))
        if arguments is None:
            return NotACall.malformed
        return Calls([ToolCall(name=name[1], arguments=arguments, id=name[2])], end)


class ShapedBody:
    """A call whose shape a grammar enforces, so its arguments are certain as they arrive.

    Args:
        opening: the marker before the body.
    """

    def __init__(self, shape: ToolCallFormat, opening: str) -> None:
        self._shape = shape
        self._head = shape.begin.removeprefix(opening)
        self._scanner = JsonScanner()

    def read(self, body: str) -> Begun | Calls | NotACall:
        head, middle, end = self._head, self._shape.middle, self._shape.end
        if not body.startswith(head):
            return NotACall.unfinished if head.startswith(body) else NotACall.malformed
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
        """The call of a custom tool whose text stands as it is; `length` of the body."""
        end = RAW_END + self._shape.end
        position = text.find(end)
        if position < 0:
            known = text[: len(text) - num_held(text, (end,))]
            return Begun(name, raw_arguments(known, is_whole=False))
        arguments = raw_arguments(text[:position], is_whole=True)
        done = length - len(text) + position + len(end)
        return Calls([ToolCall(name=name, arguments=arguments)], done)


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        name="hermes",
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        reader=JsonBody,
        shape=ToolCallFormat(
            begin='<tool_call>\n{"name": "',
            middle='", "arguments": ',
            end="}\n</tool_call>",
            trigger="<tool_call>",
        ),
    ),
    "llama3_json": CallFormat(
        name="llama3_json",
        openings=("<|python_tag|>",),
        brackets="{",
        closings=(";",),
        reader=JsonBody,
        shape=ToolCallFormat(
            begin='{"name": "',
            middle='", "parameters": ',
            end="}",
            trigger='{"name": "',
            separator="; ",
        ),
    ),
    "mistral": CallFormat(
        name="mistral",
        openings=("[TOOL_CALLS]",),
        reader=MistralBody,
        inner=("[ARGS]", "[CALL_ID]"),
        shape=ToolCallFormat(
            begin='[TOOL_CALLS][{"name": "',
            middle='", "arguments": ',
            end="}]",
            trigger="[TOOL_CALLS]",
        ),
        short_ids=True,
    ),
    "granite": CallFormat(
        name="granite",
        openings=("<|tool_call|>", "<tool_call>"),
        reader=JsonBody,
        shape=ToolCallFormat(
            begin='<|tool_call|>[{"name": "',
            middle='", "arguments": ',
            end="}]",
            trigger="<|tool_call|>",
        ),
    ),
    "phi4_mini_json": CallFormat(
        name="phi4_mini_json",
        openings=("functools", "<|tool_call|>"),
        closings=("<|/tool_call|>",),
        reader=JsonBody,
        shape=ToolCallFormat(
            begin='<|tool_call|>[{"name": "',
            middle='", "arguments": ',
            end="}]<|/tool_call|>",
            trigger="<|tool_call|>",
        ),
    ),
    "json": CallFormat(
        name="json",
        openings=("```json",),
        brackets="{[",
        closings=("```",),
        reader=JsonBody,
        shape=ToolCallFormat(
            begin='{"name": "', middle='", "arguments": ', end="}", trigger='{"name": "'
        ),
    ),
}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _load(text: str) -> Any:
    """The JSON value; None for text that is not JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _call(item: Any) -> ToolCall | None:
    """The call that an object describes; None for another object."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    given = [item[key] for key in _ARGUMENT_KEYS if key in item]
    if len(given) > 1:
        return None
    arguments = _arguments(given[0] if given else {})
    call_id = item.get("id")
    if arguments is None:
        return None
    return ToolCall(
        name=item["name"],
        arguments=arguments,
        id=call_id if isinstance(call_id, str) and call_id else None,
    )


def _arguments(value: Any) -> str | None:
    """Arguments as JSON text; some models write that text within a JSON string."""
    if isinstance(value, str):
        value = _load(value)
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return text
