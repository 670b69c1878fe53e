"""One request as data: what crosses the process border and what the scheduler hands to the runner.

Imports neither torch nor transformers; everything here is plain data that a test can write as a
literal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

__all__ = (
    "AdmittedSequence",
    "CompletionOutput",
    "EngineStats",
    "FinishReason",
    "GenerationOutput",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ScheduledSequence",
    "SchedulerOutput",
    "SequenceOutput",
    "ServedModel",
    "StepResult",
    "TokenLogprobs",
)

MAX_LOGPROBS = 20
MAX_N = 128


class FinishReason(StrEnum):
    """Why a request ended; every request ends exactly once."""

    stop = "stop"
    length = "length"
    abort = "abort"
    error = "error"


def _check(ok: bool, name: str, allowed: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick tokens and when to stop. The same names and meanings as in the OpenAI and vLLM
    APIs.

    Raises:
        ValueError: a value is out of range; the text names the parameter, the value and the range.
    """

    n: int = 1  # completions per prompt; they share the prompt's blocks
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    seed: int | None = None  # same seed, same tokens, whatever else is in the batch
    max_tokens: int | None = 16  # null = up to the end of the context
    min_tokens: int = 0  # no end-of-sequence or stop token before this many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # null = none; k = the sampled token's and the k likeliest
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check(1 <= self.n <= MAX_N, "n", f"in [1, {MAX_N}]", self.n)
        _check(0.0 <= self.temperature <= 2.0, "temperature", "in [0, 2]", self.temperature)
        _check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        _check(self.top_k >= -1, "top_k", "-1, 0 (both off) or at least 1", self.top_k)
        _check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        _check(
            self.seed is None or -(1 << 63) <= self.seed < 1 << 63,
            "seed",
            "null or a 64-bit integer",
            self.seed,
        )
        _check(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            "at least 1",
            self.max_tokens,
        )
        _check(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens={self.max_tokens}",
            self.min_tokens,
        )
        _check(
            len(self.stop) <= 16 and all(self.stop),
            "stop",
            "at most 16 non-empty strings",
            self.stop,
        )
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"null or in [0, {MAX_LOGPROBS}]",
            self.logprobs,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2.0 <= getattr(self, name) <= 2.0, name, "in [-2, 2]", getattr(self, name))
        _check(
            0.0 < self.repetition_penalty <= 10.0,
            "repetition_penalty",
            "in (0, 10]",
            self.repetition_penalty,
        )
        _check(
            all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()),
            "logit_bias",
            "biases in [-100, 100]",
            self.logit_bias,
        )


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sequence to generate. `n` completions of a prompt are n requests that share cached
    blocks.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0  # seconds, monotonic clock of the sender
    priority: int = 0  # lower runs first under the priority policy
    cache_salt: str = ""  # requests share cached blocks only with an equal salt


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one output position, from the raw logits."""

    logprob: float  # of the sampled token
    rank: int  # 1 = it was the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


class AdmittedSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a row this step (new, or resumed after preemption)."""

    row: int  # index into the runner's persistent buffers
    request: Request
    output_token_ids: list[int]  # not empty when it resumes


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True):
    """What one row computes this step: positions [start, start + num_new_tokens)."""

    row: int
    start: int
    num_new_tokens: int
    token_ids: list[int]  # those positions' tokens; empty = the row's last sampled token
    new_block_ids: list[int]  # appended to the row's block table
    samples: bool  # True when the last position's logits give a token


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """The only message from scheduler to runner: plain integers, replayable in a test."""

    scheduled: list[ScheduledSequence]
    admitted: list[AdmittedSequence]
    num_tokens: int

    @property
    def num_seqs(self) -> int:
        return len(self.scheduled)


class StepResult(msgspec.Struct, array_like=True):
    """What the runner gives back, one entry per scheduled row with `samples`, in that order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # None = nobody asked


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """One request's news of one step, engine -> client."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token's id when one ended it
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    num_cached_tokens: int = 0  # prompt tokens that were not recomputed at first admission
    error: str | None = None  # text, with finish_reason error


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may know about the model that an engine serves."""

    name: str
    max_model_len: int  # tokens, prompt plus output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: str  # directory with the tokenizer's files; empty = none, token ids only
    default_sampling: dict[str, int | float] = {}  # from generation_config.json
    created: int = 0  # unix seconds
    startup_seconds: dict[str, float] = {}  # phase -> seconds, in order


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """A snapshot of the engine for metrics and health; counters grow from zero at engine start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # usable blocks, the null block excluded
    num_free_blocks: int = 0  # cached but unused blocks count as free
    num_steps: int = 0
    steps_by_kind: dict[str, int] = {}  # captured | compiled | eager
    num_prompt_tokens: int = 0  # computed, cache hits excluded
    num_output_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of which found
    num_preemptions: int = 0
    late_compiles: int = 0
    step_seconds: float = 0.0  # summed over steps
    model_seconds: float = 0.0  # of which in the model's graph and sampler


class RequestOutput(msgspec.Struct, kw_only=True):
    """One completion's news, client -> API: text that is safe to show, never half a character."""

    request_id: str
    index: int  # which of the n completions
    text_delta: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # so far
    error: str | None = None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One finished completion of `LLM.generate`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None


class GenerationOutput(msgspec.Struct, kw_only=True):
    """One prompt's result of `LLM.generate`."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    metrics: dict[str, Any] = {}
