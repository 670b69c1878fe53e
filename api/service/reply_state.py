"""The state that replies of all APIs have: id, options, token counts, joined outputs."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from io import StringIO
from typing import Self

import msgspec

from ostinato.api.preparation.generation import Generation
from ostinato.api.schemas.client_fields import ServedTier
from ostinato.api.schemas.usage import CompletionUsage, PromptTokensDetails, completion_details
from ostinato.runtime.types.outputs import FinishReason, RequestOutput, TokenLogprobs

__all__ = (
    "CollectedCompletion",
    "ReplyHead",
    "ReplyOptions",
    "Tally",
    "add_prediction",
    "collect",
    "new_id",
)


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(TokenLogprobs).decode


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every chunk of one reply repeats."""

    id: str
    created: int  # unix seconds
    model: str
    system_fingerprint: str  # the engine's fingerprint, see docs/determinism.md
    service_tier: ServedTier | msgspec.UnsetType = msgspec.UNSET  # only chat has it


class ReplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of the engine's outputs a reply shows."""

    num_top_logprobs: int | None = None  # alternatives per token; None = no log-probabilities
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens
    return_token_ids: bool = False
    as_token_ids: bool = False  # log-probabilities name tokens `token_id:N`

    def token_ids(self, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
        """The ids if the reply shows them, else UNSET."""
        return token_ids if self.return_token_ids else msgspec.UNSET


class CollectedCompletion(msgspec.Struct, kw_only=True):
    """All outputs of one completion, joined."""

    written: StringIO = msgspec.field(default_factory=StringIO)
    token_ids: list[int] = []
    # Each entry is a `TokenLogprobs` as msgpack. Millions of Python objects would leave memory that
    # does not return to the system.
    packed_logprobs: list[bytes] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return self.written.getvalue()

    def add(self, output: RequestOutput) -> None:
        """Add the next output."""
        self.written.write(output.text_delta)
        self.token_ids += output.new_token_ids
        self.packed_logprobs += map(_pack, output.logprobs or ())
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason

    def logprobs(self, part: slice) -> list[TokenLogprobs]:
        """The entries of some tokens; empty if the request does not ask for them."""
        return list(map(_unpack, self.packed_logprobs[part]))


class Tally:
    """Token counts of one reply. Each prompt counts once; the outputs of all completions count.

    Args:
        num_prompt_tokens: tokens of all prompts.
        has_prediction: whether a request has a `prediction` of its answer.
    """

    @classmethod
    def of(cls, generations: Iterable[Generation]) -> Self:
        """The counts at the beginning of the reply to some prompts."""
        generations = list(generations)
        return cls(
            sum(len(one.prompt_token_ids) for one in generations),
            has_prediction=any(one.prediction_token_ids for one in generations),
        )

    def __init__(self, num_prompt_tokens: int, *, has_prediction: bool = False) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.num_reasoning_tokens: int | None = None  # None = the model does not reason
        self._prediction = (0, 0) if has_prediction else None  # accepted, rejected
        self._cached: dict[int, int] = {}

    def add(self, prompt_index: int, output: RequestOutput, num_reasoning_tokens: int = 0) -> None:
        """Count one output."""
        if self.num_reasoning_tokens is not None:
            self.num_reasoning_tokens += num_reasoning_tokens
        self.num_output_tokens += len(output.new_token_ids) + output.num_discarded_tokens
        self._prediction = add_prediction(self._prediction, output)
        if output.index == 0:  # the other completions share the blocks of the first
            self._cached[prompt_index] = output.num_cached_tokens

    @property
    def usage(self) -> CompletionUsage:
        """The counts as the OpenAI API reports them."""
        return CompletionUsage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached.values())),
            completion_tokens_details=completion_details(
                self.num_reasoning_tokens, self._prediction
            ),
        )


def add_prediction(counts: tuple[int, int] | None, output: RequestOutput) -> tuple[int, int] | None:
    """Add an output to a prediction's counts of (accepted, rejected) tokens; None stays None."""
    report = output.speculation
    if counts is None or report is None:
        return counts
    accepted, rejected = counts
    return (
        accepted + report.num_accepted_prediction_tokens,
        rejected + report.num_rejected_prediction_tokens,
    )


def new_id(prefix: str, of_body: str | None, of_header: str) -> str:
    """The reply's id: a prefix, then the id from the body or the header, or a random id."""
    return f"{prefix}-{of_body or of_header or secrets.token_hex(16)}"


def collect(
    completions: dict[tuple[int, int], CollectedCompletion],
    prompt_index: int,
    output: RequestOutput,
) -> None:
    """Add an output to its completion in `completions`. The keys are (prompt index, index)."""
    completions.setdefault((prompt_index, output.index), CollectedCompletion()).add(output)
