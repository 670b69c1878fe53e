"""Tools of a request: checks of `tools` and `tool_choice`, and messages for the chat template."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ostinato.api.parsing.formats import CallFormat
from ostinato.api.schemas.conversation import FunctionTool, Message, NamedToolChoice, Tool
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("ToolUse", "explained", "new_call_id", "template_messages", "tool_use")

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_ALPHANUMERIC = string.ascii_letters + string.digits


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The functions that the model may call; the default is none."""

    tools: tuple[Tool, ...] = ()
    parallel: bool = True  # an answer may have several calls
    must_call: bool = False  # the answer has calls and no text
    only_name: str | None = None  # the only function that may be called; None = all

    @property
    def callable_tools(self) -> list[FunctionTool]:
        functions = [tool.function for tool in self.tools]
        return [one for one in functions if self.only_name in (None, one.name)]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(one.name for one in self.callable_tools)

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of some function must match its schema."""
        return any(one.strict for one in self.callable_tools)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        shown = []
        for tool in self.tools:
            function = {"name": tool.function.name, "description": tool.function.description or ""}
            parameters = tool.function.parameters or {"type": "object", "properties": {}}
            shown.append({"type": "function", "function": {**function, "parameters": parameters}})
        return shown


def tool_use(
    tools: Sequence[Tool] | None,
    choice: str | NamedToolChoice | None,
    parallel_tool_calls: bool | None,
) -> ToolUse:
    """The functions that the request's fields offer.

    Raises:
        InvalidRequestError: the fields contradict each other, or name an unknown function.
    """
    offered = tuple(tools or ())
    names = [tool.function.name for tool in offered]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise _invalid("tools", f"tools has two functions named {repeated!r}; rename one")
    only_name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if choice not in (None, "none", "auto") and not offered:
        raise _invalid("tool_choice", "tool_choice needs tools: there is nothing to call")
    if only_name is not None and only_name not in names:
        raise _invalid(
            "tool_choice", f"tool_choice names {only_name!r}, tools has {', '.join(names)}"
        )
    for index, tool in enumerate(offered):
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            place = f"tools[{index}].function.parameters"
            raise _invalid(place, f"{place}.type must be 'object', got {kind!r:.60}")
    if choice == "none":
        return ToolUse()
    return ToolUse(
        tools=offered,
        # `tool_choice` with a name asks for one call.
        parallel=parallel_tool_calls is not False and only_name is None,
        must_call=choice == "required" or only_name is not None,
        only_name=only_name,
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them.

    Raises:
        InvalidRequestError: a message lacks a field that its role needs, or has a field of another
            role.
    """
    return [_template_message(message, index) for index, message in enumerate(messages)]


def _template_message(message: Message, index: int) -> dict[str, Any]:
    place = f"messages[{index}]"
    is_custom = message.role not in _ROLES  # the template checks such messages
    if message.text is None and not message.tool_calls and not is_custom:
        raise InvalidRequestError(
            f"{place}.content is required", param=f"{place}.content", code="missing_field"
        )
    for name, role in (
        ("tool_calls", "assistant"),
        ("reasoning", "assistant"),
        ("reasoning_content", "assistant"),
        ("refusal", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if getattr(message, name) and message.role != role and not is_custom:
            raise _invalid(f"{place}.{name}", f"{place}.{name} is for the role {role!r}")
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequestError(
            f"{place}.tool_call_id is required: the id of the call that this message answers",
            param=f"{place}.tool_call_id",
            code="missing_field",
        )
    shown: dict[str, Any] = {
        **(message.template_fields or {}),
        "role": message.role,
        "content": message.text,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _object(
                        call.function.arguments, f"{place}.tool_calls[{position}].function"
                    ),
                },
            }
            for position, call in enumerate(message.tool_calls or ())
        ]
        or None,
    }
    return {name: value for name, value in shown.items() if value is not None}


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _invalid(f"{place}.arguments", f"{place}.arguments must be a JSON object as text")
    return value


def explained(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallFormat
) -> list[dict[str, Any]]:
    """The conversation for a template that can not show tools: messages describe them.

    The system message lists the functions. Calls become text of the assistant in the format of the
    parser, and results become messages of the user.
    """
    shown: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # id of a call -> name of its function
    for message in messages:
        calls = message.get("tool_calls") or ()
        for call in calls:
            names[call["id"]] = call["function"]["name"]
        texts = [message.get("content") or ""]
        texts += [
            form.written(call["function"]["name"], _json(call["function"]["arguments"]))
            for call in calls
        ]
        text = "\n".join(filter(None, texts))
        if message["role"] == "tool":
            name = names.get(message["tool_call_id"], message["tool_call_id"])
            shown.append({"role": "user", "content": f"Result of {name}: {text}"})
        else:
            rest = {key: message[key] for key in message if key != "tool_calls"}
            shown.append({**rest, "content": text})
    if tools:
        example = form.written("NAME", '{"KEY": "VALUE"}')
        functions = "\n".join(_json(tool["function"]) for tool in tools)
        text = (
            f"You can call functions. To call one, answer with\n{example}\nFunctions:\n{functions}"
        )
        if shown and shown[0]["role"] in ("system", "developer"):
            shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{text}"}
        else:
            shown.insert(0, {"role": "system", "content": text})
    return shown


def new_call_id(form: CallFormat | None) -> str:
    """A random id for a call without one."""
    if form is not None and form.short_ids:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _invalid(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_value")
