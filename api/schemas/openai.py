"""The bodies of requests and responses, as the OpenAI API spells them.

A field is here exactly when it is honoured. `decode` names the field in every refusal; what is
known but not honoured (`unsupported`) is refused by name, unless its value asks for nothing
(`tools: []`, any null).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ostinato.api.base.timeline import REQUEST_ID_PATTERN, Timeline
from ostinato.api.base.unsupported_fields import UNSUPPORTED, Unsupported, is_no_op
from ostinato.api.schemas.conversation import Message, NamedToolChoice, ReasoningEffort, Tool
from ostinato.api.schemas.response_format import ConstraintFields
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    RepetitionDetectionParams,
)

__all__ = (
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletionRequest",
    "ChatLogprobs",
    "ChatResponse",
    "ChatTokenLogprob",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "CompletionTokensDetails",
    "DeltaMessage",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "FunctionDelta",
    "GenerationFields",
    "ModelCard",
    "ModelList",
    "PromptLogprob",
    "PromptTokensDetails",
    "ReplyFunction",
    "ReplyMessage",
    "ReplyToolCall",
    "Status",
    "StreamOptions",
    "TokenOffsets",
    "TokenizeRequest",
    "TokenizeResponse",
    "ToolCallDelta",
    "TopLogprob",
    "Usage",
    "Version",
    "decode",
    "refusal",
)

T = TypeVar("T", bound=msgspec.Struct)

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
RequestId = Annotated[str, msgspec.Meta(pattern=REQUEST_ID_PATTERN)]


def _range(**schema: float) -> msgspec.Meta:
    """A range for the OpenAPI document; `SamplingParams` is who checks it."""
    return msgspec.Meta(extra_json_schema=schema)


ChosenTokens = Annotated[list[int], _range(maxItems=MAX_LOGPROB_TOKEN_IDS)]
Completions = Annotated[int, _range(minimum=1, maximum=MAX_N)]
KeptTokens = Annotated[int, _range(minimum=-1)]
LengthPenalty = Annotated[float, _range(minimum=-10, maximum=10)]
Logprobs = Annotated[int, _range(minimum=0, maximum=MAX_LOGPROBS)]
MinTokens = Annotated[int, _range(minimum=0)]
Penalty = Annotated[float, _range(minimum=-2, maximum=2)]
RepetitionPenalty = Annotated[float, _range(exclusiveMinimum=0, maximum=10)]
Seed = Annotated[int, _range(minimum=-(1 << 63), maximum=(1 << 63) - 1)]
Share = Annotated[float, _range(minimum=0, maximum=1)]
Temperature = Annotated[float, _range(minimum=0, maximum=2)]
Tokens = Annotated[int, _range(minimum=1)]
TopK = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31), _range(minimum=-1)]
TopP = Annotated[float, _range(exclusiveMinimum=0, maximum=1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False  # a last chunk with the usage of the whole request
    continuous_usage_stats: bool = False  # every chunk with the usage so far


class GenerationFields(ConstraintFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and plain completions share. Null and absent mean the same: the server's default.

    Ranges are those of `SamplingParams`, which checks them.
    """

    model: str | None = None  # absent = the model that is served
    n: Completions | None = None
    best_of: Completions | None = None
    use_beam_search: bool = False
    length_penalty: LengthPenalty | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, float] | None = None
    seed: Seed | None = None
    max_tokens: Tokens | None = None
    min_tokens: MinTokens | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: Logprobs | None = None  # not with stream
    logprob_token_ids: ChosenTokens | None = None  # with logprobs, instead of the likeliest
    echo: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_prompt_text: bool = False
    return_token_offsets: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Tokens of a chunk between the first one and the last.
    stream_interval: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    priority: Int32 = 0  # lower runs first under scheduler.policy=priority
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""  # see the prefix cache
    # Milliseconds from its arrival on; then it ends with what there is.
    deadline_ms: Annotated[float, msgspec.Meta(ge=1, le=24 * 3600 * 1000)] | None = None
    request_id: RequestId | None = None  # names the reply and its log line
    user: str | None = None  # the caller's label of an end user; never used for anything
    safety_identifier: str | None = None  # its newer name
    prompt_cache_key: str | None = None  # where to look for a cached prompt: there is one cache


class ChatCompletionRequest(
    GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None  # absent = unless the last message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False  # around the text that the template gives
    chat_template: str | None = None  # instead of the model's own
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template
    documents: list[dict[str, Any]] | None = None  # for templates that show them to the model
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false = at most one call in an answer
    reasoning_effort: ReasoningEffort | None = None  # reaches the template
    # Tokens of reasoning after which its end is written; absent = any number.
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    include_reasoning: bool = True  # false = reasoning is left out of the answer


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]  # text, token ids, or a list of either
    logprobs: int | None = None
    add_special_tokens: bool = True  # bos and the like around text prompts


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # absent = true for a prompt, false for messages
    add_generation_prompt: bool | None = None  # absent = unless the last message is continued
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int  # those that ended within reasoning


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # In chat, of models that reason.
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


TokenOffsets = list[Annotated[list[int], msgspec.Meta(min_length=2, max_length=2)]]
"""Per prompt token the characters [begin, end) of the text; [0, 0] = it stands for none."""

PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token, None for the first: token id -> candidate, the token itself among them."""


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]


class ReplyFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ReplyToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: ReplyFunction


class ReplyMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None  # null beside calls without a text
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET  # the same under its other name
    tool_calls: list[ReplyToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None  # the stop token id or string that ended it, if one did
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    # None = the prompt came as token ids.
    prompt_token_offsets: TokenOffsets | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET  # with the header x-trace: 1


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    id: str | None = None  # with the first piece of a call
    type: str | None = None
    function: FunctionDelta


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
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # those since the last chunk


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in the first chunk
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    # None = the prompt came as token ids.
    prompt_token_offsets: TokenOffsets | msgspec.UnsetType | None = msgspec.UNSET
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET  # in a chunk without choices near the end


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]  # None = the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in its first chunk
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    # None = the prompt came as token ids.
    prompt_token_offsets: TokenOffsets | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response, or one chunk of a stream: the legacy endpoint has one shape for both."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET  # a stream's is in a chunk without choices


class Status(msgspec.Struct, frozen=True):
    """Of the server; with a reason when something is not well."""

    status: str
    reason: str | msgspec.UnsetType = msgspec.UNSET


class Version(msgspec.Struct, frozen=True):
    version: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ostinato"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def decode(body: bytes, schema: type[T], unsupported: Mapping[str, Unsupported] = UNSUPPORTED) -> T:
    """The body as `schema`.

    Args:
        unsupported: the fields that the dialect knows and this server does not honour.

    Raises:
        InvalidRequestError: not JSON, not UTF-8, a wrong type, an unknown or unsupported field; the
            text and `param` name the field.
    """
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        return _decode_without_no_ops(body, schema, unsupported, error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is not valid JSON in UTF-8: {error}", code="invalid_json"
        ) from error


def _decode_without_no_ops(
    body: bytes,
    schema: type[T],
    unsupported: Mapping[str, Unsupported],
    first: msgspec.ValidationError,
) -> T:
    """A second try, without nulls and the unsupported fields whose value asks for nothing."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is not valid JSON in UTF-8: {error}", code="invalid_json"
        ) from error
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    if isinstance(raw, dict):
        raw = _without_no_ops(raw, known, unsupported)
        messages = raw.get("messages")
        if isinstance(messages, list):
            raw["messages"] = [
                _without_no_ops(message, set(), unsupported)
                if isinstance(message, dict)
                else message
                for message in messages
            ]
    try:
        return msgspec.json.decode(msgspec.json.encode(raw), type=schema)
    except msgspec.ValidationError as error:
        raise refusal(str(error), known, unsupported) from first


def _without_no_ops(
    fields: dict[str, Any], known: set[str], unsupported: Mapping[str, Unsupported]
) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if (value is not None if name in known else not is_no_op(name, value, unsupported))
    }


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)


def refusal(
    text: str, known: set[str], unsupported: Mapping[str, Unsupported]
) -> InvalidRequestError:
    """The 400 for a validation error's text, such as "Expected `int`, got `str` - at `$.n`"."""
    problem, _, place = text.partition(" - at ")
    path = place.replace("`key` in ", "").strip("`").removeprefix("$").removeprefix(".")
    path = path.removesuffix("[...]")
    if missing := _MISSING_FIELD.match(problem):
        param = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequestError(f"{param} is required", param=param, code="missing_field")
    if unknown := _UNKNOWN_FIELD.match(problem):
        return _unknown_field(unknown[1][:100], path, known, unsupported)
    if path.endswith(".type") and ".content[" in path:
        problem += "; the model takes text only: give {'type': 'text', 'text': ...}"
    subject = path or "the body"
    return InvalidRequestError(f"{subject}: {problem}", param=path or None, code="invalid_value")


def _unknown_field(
    name: str, path: str, known: set[str], unsupported: Mapping[str, Unsupported]
) -> InvalidRequestError:
    param = f"{path}.{name}".lstrip(".")
    if name in unsupported:
        entry = unsupported[name]
        return InvalidRequestError(
            f"{param} is not supported: "
            + (
                f"give {entry.instead} instead"
                if entry.instead
                else f"it needs {entry.missing_feature}, which this server does not have yet;"
                " leave it out"
            ),
            param=param,
            code="unsupported_parameter",
        )
    close = difflib.get_close_matches(name, known, n=1) if not path else []
    hint = f"; did you mean {close[0]}?" if close else "; leave it out"
    return InvalidRequestError(
        f"{param} is not a field of this endpoint{hint}", param=param, code="unknown_parameter"
    )
