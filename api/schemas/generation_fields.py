"""The sampling and reply fields that `/v1/chat/completions` and `/v1/completions` share.

A sampling parameter that both endpoints take is declared here, under its name in `SamplingParams`.
`api.preparation.generation.sampling_params` copies it by this name.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ostinato.api.base.request_context import REQUEST_ID_PATTERN
from ostinato.api.schemas.client_fields import SafetyIdentifier
from ostinato.api.schemas.response_format import ConstraintFields
from ostinato.runtime.types.params import (
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    RepetitionDetectionParams,
)

__all__ = (
    "GenerationFields",
    "Int32",
    "RequestId",
    "StreamOptions",
)

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


RequestId = Annotated[str, msgspec.Meta(pattern=REQUEST_ID_PATTERN)]


def _range(**schema: float) -> msgspec.Meta:
    """A range for the OpenAPI document. `SamplingParams` checks the value."""
    return msgspec.Meta(extra_json_schema=schema)


ChosenTokens = Annotated[list[int], _range(maxItems=MAX_LOGPROB_TOKEN_IDS)]


Biases = Annotated[dict[int, float], _range(maxProperties=MAX_LOGIT_BIAS)]


Completions = Annotated[int, _range(minimum=1, maximum=MAX_N)]


KeptTokens = Annotated[int, _range(minimum=-1, maximum=MAX_COUNT)]


LengthPenalty = Annotated[float, _range(minimum=-10, maximum=10)]


Logprobs = Annotated[int, _range(minimum=0, maximum=MAX_LOGPROBS)]


MinTokens = Annotated[int, _range(minimum=0, maximum=MAX_COUNT)]


Penalty = Annotated[float, _range(minimum=-2, maximum=2)]


RepetitionPenalty = Annotated[float, _range(exclusiveMinimum=0, maximum=10)]


Seed = Annotated[int, _range(minimum=-(1 << 63), maximum=(1 << 63) - 1)]


Share = Annotated[float, _range(minimum=0, maximum=1)]


StopTokens = Annotated[list[int], _range(maxItems=MAX_STOP_TOKEN_IDS)]


Temperature = Annotated[float, _range(minimum=0, maximum=2)]


Tokens = Annotated[int, _range(minimum=1)]


TopK = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31), _range(minimum=-1)]


TopP = Annotated[float, _range(exclusiveMinimum=0, maximum=1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False  # the last chunk has the usage of the whole request
    continuous_usage_stats: bool = False  # with include_usage, every chunk has the usage so far
    include_obfuscation: Literal[False] = False  # chunks are never padded


class GenerationFields(ConstraintFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared fields. Null and absent both mean the server's default.

    `SamplingParams` checks the ranges.
    """

    model: str | None = None  # absent = the served model
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
    logit_bias: Biases | None = None
    seed: Seed | None = None
    max_tokens: Tokens | None = None
    min_tokens: MinTokens | None = None
    stop: str | list[str] | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: Logprobs | None = None  # not with stream
    logprob_token_ids: ChosenTokens | None = None  # needs logprobs; replaces the most likely tokens
    echo: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_prompt_text: bool = False
    return_token_offsets: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Least number of tokens of a chunk. The first and the last chunk can have fewer.
    stream_interval: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    priority: Int32 = 0  # lower runs first under scheduler.policy=priority
    speculation: bool = True  # false = no drafts; the answer is the same
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""  # equal salts share cached blocks
    # Milliseconds since the request's arrival. Then the answer ends with its output so far. If it
    # has no output yet, it is a 504.
    deadline_ms: Annotated[float, msgspec.Meta(ge=1, le=24 * 3600 * 1000)] | None = None
    request_id: RequestId | None = None  # names the reply and its log line
    user: str | None = None  # the caller's label of an end user; has no effect
    safety_identifier: SafetyIdentifier | None = None  # the newer name of `user`
    prompt_cache_key: str | None = None  # has no effect, because there is one cache
