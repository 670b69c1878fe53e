"""The bodies and events of `/v1/responses`, with the names of the OpenAI API.

A request schema has exactly the supported fields; `UNSUPPORTED` lists the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ostinato.api.base.timeline import Timeline
from ostinato.api.base.unsupported_fields import Unsupported
from ostinato.api.schemas.conversation import FunctionName, ReasoningEffort
from ostinato.api.schemas.response_format import JsonObjectFormat, TextFormat

__all__ = (
    "UNSUPPORTED",
    "ApiError",
    "CallItem",
    "CallOutputItem",
    "Deleted",
    "Event",
    "IncompleteDetails",
    "InputItem",
    "InputUsage",
    "MessageItem",
    "NamedTool",
    "OutputCall",
    "OutputItem",
    "OutputMessage",
    "OutputReasoning",
    "OutputText",
    "OutputUsage",
    "ReasoningConfig",
    "ReasoningItem",
    "ReasoningText",
    "Response",
    "ResponsesRequest",
    "SchemaFormat",
    "TextConfig",
    "ToolDefinition",
    "Usage",
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
    call_id: str
    name: str
    arguments: str


class CallOutputItem(
    _Item, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    call_id: str
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


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputUsage(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputUsage(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputUsage
    output_tokens: int
    output_tokens_details: OutputUsage
    total_tokens: int


class ApiError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A reply, complete or in progress."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # unix seconds
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ApiError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | NamedTool
    tools: list[ToolDefinition]
    top_p: float
    truncation: str = "disabled"
    usage: Usage | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    trace: Timeline | UnsetType = UNSET


class Deleted(msgspec.Struct, frozen=True):
    """The answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; `type` says which of the fields it has."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
