"""Outputs of requests: of the engine (one a step), of the client (one a delta) and of `LLM`."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ostinato.runtime.types.speculation import SpeculationReport

__all__ = (
    "DEADLINE_REASON",
    "GRAMMAR_REFUSAL",
    "BeamOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "FinishReason",
    "GenerationOutput",
    "PooledOutput",
    "Refusal",
    "RequestOutput",
    "SequenceOutput",
    "TimelineEvent",
    "TokenLogprobs",
    "Transcript",
    "TranscriptionSegment",
)


DEADLINE_REASON = "deadline_exceeded"
"""The `stop_reason` of an answer that its deadline has cut off."""


class FinishReason(StrEnum):
    """Why a request ended; every request ends exactly once."""

    stop = "stop"
    length = "length"
    abort = "abort"
    error = "error"
    repetition = "repetition"  # the end of the output repeated one pattern


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities (natural logarithm) at one position, from the raw logits.

    The log-probabilities of beams are from the logits after processors and masks.
    """

    logprob: float  # the log-probability of the token at that position
    rank: int  # 1 = the likeliest token
    top_ids: list[int]  # the likeliest tokens, or `logprob_token_ids`
    top_logprobs: list[float]


class BeamOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of the sequences that a beam search returns."""

    token_ids: list[int]
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None  # the id of the stop token that ended it
    logprobs: list[TokenLogprobs] | None = None  # one per token; the search uses these values


class Refusal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How an API answers a request that caused an error in the engine; see InvalidRequestError."""

    param: str | None = None  # the field at fault; None = not known to the engine
    code: str | None = None
    status: int = 400


GRAMMAR_REFUSAL = Refusal(code="constraint_too_complex")
"""The request's constraint caused the error. The API knows the field that states it."""


class TimelineEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event of a traced request in the engine. Most fields are for `prefill` events only."""

    name: str  # grammar_built | scheduled | prefill | first_token | preempted | resumed
    at: float  # seconds, monotonic clock
    # prefill: from the step's launch until its result was read. grammar_built: from the request's
    # arrival until its grammar was built.
    seconds: float = 0.0
    start: int = 0  # prefill: first position of the chunk
    num_tokens: int = 0  # prefill: tokens of the chunk
    step: int = 0  # prefill: number of the step
    kind: str = ""  # prefill: captured | compiled | eager
    num_seqs: int = 0  # prefill: sequences in the step


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """One request's output of one step, engine -> client."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token's id, or a word such as REPETITION_REASON
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at admission
    error: str | None = None  # text, with finish_reason error
    # One entry for each prompt token after the first. Sent with the first new token.
    prompt_logprobs: list[TokenLogprobs] | None = None
    beams: list[BeamOutput] | None = None  # at the end of a beam search: the n best, best first
    pooled: bytes | None = None  # little-endian float32, of a pooled request
    is_complete: bool = False  # the grammar ended the output; the last token is not a stop token
    refusal: Refusal | None = None  # set with an error that the request caused
    # When the request first had a row, monotonic clock. Set in its first output.
    scheduled_time: float = 0.0
    num_preemptions: int = 0  # set together with the finish reason
    events: list[TimelineEvent] | None = None  # of a traced request: events since the last output
    # A large output is sent in several messages. A part has only log-probabilities of the prompt,
    # or beams. They belong to the request's next output that is not a part.
    is_part: bool = False
    num_before: int = 0  # in a part: number of log-probabilities or beams in earlier parts
    speculation: SpeculationReport | None = None  # drafts in this step; None = no draft

    def shift_times(self, seconds: float) -> None:
        """Convert the times to the clock of another machine, by adding `seconds` to them."""
        if self.scheduled_time:
            self.scheduled_time += seconds
        if self.events:
            self.events = [
                msgspec.structs.replace(event, at=event.at + seconds) for event in self.events
            ]


class RequestOutput(msgspec.Struct, kw_only=True):
    """A new part of one completion, client -> API, with text that can be streamed."""

    request_id: str
    index: int  # index among the n completions
    text_delta: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    # The text that each new token adds, if one step gave several tokens; else None.
    token_texts: list[str] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # so far
    error: str | None = None
    refusal: Refusal | None = None  # set with an error that the request caused
    prompt_logprobs: list[TokenLogprobs] | None = None  # sent with the first token, if requested
    num_discarded_tokens: int = 0  # tokens of candidates that were not among the n best
    score: float | None = None  # the completion's score, with `best_of` or beam search
    # When the request first had a row, monotonic clock. Set in its first output.
    scheduled_time: float = 0.0
    num_preemptions: int = 0  # set together with the finish reason
    events: list[TimelineEvent] | None = None  # of a traced request: events since the last output
    speculation: SpeculationReport | None = None  # drafts since the last output; None = no draft


class PooledOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one pooled request."""

    request_id: str
    data: bytes  # little-endian float32
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    finish_reason: FinishReason = FinishReason.stop
    error: str | None = None  # text, with finish_reason error
    refusal: Refusal | None = None  # set with an error that the request caused
    scheduled_time: float = 0.0  # when the request first had a row, monotonic clock
    num_preemptions: int = 0
    events: list[TimelineEvent] | None = None  # the events of a traced request


class EmbeddingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `LLM.embed` for one text."""

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
    score: float | None = None  # the completion's score, with `best_of` or beam search


class GenerationOutput(msgspec.Struct, kw_only=True):
    """The result of `LLM.generate` for one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None  # for the prompt's tokens after the first


class TranscriptionSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a transcript with its times, which the model wrote as timestamps."""

    id: int  # from 0, over all windows
    seek: int  # the frame of the spectrogram with which the window begins, 100 frames a second
    start: float  # seconds from the beginning of the file
    end: float
    text: str  # with the space before it
    tokens: list[int]  # with the timestamps
    temperature: float
    # The next three are those of the window, in all of its segments, as in Whisper.
    avg_logprob: float  # mean log-probability of the tokens, the end token included
    compression_ratio: float  # bytes of the text / bytes after zlib; large = it repeats itself
    no_speech_prob: float  # 0 if the model has no token for it


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `LLM.transcribe` for one file."""

    text: str
    language: str  # code of the spoken language, given or detected; "en" for an English model
    duration: float  # seconds of audio
    segments: list[TranscriptionSegment] | None = None  # None = without timestamps
