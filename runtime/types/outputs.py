"""The outputs of requests: those of the engine per step, of the client per delta, and of `LLM`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from ostinato.runtime.types.speculation import SpeculationReport

__all__ = (
    "BeamOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "FinishReason",
    "GenerationOutput",
    "PooledOutput",
    "RequestOutput",
    "SequenceOutput",
    "TimelineEvent",
    "TokenLogprobs",
)


class FinishReason(StrEnum):
    """Why a request ended; every request ends exactly once."""

    stop = "stop"
    length = "length"
    abort = "abort"
    error = "error"
    repetition = "repetition"  # its last tokens were one pattern over and over


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one position, from the raw logits."""

    logprob: float  # the log-probability of the token at that position
    rank: int  # 1 = the likeliest token
    top_ids: list[int]
    top_logprobs: list[float]


class BeamOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of the sequences that a beam search found."""

    token_ids: list[int]
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None  # the stop token's id when one ended it
    logprobs: list[TokenLogprobs] | None = None  # one per token; the values that the search uses


class TimelineEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that happened to a traced request in the engine."""

    name: str  # grammar_built | scheduled | prefill | first_token | preempted | resumed
    at: float  # seconds, monotonic clock
    seconds: float = 0.0  # prefill: from the step's launch until its tokens were there
    start: int = 0  # prefill: its first position; earlier ones were computed or cached
    num_tokens: int = 0  # prefill: its tokens
    step: int = 0  # prefill: the engine's number of the step
    kind: str = ""  # prefill: captured | compiled | eager
    num_seqs: int = 0  # prefill: sequences in that step


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """One request's output of one step, engine -> client."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token's id, or what else ended it
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    num_cached_tokens: int = 0  # prompt tokens that were not recomputed at first admission
    error: str | None = None  # text, with finish_reason error
    # With the first new token: one per prompt token after the first.
    prompt_logprobs: list[TokenLogprobs] | None = None
    beams: list[BeamOutput] | None = None  # at the end of a beam search: the n best, best first
    pooled: bytes | None = None  # little-endian float32, of a pooled request
    is_complete: bool = False  # its grammar ended it; the last token is not a stop token
    is_refusal: bool = False  # the request caused the error: its grammar cannot continue
    scheduled_time: float = 0.0  # when it first had a row, monotonic; with its first output
    num_preemptions: int = 0  # with its finish reason
    events: list[TimelineEvent] | None = None  # since the last output, of a traced request
    # A part has log-probabilities of the prompt, or beams. They belong to the request's next
    # output that is not a part.
    is_part: bool = False
    num_before: int = 0  # in a part: log-probabilities or beams of earlier parts
    speculation: SpeculationReport | None = None  # for this step; None = it had no draft

    def shift_times(self, seconds: float) -> None:
        """Add seconds to its times: those of another machine's clock become this one's."""
        if self.scheduled_time:
            self.scheduled_time += seconds
        if self.events:
            self.events = [
                msgspec.structs.replace(event, at=event.at + seconds) for event in self.events
            ]


class RequestOutput(msgspec.Struct, kw_only=True):
    """One completion's output, client -> API, with text that can be streamed."""

    request_id: str
    index: int  # index among the n completions
    text_delta: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # so far
    error: str | None = None
    is_refusal: bool = False  # the request caused the error: a 400
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first token, if asked for
    num_discarded_tokens: int = 0  # tokens of candidates that were not among the n best
    score: float | None = None  # the score of the n best, with `best_of` and beam search
    scheduled_time: float = 0.0  # when it first had a row, monotonic; with its first output
    num_preemptions: int = 0  # with the finish reason
    events: list[TimelineEvent] | None = None  # since the last output, of a traced request
    speculation: SpeculationReport | None = None  # since the last output; None = no draft


class PooledOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one pooled request."""

    request_id: str
    data: bytes  # little-endian float32
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    finish_reason: FinishReason = FinishReason.stop
    error: str | None = None  # text, with finish_reason error
    scheduled_time: float = 0.0  # when it first had a row, monotonic
    num_preemptions: int = 0
    events: list[TimelineEvent] | None = None  # the events of a traced request


class EmbeddingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One text's result of `LLM.embed`."""

    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One finished completion of `LLM.generate`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    score: float | None = None  # its score, with `best_of` and beam search


class GenerationOutput(msgspec.Struct, kw_only=True):
    """One prompt's result of `LLM.generate`."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None  # for the prompt's tokens after the first
    metrics: dict[str, Any] = {}
