"""The bodies of requests to `/v1/responses`, with the names of the OpenAI API.

A request schema has exactly the supported fields. `UNSUPPORTED` lists fields that are refused with
a message of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ostinato.api.base.unsupported_fields import Unsupported
from ostinato.api.schemas.client_fields import (
    Metadata,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    PromptCacheRetention,
    SafetyIdentifier,
    ServiceTier,
    Verbosity,
)
from ostinato.api.schemas.conversation import FunctionName, ReasoningEffort, TextInput
from ostinato.api.schemas.generation_fields import Int32
from ostinato.api.schemas.response_format import JsonObjectFormat, TextFormat
from ostinato.runtime.types.images import ImageDetail
from ostinato.runtime.types.params import MAX_LOGPROBS, RepetitionDetectionParams

__all__ = (
    "UNSUPPORTED",
    "CallItem",
    "CallOutputItem",
    "CustomCallItem",
    "CustomCallOutputItem",
    "CustomToolDefinition",
    "GrammarFormat",
    "InputItem",
    "InputTextPart",
    "InputTokensRequest",
    "ItemStatus",
    "MessageItem",
    "NamedCustomTool",
    "NamedTool",
    "OutputTextPart",
    "PromptFields",
    "ReasoningConfig",
    "ReasoningItem",
    "ResponsesAllowedToolsChoice",
    "ResponsesInputImagePart",
    "ResponsesRequest",
    "ResponsesStreamOptions",
    "SchemaFormat",
    "SummaryKind",
    "TextConfig",
    "ToolChoice",
    "ToolDefinition",
)

_SERVICE = "features of a hosted service"
UNSUPPORTED: Mapping[str, Unsupported] = {
    "access_programs": Unsupported(_SERVICE),
    "background_options": Unsupported(_SERVICE, ({"completion_window": "soonest"},)),
    "context_management": Unsupported("edits of the context", ([],)),
    "conversation": Unsupported("stored conversations", instead="previous_response_id"),
    "file_id": Unsupported("uploaded files", instead="image_url with data:image/png;base64,DATA"),
    "image": Unsupported("input other than text and images"),
    "moderation": Unsupported("moderation models"),
    "namespace": Unsupported("groups of functions"),
    "output_schema": Unsupported("programs that call tools"),
    "personality": Unsupported("models with a personality setting"),
    "prompt": Unsupported("stored prompts"),
}

NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of items from earlier answers. They have no effect."""

    id: str | None = None
    status: ItemStatus | None = None


class InputTextPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"
):
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ResponsesInputImagePart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="input_image",
):
    image_url: str  # data:image/png;base64,DATA, or a URL whose host is in `images.domains`
    detail: ImageDetail | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ResponsesRefusalPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"
):
    """A refusal in an earlier answer. The model sees it as text."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


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
    content: (
        str | list[InputTextPart | ResponsesInputImagePart | OutputTextPart | ResponsesRefusalPart]
    )
    phase: str | None = None


class DirectCaller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says that the model itself, not a program, called the function."""

    type: Literal["direct"]


class CallItem(_Item, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    call_id: NotEmpty
    name: NotEmpty
    arguments: str
    caller: DirectCaller | None = None
    is_async: Literal[False] | None = msgspec.field(default=None, name="async")


class CallOutputItem(
    _Item, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    call_id: NotEmpty
    output: str | list[InputTextPart | ResponsesInputImagePart]
    name: str | None = None  # the function's name; has no effect, because `call_id` names the call
    caller: DirectCaller | None = None


class CustomCallItem(_Item, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    call_id: NotEmpty
    name: NotEmpty
    input: str
    caller: DirectCaller | None = None
    is_async: Literal[False] | None = msgspec.field(default=None, name="async")


class CustomCallOutputItem(
    _Item, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"
):
    call_id: NotEmpty
    output: str | list[InputTextPart | ResponsesInputImagePart]
    caller: DirectCaller | None = None


class ReasoningTextPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"
):
    text: str


class ReasoningItem(_Item, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    summary: list[Any] = []
    content: list[ReasoningTextPart] | None = None
    # The text, encoded by `encoded_reasoning`, for clients that send back only this field.
    encrypted_content: str | None = None


InputItem = (
    MessageItem | CallItem | CallOutputItem | CustomCallItem | CustomCallOutputItem | ReasoningItem
)


class ToolDefinition(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="function",
):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    is_async: Literal[False] | None = msgspec.field(default=None, name="async")


class GrammarFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="grammar",
):
    """A text that matches a grammar."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomToolDefinition(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="custom",
):
    """A tool that is called with a text instead of JSON."""

    name: FunctionName
    description: str | None = None
    format: TextInput | GrammarFormat = TextInput()
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    is_async: Literal[False] | None = msgspec.field(default=None, name="async")


class NamedTool(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """Demands a call of this function."""

    name: FunctionName


class NamedCustomTool(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="custom"
):
    """Demands a call of this custom tool."""

    name: FunctionName


class ResponsesAllowedToolsChoice(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="allowed_tools",
):
    """The tools that may be called. The prompt shows the model all tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], msgspec.Meta(min_length=1)]


ToolChoice = NamedTool | NamedCustomTool | ResponsesAllowedToolsChoice


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
    verbosity: Verbosity | None = None  # passed to a chat template that uses it


SummaryKind = Literal["auto", "concise", "detailed"]


class ReasoningConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    effort: ReasoningEffort | None = None  # passed to a chat template that uses it
    summary: SummaryKind | None = None  # has no effect, because items have the whole reasoning
    generate_summary: SummaryKind | None = None  # the older name of `summary`
    context: Literal["auto"] | None = None  # the template decides which reasoning is shown again
    mode: Literal["standard"] | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] = False  # events are never padded


# Only the last two values have an effect. The others ask for parts that replies here never have.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]


Input = str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


class PromptFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that the prompt is made from, besides `input`."""

    model: str | None = None
    instructions: str | None = None  # for this answer only; those of a stored reply are not used
    previous_response_id: str | None = None
    tools: list[ToolDefinition | CustomToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    # For an input that is too long: auto = cut off its beginning; otherwise = refuse it. The token
    # count of `input_tokens` counts the whole input.
    truncation: Literal["auto", "disabled"] | None = None


class InputTokensRequest(PromptFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses/input_tokens`."""

    input: Input | None = None  # absent = only the stored conversation


class ResponsesRequest(PromptFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`."""

    input: Input
    store: bool | None = None  # absent = true, if the server stores replies
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    background: bool | None = None  # generate without an open connection; needs the store
    stream_options: ResponsesStreamOptions | None = None
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # The following fields have no effect. The reply repeats them, with two exceptions: it leaves
    # out `prompt_cache_options`, and a named `service_tier` becomes `default`.
    # `max_tool_calls` is for tools that run on the server, and this server has none.
    max_tool_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: PromptCacheRetention | None = None
    safety_identifier: SafetyIdentifier | None = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    # The following fields are those of chat completions.
    repetition_detection: RepetitionDetectionParams | None = None
    logprob_token_ids: list[int] | None = None  # needs logprobs in `include`
    stream_interval: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    return_prompt_text: bool = False
    return_token_offsets: bool = False
    priority: Int32 = 0  # lower runs first under scheduler.policy=priority
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""
