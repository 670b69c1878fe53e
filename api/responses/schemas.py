"""The bodies of requests to `/v1/responses`, with the names of the OpenAI API.

A request schema has exactly the supported fields; `UNSUPPORTED` lists the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ostinato.api.base.unsupported_fields import Unsupported
from ostinato.api.schemas.conversation import FunctionName, ReasoningEffort
from ostinato.api.schemas.response_format import JsonObjectFormat, TextFormat

__all__ = (
    "UNSUPPORTED",
    "CallItem",
    "CallOutputItem",
    "InputItem",
    "ItemStatus",
    "MessageItem",
    "NamedTool",
    "ReasoningConfig",
    "ReasoningItem",
    "ResponsesRequest",
    "SchemaFormat",
    "TextConfig",
    "ToolDefinition",
)

_SERVICE = "features of a hosted service"
UNSUPPORTED: Mapping[str, Unsupported] = {
    "background": Unsupported("replies in the background", (False,)),
    "context_management": Unsupported("edits of the context", ([],)),
    "conversation": Unsupported("stored conversations", instead="previous_response_id"),
    "include": Unsupported("further parts of replies", ([],)),
    "max_tool_calls": Unsupported("tools that the server runs"),
    "moderation": Unsupported(_SERVICE),
    "prompt": Unsupported("stored prompts"),
    "prompt_cache_options": Unsupported(_SERVICE),
    "prompt_cache_retention": Unsupported("cached prompts that are kept for a time"),
    "service_tier": Unsupported("tiers of service", ("auto", "default")),
    "top_logprobs": Unsupported("log-probabilities in this dialect", (0,)),
}

NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of items of earlier answers; they have no effect."""

    id: str | None = None
    status: ItemStatus | None = None


class InputTextPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"
):
    text: str


class OutputTextPart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="output_text",
):
    """A text of an earlier answer."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(_Item, frozen=True, kw_only=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputTextPart | OutputTextPart]
    phase: str | None = None


class CallItem(_Item, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    call_id: NotEmpty
    name: NotEmpty
    arguments: str


class CallOutputItem(
    _Item, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    call_id: NotEmpty
    output: str | list[InputTextPart]


class ReasoningTextPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"
):
    text: str


class ReasoningItem(_Item, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    summary: list[Any] = []
    content: list[ReasoningTextPart] | None = None


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class SchemaFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="json_schema",
):
    """JSON that matches a schema."""

    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat = TextFormat()
    verbosity: Literal["medium"] | None = None  # no supported model has this setting


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    summary: None = None  # summaries are not supported


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] = False  # events are not padded


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    instructions: str | None = None  # of this answer only; those of the stored reply are not used
    previous_response_id: str | None = None
    store: bool | None = None  # absent = true, where the server stores replies
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None  # an input that is too long is refused
    metadata: dict[str, str] | None = None  # repeated in the reply
    user: str | None = None  # the caller's label of an end user; has no effect
    safety_identifier: str | None = None  # the newer name of `user`
    prompt_cache_key: str | None = None  # has no effect: there is one cache
    priority: int = 0  # lower runs first under scheduler.policy=priority
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""
