"""Checks `tools` and `tool_choice` of a request; converts messages for the chat template."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ostinato.api.parsing.call_format import CallFormat
from ostinato.api.parsing.custom_tools import INPUT_SCHEMA, as_arguments
from ostinato.api.schemas.conversation import (
    AllowedToolsChoice,
    ContentPart,
    CustomTool,
    CustomToolEntry,
    FunctionTool,
    GrammarInput,
    MediaPart,
    Message,
    MessageToolCall,
    NamedCustomToolChoice,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.template_media import MEDIA_PARTS, text_part
from ostinato.runtime.media_files.media_kinds import MediaKind

__all__ = ("ToolUse", "explained", "new_call_id", "template_messages", "tool_use")

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_ROLES = frozenset({"system", "developer", "assistant"})  # their messages have no media
_ALPHANUMERIC = string.ascii_letters + string.digits
_NUM_LISTED = 5  # tools that an error lists
# The escape of half a surrogate pair. Clients that cut a text can cut a pair.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The functions that the prompt shows, and which of them the model may call. Default: none.

    The model sees a custom tool as a function with one text argument, `input`.
    """

    tools: tuple[FunctionTool, ...] = ()
    custom_names: frozenset[str] = frozenset()
    lark_grammars: dict[str, str] = {}  # grammars of custom tools' inputs, by tool name
    parallel: bool = True  # an answer may have several calls
    must_call: bool = False  # the answer has calls and no text
    only_names: frozenset[str] | None = None  # the tools that may be called; None = all

    @property
    def callable_tools(self) -> list[FunctionTool]:
        names = self.only_names
        return [one for one in self.tools if names is None or one.name in names]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(one.name for one in self.callable_tools)

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of at least one function must match its schema."""
        return any(one.strict for one in self.callable_tools)

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar constrains calls even if no call is required."""
        return self.is_strict or self.only_names is not None or bool(self.names & self.custom_names)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools in the format of chat templates."""
        shown = []
        for tool in self.tools:
            function = {"name": tool.name, "description": tool.description or ""}
            parameters = tool.parameters or {"type": "object", "properties": {}}
            shown.append({"type": "function", "function": {**function, "parameters": parameters}})
        return shown


def tool_use(
    tools: Sequence[Tool | CustomToolEntry] | None,
    choice: str | ToolChoice | None,
    parallel_tool_calls: bool | None,
) -> ToolUse:
    """The functions that the request's fields offer.

    Raises:
        InvalidRequestError: two tools have the same name, the parameters of a function are not an
            object, there is no tool to choose from, or `choice` names an unknown tool.
    """
    offered = tuple(tools or ())
    custom = {one.custom.name: one.custom for one in offered if isinstance(one, CustomToolEntry)}
    functions = tuple(
        one.function if isinstance(one, Tool) else _as_function(one.custom) for one in offered
    )
    names = [one.name for one in functions]
    repeated = next((name for name, count in Counter(names).items() if count > 1), None)
    if repeated is not None:
        raise _invalid("tools", f"tools has two tools named {repeated!r}; rename one")
    if choice not in (None, "none", "auto") and not offered:
        raise _invalid("tool_choice", "tool_choice needs tools: there is nothing to call")
    only_names = _only_names(choice, names, custom)
    for index, one in enumerate(functions):
        kind = (one.parameters or {}).get("type", "object")
        if kind != "object":
            place = f"tools[{index}].function.parameters"
            raise _invalid(place, f"{place}.type must be 'object', got {kind!r:.60}")
    if choice == "none":
        return ToolUse()
    is_named = isinstance(choice, NamedToolChoice | NamedCustomToolChoice)
    asks_for_call = isinstance(choice, AllowedToolsChoice) and (
        choice.allowed_tools.mode == "required"
    )
    return ToolUse(
        tools=functions,
        custom_names=frozenset(custom),
        lark_grammars={
            name: one.format.grammar.definition
            for name, one in custom.items()
            if isinstance(one.format, GrammarInput) and one.format.grammar.syntax == "lark"
        },
        # `tool_choice` with a name asks for one call.
        parallel=parallel_tool_calls is not False and not is_named,
        must_call=choice == "required" or is_named or asks_for_call,
        only_names=only_names,
    )


def _as_function(tool: CustomTool) -> FunctionTool:
    """The function that stands for a custom tool."""
    description, parameters, strict = tool.description, INPUT_SCHEMA, None
    if isinstance(tool.format, GrammarInput):
        grammar = tool.format.grammar
        kind = "regular expression" if grammar.syntax == "regex" else "Lark grammar"
        text = f"The input matches this {kind}:\n{grammar.definition}"
        description = "\n".join(filter(None, [description, text]))
        if grammar.syntax == "regex":
            value = {"type": "string", "pattern": f"^(?:{grammar.definition})$"}
            parameters, strict = {**INPUT_SCHEMA, "properties": {"input": value}}, True
    return FunctionTool(
        name=tool.name, description=description, parameters=parameters, strict=strict
    )


def _only_names(
    choice: str | ToolChoice | None, names: Sequence[str], custom: Mapping[str, CustomTool]
) -> frozenset[str] | None:
    """The names that `tool_choice` allows; None = all.

    Raises:
        InvalidRequestError: `choice` names an unknown tool.
    """
    if choice is None or isinstance(choice, str):
        return None
    allowed = choice.allowed_tools.tools if isinstance(choice, AllowedToolsChoice) else [choice]
    known = {(name, name in custom) for name in names}
    for one in allowed:
        name, is_custom = _named(one)
        if (name, is_custom) not in known:
            kind = "custom tool" if is_custom else "function"
            others = [other for other in names if (other in custom) == is_custom]
            has = _listed(others) if others else f"no {kind}"
            raise _invalid(
                "tool_choice", f"tool_choice names the {kind} {name!r}, and tools has {has}"
            )
    return frozenset(_named(one)[0] for one in allowed)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NUM_LISTED
    return ", ".join(names[:_NUM_LISTED]) + (f" and {more} more" if more > 0 else "")


def _named(choice: NamedToolChoice | NamedCustomToolChoice) -> tuple[str, bool]:
    """The name of a tool, and whether it is a custom tool."""
    if isinstance(choice, NamedCustomToolChoice):
        return choice.custom.name, True
    return choice.function.name, False


def template_messages(
    messages: Sequence[Message], reasoning_key: str = "reasoning_content"
) -> list[dict[str, Any]]:
    """Convert messages to the format of chat templates.

    The content of a message with media is a list of `MEDIA_PARTS` and `text_part`.

    Args:
        messages: the conversation.
        reasoning_key: `TemplateTraits.reasoning_key`.

    Raises:
        InvalidRequestError: a message lacks a field that its role needs, or has a field of another
            role. Or the arguments of a call are not a JSON object, or a message with media has a
            role that cannot have them.
    """
    return [
        _template_message(message, index, reasoning_key) for index, message in enumerate(messages)
    ]


def _template_message(message: Message, index: int, reasoning_key: str) -> dict[str, Any]:
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
    reasoning = message.reasoning_content or message.reasoning
    if reasoning_key == "thinking" and message.tool_calls and message.text:
        reasoning = None  # the template of gpt-oss refuses messages with calls, text and reasoning
    shown: dict[str, Any] = {
        **(message.template_fields or {}),
        "role": message.role,
        "content": _content(message, place),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        reasoning_key: reasoning,
        "tool_calls": [
            _template_call(call, f"{place}.tool_calls[{position}].function")
            for position, call in enumerate(message.tool_calls or ())
        ]
        or None,
    }
    return {name: value for name, value in shown.items() if value is not None}


def _content(message: Message, place: str) -> str | list[dict[str, str]] | None:
    """The content of a message: its text, or a list of parts if it has media."""
    if not message.media:
        return message.text
    if message.role in _TEXT_ROLES:
        noun = message.media[0].kind.value
        article = "an" if noun == MediaKind.image else "a"
        raise _invalid(
            f"{place}.content",
            f"{place}.content has {article} {noun}, and a message of the role {message.role!r} has"
            f" text only; move the {noun} to a message of the user",
        )
    return [_template_part(part) for part in message.content or () if not isinstance(part, str)]


def _template_part(part: ContentPart) -> dict[str, str]:
    return dict(MEDIA_PARTS[part.kind]) if isinstance(part, MediaPart) else text_part(part.text)


def _template_call(call: MessageToolCall, place: str) -> dict[str, Any]:
    if call.custom is not None:
        name, arguments = call.custom.name, as_arguments(call.custom.input)
    else:
        assert call.function is not None, "a call without `custom` has `function`"
        name, arguments = call.function.name, _object(call.function.arguments, place)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _object(text: str, place: str) -> dict[str, Any]:
    """The arguments of an earlier call. Half of a surrogate pair becomes U+FFFD."""
    try:
        value = json.loads(text or "{}")
        if _SURROGATE.search(text):
            whole = _json(value).encode("utf-16-le", "surrogatepass")
            value = json.loads(whole.decode("utf-16-le", "replace"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _invalid(f"{place}.arguments", f"{place}.arguments must be a JSON object as text")
    return value


def explained(
    messages: Iterable[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: CallFormat,
    *,
    in_system: bool = True,
) -> list[dict[str, Any]]:
    """Rewrite a conversation for a template that cannot show tools.

    Calls become text of the assistant, in the format that the parser reads. Results become messages
    of the user. Results of parallel calls and the user's message after them are joined, because
    many templates refuse two messages of the user in a row.

    Args:
        messages: the conversation, as `template_messages` gives it.
        tools: the functions.
        form: the format of calls.
        in_system: the system message lists the functions. False = the first message of the user
            does, unless there is a system message.
    """
    shown: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # id of a call -> name of its function
    follows_result = False
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        one = _explained_message(message, names, form)
        if follows_result and one["role"] == "user":
            shown[-1] = _joined(shown[-1], one)
        else:
            shown.append(one)
        follows_result = message["role"] == "tool"
    if tools:
        example = form.written("NAME", '{"KEY": "VALUE"}')
        functions = "\n".join(_json(tool["function"]) for tool in tools)
        text = (
            f"You can call functions. To call one, answer with\n{example}\nFunctions:\n{functions}"
        )
        first = shown[0] if shown else {"role": "system", "content": ""}
        if shown and first["role"] in ("system", "developer"):
            shown[0] = {**first, "content": f"{first['content']}\n\n{text}"}
        elif in_system or first["role"] != "user":
            shown.insert(0, {"role": "system", "content": text})
        else:
            shown[0] = _joined({"role": "user", "content": f"{text}\n"}, first)
    return shown


def _explained_message(
    message: Mapping[str, Any], names: Mapping[str, str], form: CallFormat
) -> dict[str, Any]:
    content = message.get("content") or ""
    if isinstance(content, list):  # of the user or of a tool, with media
        return _explained_media(message, content, names)
    texts = [content]
    texts += [
        form.written(call["function"]["name"], _json(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    text = "\n".join(filter(None, texts))
    if message["role"] == "tool":
        name = names.get(message["tool_call_id"], message["tool_call_id"])
        return {"role": "user", "content": f"Result of {name}: {text}"}
    return {**{key: message[key] for key in message if key != "tool_calls"}, "content": text}


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages of the user as one."""
    contents = (first["content"], second["content"])
    if all(isinstance(content, str) for content in contents):
        return {**second, "content": "\n".join(contents)}
    parts = [[text_part(one)] if isinstance(one, str) else one for one in contents]
    return {**second, "content": [*parts[0], *parts[1]]}


def _explained_media(
    message: Mapping[str, Any], content: list[dict[str, str]], names: Mapping[str, str]
) -> dict[str, Any]:
    """A message with media. The message of a tool becomes one of the user."""
    if message["role"] != "tool":
        return dict(message)
    name = names.get(message["tool_call_id"], message["tool_call_id"])
    return {"role": "user", "content": [text_part(f"Result of {name}: "), *content]}


def new_call_id(form: CallFormat | None) -> str:
    """A random id for a call that has no id."""
    if form is not None and form.short_ids:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _invalid(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_value")
