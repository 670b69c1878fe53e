"""The JSON of a conversation: messages, tools and tool calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

__all__ = (
    "CalledFunction",
    "FunctionName",
    "FunctionTool",
    "Message",
    "MessageToolCall",
    "NamedFunction",
    "NamedToolChoice",
    "ReasoningEffort",
    "TextPart",
    "Tool",
)

FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    text: str


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str  # a JSON object, as text


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients that join a stream send it back; not used


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None  # null only beside tool_calls
    name: str | None = None  # seen by templates that use it
    tool_calls: list[MessageToolCall] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool: the call that it answers
    reasoning: str | None = None  # of an assistant, for templates that show it again
    reasoning_content: str | None = None  # the same under its other name

    @property
    def text(self) -> str | None:
        """The content; text parts are joined by newlines."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; absent = no parameters
    strict: bool | None = None  # the arguments always keep to the schema


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: FunctionName


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction
