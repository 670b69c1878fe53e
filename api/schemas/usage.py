"""Parts of answers that endpoints share: token counts, prompt log-probabilities, offsets."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = (
    "CompletionTokensDetails",
    "CompletionUsage",
    "PromptLogprob",
    "PromptLogprobs",
    "PromptTokensDetails",
    "TokenOffsets",
    "completion_details",
)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET  # only for models that reason
    # Draft tokens from `prediction`: how many became part of the answer, and how many did not.
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


def completion_details(
    num_reasoning_tokens: int | None, prediction: tuple[int, int] | None
) -> CompletionTokensDetails | msgspec.UnsetType:
    """The details of a reply's usage; UNSET if there are none.

    Args:
        num_reasoning_tokens: number of reasoning tokens; None = the model does not reason.
        prediction: number of accepted and of rejected tokens; None = the request has no
            `prediction`.
    """
    if num_reasoning_tokens is None and prediction is None:
        return msgspec.UNSET
    accepted, rejected = prediction or (msgspec.UNSET, msgspec.UNSET)
    return CompletionTokensDetails(
        reasoning_tokens=msgspec.UNSET if num_reasoning_tokens is None else num_reasoning_tokens,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
    )


class CompletionUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # Only in chat, and only for models that reason or requests with a prediction.
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


TokenOffsets = list[Annotated[list[int], msgspec.Meta(min_length=2, max_length=2)]]
"""For each prompt token, its characters [begin, end) in the text; [0, 0] = no characters."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token: token id -> candidate, including the token itself. None for the first."""
