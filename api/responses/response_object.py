"""The answer of `/v1/responses`: the response object and its output items."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ostinato.api.base.timeline import Timeline
from ostinato.api.responses.schemas import (
    CustomToolDefinition,
    ItemStatus,
    SummaryKind,
    TextConfig,
    ToolChoice,
    ToolDefinition,
)
from ostinato.api.schemas.chat_completions import ChatTokenLogprob
from ostinato.api.schemas.client_fields import Metadata, PromptCacheRetention, ServedTier
from ostinato.api.schemas.conversation import ReasoningEffort
from ostinato.api.schemas.usage import TokenOffsets

__all__ = (
    "ApiError",
    "Deleted",
    "IncompleteDetails",
    "InputTokens",
    "InputUsage",
    "ItemList",
    "OutputCall",
    "OutputCustomCall",
    "OutputItem",
    "OutputMessage",
    "OutputReasoning",
    "OutputText",
    "OutputUsage",
    "ReasoningShown",
    "ReasoningText",
    "Response",
    "ResponsesUsage",
)


class ReasoningShown(msgspec.Struct, frozen=True, kw_only=True):
    effort: ReasoningEffort | None
    summary: SummaryKind | None


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


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
    encrypted_content: str | UnsetType = UNSET


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputUsage(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputUsage(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, frozen=True, kw_only=True):
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
    background: bool = False
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ApiError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Metadata
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningShown
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | ToolChoice
    tools: list[ToolDefinition | CustomToolDefinition]
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None
    max_tool_calls: int | None = None
    safety_identifier: str | None = None
    service_tier: ServedTier | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: PromptCacheRetention | None = None
    top_logprobs: int | None = None
    prompt_text: str | UnsetType = UNSET
    prompt_token_offsets: TokenOffsets | UnsetType | None = UNSET
    trace: Timeline | UnsetType = UNSET


class InputTokens(msgspec.Struct, frozen=True):
    """The answer of `input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `input_items`: a page of the items that a reply was made from."""

    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct, frozen=True):
    """The answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
