"""The bodies of `/v1/chat/completions`: request, whole answer and chunks of a stream."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ostinato.api.base.timeline import Timeline
from ostinato.api.schemas.client_fields import (
    Metadata,
    PromptCacheOptions,
    PromptCacheRetention,
    ServedTier,
    ServiceTier,
    Verbosity,
)
from ostinato.api.schemas.conversation import (
    CustomToolEntry,
    Message,
    ReasoningEffort,
    TextPart,
    Tool,
    ToolChoice,
)
from ostinato.api.schemas.generation_fields import GenerationFields
from ostinato.api.schemas.media_parts import MediaSettings
from ostinato.api.schemas.usage import CompletionUsage, PromptLogprobs, TokenOffsets

__all__ = (
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletionRequest",
    "ChatLogprobs",
    "ChatResponse",
    "ChatTokenLogprob",
    "CustomToolDelta",
    "DeltaMessage",
    "FunctionDelta",
    "Prediction",
    "ReplyCustomTool",
    "ReplyFunction",
    "ReplyMessage",
    "ReplyToolCall",
    "ToolCallDelta",
    "TopLogprob",
)


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The client's guess of the answer, such as a text that the model is to edit."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The guess as one text. Parts are joined without a separator."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(
    GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """`POST /v1/chat/completions`."""

    has_template_fields: ClassVar[bool] = True  # the chat template gets unknown keys
    takes_all_media: ClassVar[bool] = True

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None  # absent = not continue_final_message
    continue_final_message: bool = False
    add_special_tokens: bool = False  # add special tokens such as bos around the rendered text
    chat_template: str | None = None  # replaces the model's template
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template
    documents: list[dict[str, Any]] | None = None  # for templates that show them to the model
    media_io_kwargs: MediaSettings | None = None  # which frames of its videos are used
    tools: list[Tool | CustomToolEntry] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false = at most one call in an answer
    # Passed to a template that uses it, or that uses `enable_thinking`.
    reasoning_effort: ReasoningEffort | None = None
    # The end of reasoning is forced after this number of tokens; absent = no limit.
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    include_reasoning: bool = True  # false = reasoning is left out of the answer
    prediction: Prediction | None = None  # used for drafts; does not change the answer
    verbosity: Verbosity | None = None  # passed to a template that uses it
    # The following fields have no effect. An answer without `stream` repeats `metadata`. If the
    # request names a service tier, the answer names the tier `default`.
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    prompt_cache_retention: PromptCacheRetention | None = None
    prompt_cache_options: PromptCacheOptions | None = None


# An answer can have 100,000 of these, so the garbage collector does not track them.
class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]


class ReplyFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ReplyCustomTool(msgspec.Struct, frozen=True):
    name: str
    input: str


class ReplyToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call. Its type names the field that it has."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: ReplyFunction | msgspec.UnsetType = msgspec.UNSET
    custom: ReplyCustomTool | msgspec.UnsetType = msgspec.UNSET


class ReplyMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None  # null for tool calls without text
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET  # the same under its other name
    tool_calls: list[ReplyToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None  # the stop token id or stop string that ended the answer
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str  # names the model and kernels, see docs/determinism.md
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_offsets: TokenOffsets | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    service_tier: ServedTier | msgspec.UnsetType = msgspec.UNSET
    metadata: Metadata | msgspec.UnsetType = msgspec.UNSET
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET  # with the header x-trace: 1


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CustomToolDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    input: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a call of a function or of a custom tool."""

    index: int
    id: str | None = None  # with the first piece of a call
    type: str | None = None
    function: FunctionDelta | None = None
    custom: CustomToolDelta | None = None


class DeltaMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same under its other name
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # the tokens of this chunk


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str  # names the model and kernels, see docs/determinism.md
    choices: list[ChatChunkChoice]
    service_tier: ServedTier | msgspec.UnsetType = msgspec.UNSET
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in the first chunk
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_offsets: TokenOffsets | msgspec.UnsetType | None = msgspec.UNSET
    # In a chunk without choices. It is the last chunk, except for the chunk with the whole usage.
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET
