"""The answer of `/v1/responses`: the response object and its output items."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ostinato.api.base.timeline import Timeline
from ostinato.api.responses.schemas import (
    ItemStatus,
    NamedTool,
    ReasoningConfig,
    TextConfig,
    ToolDefinition,
)

__all__ = (
    "ApiError",
    "Deleted",
    "IncompleteDetails",
    "InputUsage",
    "OutputCall",
    "OutputItem",
    "OutputMessage",
    "OutputReasoning",
    "OutputText",
    "OutputUsage",
    "ReasoningText",
    "Response",
    "Usage",
)


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
