"""One request as data: what crosses the process border and what the scheduler hands to the runner.

Imports neither torch nor transformers; everything here is plain data that a test can write as a
literal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from ostinato.graphs.seal import LateCompile
from ostinato.runtime.repetition import RepetitionDetectionParams
from ostinato.runtime.structured_output import StructuredOutputsParams

__all__ = (
    "AdmittedSequence",
    "BeamOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineStats",
    "FinishReason",
    "GenerationOutput",
    "LateCompile",
    "PooledOutput",
    "PoolingKind",
    "PoolingParams",
    "RepetitionDetectionParams",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ScheduledSequence",
    "SchedulerOutput",
    "SequenceOutput",
    "ServedModel",
    "ServedTask",
    "StepResult",
    "StructuredOutputsParams",
    "ThinkingLimit",
    "TimelineEvent",
    "TokenLogprobs",
)

ITERATION_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_N = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32


class FinishReason(StrEnum):
    """Why a request ended; every request ends exactly once."""

    stop = "stop"
    length = "length"
    abort = "abort"
    error = "error"
    repetition = "repetition"  # its last tokens were one pattern over and over


def _check(ok: bool, name: str, allowed: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


class ThinkingLimit(msgspec.Struct, frozen=True, kw_only=True):
    """How much of an answer may be reasoning, between two tokens at its beginning."""

    max_tokens: int  # between the two
    begin_token_id: int
    end_token_id: int
    is_open: bool = False  # the prompt ends with the first one


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick tokens and when to stop. The same names and meanings as in the OpenAI and vLLM
    APIs.

    Raises:
        ValueError: a value is out of range; the text names the parameter, the value and the range.
    """

    n: int = 1  # completions per prompt; they share the prompt's blocks
    best_of: int | None = None  # candidates, of which the n likeliest per token are given; null = n
    # The n best of as many beams as `best_of`: the likeliest sequences as a whole, no sampling.
    use_beam_search: bool = False
    length_penalty: float = 1.0  # a beam's score is its log-probability / length ** this
    early_stopping: bool | Literal["never"] = False  # True = as soon as there are enough beams
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
    logprob_token_ids: tuple[int, ...] | None = None  # reported instead of the likeliest
    prompt_logprobs: int | None = None  # as logprobs, of the prompt's tokens after the first
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is picked; null = all
    # Never generated, as their tokens with and without a space before them; only when nothing else
    # is possible.
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None  # keep that many; -1 = as many as fit; null = all
    truncation_side: Literal["left", "right"] = "left"  # where tokens are cut off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    skip_special_tokens: bool = True
    # What the answer must look like; it ends when that is complete.
    structured_outputs: StructuredOutputsParams | None = None
    thinking: ThinkingLimit | None = None  # of a model that reasons; chat sets it
    repetition_detection: RepetitionDetectionParams | None = None  # ends outputs in circles

    def __post_init__(self) -> None:
        _check(1 <= self.n <= MAX_N, "n", f"in [1, {MAX_N}]", self.n)
        _check(
            self.best_of is None or self.n <= self.best_of <= MAX_N,
            "best_of",
            f"null or in [n={self.n}, {MAX_N}]",
            self.best_of,
        )
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
        self._check_tokens()
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(
                count is None or 0 <= count <= MAX_LOGPROBS,
                name,
                f"null or in [0, {MAX_LOGPROBS}]",
                count,
            )
        self._check_chosen_tokens()
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2.0 <= getattr(self, name) <= 2.0, name, "in [-2, 2]", getattr(self, name))
        _check(
            0.0 < self.repetition_penalty <= 10.0,
            "repetition_penalty",
            "in (0, 10]",
            self.repetition_penalty,
        )
        self._check_beam_search()

    @property
    def num_candidates(self) -> int:
        """Completions that are generated for `n` that are given."""
        return self.best_of or self.n

    def _check_tokens(self) -> None:
        """What names tokens or texts, or counts them."""
        _check(
            len(self.stop) <= 16 and all(self.stop),
            "stop",
            "at most 16 non-empty strings",
            self.stop,
        )
        _check(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids",
            "null or at least one token id",
            self.allowed_token_ids,
        )
        _check(
            len(self.bad_words) <= MAX_BAD_WORDS and all(map(str.strip, self.bad_words)),
            "bad_words",
            f"at most {MAX_BAD_WORDS} words that are not blank",
            self.bad_words,
        )
        _check(
            self.truncate_prompt_tokens is None
            or self.truncate_prompt_tokens == -1
            or self.truncate_prompt_tokens >= 1,
            "truncate_prompt_tokens",
            "null, -1 (as many as fit) or at least 1",
            self.truncate_prompt_tokens,
        )
        _check(
            all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()),
            "logit_bias",
            "biases in [-100, 100]",
            self.logit_bias,
        )

    def _check_chosen_tokens(self) -> None:
        """Those of `logprob_token_ids`."""
        chosen = self.logprob_token_ids
        if chosen is None:
            return
        name = "logprob_token_ids"
        allowed = f"null or 1 to {MAX_LOGPROB_TOKEN_IDS} token ids"
        count = len(chosen)
        _check(1 <= len(chosen) <= MAX_LOGPROB_TOKEN_IDS, name, allowed, count)
        _check(self.logprobs is not None, name, "null without logprobs", count)
        why = "null with use_beam_search=true, which reports what it compared"
        _check(not self.use_beam_search, name, why, count)

    def _check_beam_search(self) -> None:
        """Nothing is ignored: a parameter that the chosen way has no use for is refused."""
        _check(
            -10.0 <= self.length_penalty <= 10.0,
            "length_penalty",
            "in [-10, 10]",
            self.length_penalty,
        )
        _check(
            self.early_stopping in (True, False, "never"),
            "early_stopping",
            "true, false or 'never'",
            self.early_stopping,
        )
        constraint = self.structured_outputs
        _check(
            constraint is None or not self.use_beam_search,
            "structured_outputs",
            "null with use_beam_search=true, which does not sample",
            None if constraint is None else constraint.kind,
        )
        limit = self.thinking
        _check(
            limit is None or not self.use_beam_search,
            "thinking_token_budget",
            "null with use_beam_search=true, which does not sample",
            None if limit is None else limit.max_tokens,
        )
        detection = self.repetition_detection
        _check(
            detection is None or not (detection.is_on and self.use_beam_search),
            "repetition_detection",
            "off with use_beam_search=true, whose beams end at stop tokens only",
            detection,
        )
        if self.use_beam_search:
            neutral: dict[str, tuple[object, ...]] = {
                "temperature": (1.0, 0.0),
                "top_p": (1.0,),
                "top_k": (0, -1),
                "min_p": (0.0,),
                "stop": ((),),
            }
            reason = "with use_beam_search=true, which does not sample and ends at tokens only"
        else:
            neutral = {"length_penalty": (1.0,), "early_stopping": (False,)}
            reason = "without use_beam_search=true"
        for name, values in neutral.items():
            value = getattr(self, name)
            _check(value in values, name, f"{values[0]!r} {reason}", value)


class PoolingKind(StrEnum):
    """Which of a text's hidden states make its vector."""

    mean = "mean"  # all, averaged
    last = "last"
    cls = "cls"  # the first


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What becomes of a prompt that nothing is generated for."""

    kind: PoolingKind = PoolingKind.last
    normalize: bool = True  # to length 1
    dimensions: int | None = None  # the vector's first so many, before it is normalised; null = all
    # Instead of the vector itself the classification head's answer to it: a sigmoid for one label,
    # a softmax for several, or with `raw_scores` the logits.
    classify: bool = False
    raw_scores: bool = False

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every token must be computed: what is cached has no hidden state."""
        return self.kind is not PoolingKind.last


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sequence to generate, or with `pooling` one to make a vector of. `n` completions of a
    prompt are n requests that share cached blocks.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0  # seconds, monotonic clock of the sender
    priority: int = 0  # lower runs first under the priority policy
    cache_salt: str = ""  # requests share cached blocks only with an equal salt
    bad_words_token_ids: list[list[int]] = []  # of `sampling.bad_words`, none empty
    pooling: PoolingParams | None = None  # nothing is generated; `sampling` is not read
    output_token_ids: list[int] = []  # given before, by an engine that is gone; it goes on there
    grammar: str = ""  # of `sampling.structured_outputs`, checked
    trace: bool = False  # its news carry what happened to it in the engine


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one position, from the raw logits."""

    logprob: float  # of the token that stands there
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
    num_prompt_logits: int = 0  # leading positions whose next token, the prompt's, is scored
    is_pooled: bool = False  # the positions' hidden states go into a vector


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """The only message from scheduler to runner: plain integers, replayable in a test."""

    scheduled: list[ScheduledSequence]
    admitted: list[AdmittedSequence]
    num_tokens: int
    num_prompt_logits: int = 0  # of all entries
    # (from, to): blocks whose contents are copied before anything is written, all at once.
    block_copies: list[tuple[int, int]] = []
    num_pooled: int = 0  # entries with `is_pooled`

    @property
    def num_seqs(self) -> int:
        return len(self.scheduled)


class StepResult(msgspec.Struct, array_like=True):
    """What the runner gives back, one entry per scheduled row with `samples`, in that order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # None = nobody asked
    # One list per entry with `num_prompt_logits`, in that order.
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
    pooled: list[bytes] | None = None  # one per entry that is the end of a pooled prompt
    # Sampling entries that end with this token: "" = the grammar is complete, or what is wrong with
    # it, and then the token is none.
    endings: dict[int, str] = {}


class BeamOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of the sequences that a beam search found."""

    token_ids: list[int]
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None  # the stop token's id when one ended it
    logprobs: list[TokenLogprobs] | None = None  # one per token: those that the search compared


class TimelineEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that happened to a traced request in the engine."""

    name: str  # grammar_built | scheduled | prefill | first_token | preempted | resumed
    at: float  # seconds, monotonic clock
    seconds: float = 0.0  # of a prefill: from the step's launch until its tokens were there
    start: int = 0  # of a prefill: its first position; those before were computed or cached
    num_tokens: int = 0  # of a prefill
    step: int = 0  # of a prefill: the engine's number of the step
    kind: str = ""  # of a prefill: captured | compiled | eager
    num_seqs: int = 0  # of a prefill: sequences in that step


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """One request's news of one step, engine -> client."""

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
    is_complete: bool = False  # its grammar ended it: the last token is no stop token
    is_refusal: bool = False  # the error is the request's own: its grammar can not go on
    scheduled_time: float = 0.0  # when it first had a row, monotonic; with its first news
    num_preemptions: int = 0  # with its finish reason
    events: list[TimelineEvent] | None = None  # since the last news, of a traced request


class ServedTask(StrEnum):
    """What a model can do."""

    generate = "generate"
    embed = "embed"
    classify = "classify"


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
    tasks: tuple[ServedTask, ...] = (ServedTask.generate,)
    embedding_size: int = 0  # numbers of a vector
    pooling: PoolingKind = PoolingKind.last  # of a request that names none
    normalize: bool = True  # the same
    num_labels: int = 0  # of the classification head; 0 = there is none
    num_segments: int = 0  # that an encoder tells apart; 0 = not an encoder


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
    late_compiles: list[LateCompile] = []  # empty when all is well
    step_seconds: float = 0.0  # summed over steps
    model_seconds: float = 0.0  # of which in the model's graph and sampler
    # Of finished steps, by the device's own clock where it has one, by how they were run.
    device_seconds_by_kind: dict[str, float] = {}
    max_num_seqs: int = 0  # as set, or as decided from measured step costs
    max_num_batched_tokens: int = 0  # the same
    predicted_step_seconds: float = 0.0  # of decoding what runs now; 0 = no step costs
    predicted_ttft_seconds: float = 0.0  # of a request of mean length that comes now
    num_evictions: int = 0  # cached blocks that were reused for other contents
    num_admitted: int = 0  # sequences that left the queue for the first time
    queue_seconds: float = 0.0  # that those waited, summed
    num_waiting_for_grammar: int = 0  # of `num_waiting`
    grammar_seconds: float = 0.0  # of steps, in which grammars' masks were made
    grammar_build_seconds: float = 0.0  # beside the steps
    num_padding_tokens: int = 0  # computed to fill captured buckets up
    host_gap_seconds: float = 0.0  # with work, but neither in the model nor waiting for it
    num_scheduled_tokens: int = 0  # that steps were asked for
    # Steps by their tokens: one count per bound of ITERATION_TOKENS, then those above the last.
    iteration_tokens: list[int] = []

    @property
    def device_seconds(self) -> float:
        """Of all finished steps."""
        return sum(self.device_seconds_by_kind.values())


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
    is_refusal: bool = False  # the error is the request's own, a 400
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first token, if asked for
    num_discarded_tokens: int = 0  # of candidates that were not among the n best
    score: float | None = None  # what the n best were chosen by, with `best_of` and beam search
    scheduled_time: float = 0.0  # when it first had a row, monotonic; with its first news
    num_preemptions: int = 0  # with the finish reason
    events: list[TimelineEvent] | None = None  # since the last news, of a traced request


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
    events: list[TimelineEvent] | None = None  # of a traced request


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
    score: float | None = None  # what it was chosen by, with `best_of` and beam search


class GenerationOutput(msgspec.Struct, kw_only=True):
    """One prompt's result of `LLM.generate`."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens after the first
    metrics: dict[str, Any] = {}
