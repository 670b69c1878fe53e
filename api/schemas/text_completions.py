"""The bodies of `/v1/completions`: the request, and one type for whole answers and for chunks."""

from __future__ import annotations

from typing import Literal

import msgspec

from ostinato.api.base.timeline import Timeline
from ostinato.api.schemas.generation_fields import GenerationFields
from ostinato.api.schemas.usage import CompletionUsage, PromptLogprobs, TokenOffsets

__all__ = (
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
)


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]  # text, token ids, or a list of either
    logprobs: int | None = None
    add_special_tokens: bool = True  # add special tokens such as bos around text prompts


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
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in the choice's first chunk
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    # None = the prompt came as token ids, not as text.
    prompt_token_offsets: TokenOffsets | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response, or one chunk of a stream. The legacy endpoint has one type for both."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str  # names the model and kernels, see docs/determinism.md
    choices: list[CompletionChoice]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET  # streams: in a chunk without choices
