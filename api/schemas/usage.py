"""Parts of answers that endpoints share: token counts, prompt log-probabilities, offsets."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = (
    "CompletionTokensDetails",
    "PromptLogprob",
    "PromptLogprobs",
    "PromptTokensDetails",
    "TokenOffsets",
    "Usage",
)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int  # tokens of reasoning


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # Only in chat, for models that reason.
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


TokenOffsets = list[Annotated[list[int], msgspec.Meta(min_length=2, max_length=2)]]
"""Per prompt token the characters [begin, end) of the text; [0, 0] = no characters."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token, None for the first: token id -> candidate, the token itself among them."""
