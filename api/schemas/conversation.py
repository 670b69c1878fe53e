"""The JSON of a conversation: messages, tools and tool calls."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal

import msgspec

from ostinato.api.schemas.client_fields import CacheControl, PromptCacheBreakpoint
from ostinato.api.schemas.media_parts import (
    AudioUrlPart,
    ImageUrlPart,
    InputAudioPart,
    InputImagePart,
    VideoUrlPart,
)

__all__ = (
    "AllowedTools",
    "AllowedToolsChoice",
    "CalledCustomTool",
    "CalledFunction",
    "ContentPart",
    "CustomTool",
    "CustomToolEntry",
    "FunctionName",
    "FunctionTool",
    "Grammar",
    "GrammarInput",
    "MediaPart",
    "Message",
    "MessageToolCall",
    "NamedCustomToolChoice",
    "NamedFunction",
    "NamedToolChoice",
    "ReasoningEffort",
    "RefusalPart",
    "Role",
    "TextInput",
    "TextPart",
    "Tool",
    "ToolChoice",
    "with_gathered_keys",
)

FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Role = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


MediaPart = ImageUrlPart | InputImagePart | VideoUrlPart | AudioUrlPart | InputAudioPart


class TextPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class RefusalPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"
):
    """A refusal in a message of the assistant. The model sees it as text."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ContentPart = TextPart | RefusalPart | MediaPart


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str  # a JSON object, as text


class CalledCustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    input: str


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call in a message of the assistant. Its type names the field that it has.

    Raises:
        ValueError: the call lacks this field, or has the field of the other type.
    """

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None
    index: int | None = None  # not used; clients that join the chunks of a stream send it back

    def __post_init__(self) -> None:
        other = "custom" if self.type == "function" else "function"
        if getattr(self, self.type) is None:
            raise ValueError(f"Object missing required field `{self.type}`")
        if getattr(self, other) is not None:
            raise ValueError(f"a call of type {self.type!r} has no field {other!r}")


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role  # a role that the chat template supports
    # Null only together with tool_calls or a refusal, and for roles outside the OpenAI API.
    content: str | list[ContentPart] | None = None
    name: str | None = None  # for templates that use it
    tool_calls: list[MessageToolCall] | None = None  # role assistant
    tool_call_id: str | None = None  # role tool: the call that this message answers
    reasoning: str | None = None  # role assistant; for templates that show it again
    reasoning_content: str | None = None  # another name of `reasoning`
    refusal: str | None = None  # role assistant; the text of a message without content
    # All other keys of the message, for templates that use them.
    template_fields: dict[str, Any] | None = None

    @property
    def text(self) -> str | None:
        """The content as one text without media, or the refusal. Parts are joined by newlines."""
        if self.content is None:
            return self.refusal
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if not isinstance(part, MediaPart))

    @property
    def media(self) -> list[MediaPart]:
        """The images, videos and audio of the content, in its order."""
        if self.content is None or isinstance(self.content, str):
            return []
        return [part for part in self.content if isinstance(part, MediaPart)]


_MESSAGE_KEYS = frozenset(Message.__struct_fields__)


def with_gathered_keys(message: Mapping[str, Any], refused: Container[str]) -> dict[str, Any]:
    """Move the unknown keys of a message's JSON to `template_fields`. Nulls are left out.

    Args:
        message: the JSON of the message.
        refused: keys that stay where they are, so that the decoder refuses them.
    """
    kept: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in message.items():
        if value is not None:
            is_known = key in _MESSAGE_KEYS or key in refused
            (kept if is_known else others)[key] = value
    if others:
        given = kept.get("template_fields")
        kept["template_fields"] = {**(given if isinstance(given, dict) else {}), **others}
    return kept


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; absent = no parameters
    strict: bool | None = None  # true = the arguments always match the schema


class Tool(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="function",
):
    function: FunctionTool


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: str


class TextInput(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """Any text."""


class GrammarInput(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="grammar"
):
    """A text that the grammar allows."""

    grammar: Grammar


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that is called with a text instead of JSON."""

    name: FunctionName
    description: str | None = None
    format: TextInput | GrammarInput = TextInput()


class CustomToolEntry(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="custom",
):
    custom: CustomTool


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: FunctionName


class NamedToolChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """Demands a call of this function."""

    function: NamedFunction


class NamedCustomToolChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="custom"
):
    """Demands a call of this custom tool."""

    custom: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tools that may be called. The prompt shows the model all tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice | NamedCustomToolChoice], msgspec.Meta(min_length=1)]


class AllowedToolsChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    allowed_tools: AllowedTools


ToolChoice = NamedToolChoice | NamedCustomToolChoice | AllowedToolsChoice
