"""The bodies of `/v1/messages`, with the names of the Anthropic API.

A request schema has exactly the supported fields. `UNSUPPORTED` lists fields that are refused with
a message of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ostinato.api.base.timeline import Timeline
from ostinato.api.base.unsupported_fields import Unsupported
from ostinato.api.schemas.client_fields import CacheControl
from ostinato.api.schemas.conversation import FunctionName
from ostinato.api.schemas.usage import TokenOffsets
from ostinato.runtime.types.params import RepetitionDetectionParams

__all__ = (
    "UNSUPPORTED",
    "AnyChoice",
    "AutoChoice",
    "Base64Source",
    "CountTokensRequest",
    "ImageBlock",
    "MessagesRequest",
    "MessagesUsage",
    "NoChoice",
    "RedactedThinkingBlock",
    "Reply",
    "ReplyText",
    "ReplyThinking",
    "ReplyToolUse",
    "TextBlock",
    "ThinkingBlock",
    "TokenCount",
    "ToolChoice",
    "ToolDefinition",
    "ToolResultBlock",
    "ToolUseBlock",
    "Turn",
    "UrlSource",
)

_SERVICE = "features of a hosted service"
UNSUPPORTED: Mapping[str, Unsupported] = {
    "container": Unsupported(_SERVICE),
    # Two values have no effect: no edits, and the edit that coding agents send by default. This
    # edit asks to keep all thinking.
    "context_management": Unsupported(
        "edits of the context",
        ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "diagnostics": Unsupported(_SERVICE),
    "file_id": Unsupported("uploaded files", instead="a source of the type base64"),
    "inference_geo": Unsupported(_SERVICE),
    "input_examples": Unsupported("examples of inputs of tools"),
    "mcp_servers": Unsupported("tools that the server runs", ([],)),
    "logprob_token_ids": Unsupported("log-probabilities in this dialect"),
    "output_format": Unsupported("an older name", instead="output_config.format"),
    "speed": Unsupported("tiers of service", ("standard",)),
}


NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class _Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cache_control: CacheControl | None = None


class TextBlock(_Block, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: list[Any] | None = None  # from an earlier answer; not used


class Base64Source(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="base64",
):
    """The bytes of an image. The media type has no effect, because the bytes show the format."""

    media_type: str
    data: str


class UrlSource(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="url",
):
    url: str  # its host is in `images.domains`


class ImageBlock(_Block, frozen=True, kw_only=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource


class DirectCaller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says that the model itself, not a program, called the tool."""

    type: Literal["direct"]


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: NotEmpty
    name: NotEmpty
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(_Block, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: NotEmpty
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None  # true = the text for the model says that this is an error
    toolset_name: None = None


class ThinkingBlock(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="thinking",
):
    thinking: str
    signature: str = ""  # from an earlier answer


class RedactedThinkingBlock(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="redacted_thinking",
):
    """Encrypted thinking of another server. It is not shown to the model."""

    data: str


Block = (
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    # No effect: inputs of constrained calls are streamed as they are written, others when they are
    # complete.
    eager_input_streaming: bool | None = None


class AutoChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="auto"
):
    disable_parallel_tool_use: bool = False


class AnyChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="any"
):
    disable_parallel_tool_use: bool = False


class ToolChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool"
):
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="none"
):
    pass


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Switches reasoning on or off. This needs a chat template with such a setting."""

    type: Literal["adaptive", "disabled", "enabled"]
    # Required with the type `enabled`, and refused with the other types.
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None  # omitted = no thinking blocks


class JsonOutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: str | None = None  # the caller's label of an end user; has no effect


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template, as in vLLM


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    # The server has only one tier. If this field is set, `usage` names the tier.
    service_tier: Literal["auto", "standard_only"] | None = None
    # The following fields are those of chat completions.
    repetition_detection: RepetitionDetectionParams | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    return_prompt_text: bool = False
    return_token_offsets: bool = False


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `count_tokens`."""

    input_tokens: int


class ReplyText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ReplyThinking(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # always empty


class ReplyToolUse(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int  # without cached tokens
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"] | msgspec.UnsetType = msgspec.UNSET


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyText | ReplyThinking | ReplyToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_offsets: TokenOffsets | msgspec.UnsetType | None = msgspec.UNSET
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET
