"""The parameters of a request: `SamplingParams`, `PoolingParams`, thinking limits, with ranges."""

from __future__ import annotations

import copy
import re
import reprlib
from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from ostinato.runtime.types.structured_outputs import StructuredOutputsParams
from ostinato.runtime.types.transcript_rules import TranscriptRules

__all__ = (
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_COUNT",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_N",
    "MAX_STOP_TOKEN_IDS",
    "PoolingKind",
    "PoolingParams",
    "RepetitionDetectionParams",
    "SamplingParams",
    "ThinkingLimit",
)

MAX_PATTERN_TOKENS = 512
MAX_COUNT = (1 << 31) - 1

MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_N = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_BAD_WORD_CHARACTERS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_BEAM_STOP_TOKENS = 128  # each one makes every beam report a continuation more
MAX_STOP_CHARACTERS = 4096

_CHOICES = {"early_stopping": "true, false or 'never'", "truncation_side": "'left' or 'right'"}

PatternSize = Annotated[int, msgspec.Meta(ge=0, le=MAX_PATTERN_TOKENS)]


def _check(ok: bool, name: str, allowed: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {reprlib.repr(value)}")


def _is_word(text: str) -> bool:
    return len(text) <= MAX_BAD_WORD_CHARACTERS and bool(text.strip())


class RepetitionDetectionParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Which repeated patterns end an output.

    Raises:
        ValueError: a value is out of range; the text names the parameter, the value and the range.
    """

    max_pattern_size: PatternSize = 0  # tokens; 0 = off
    min_pattern_size: PatternSize = 0  # tokens; 0 means 1
    # The output ends when its end is this many copies of one pattern.
    min_count: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0

    def __post_init__(self) -> None:
        limits = (
            ("max_pattern_size", 0, MAX_PATTERN_TOKENS, ""),
            ("min_pattern_size", 0, self.max_pattern_size, ", which is max_pattern_size"),
            ("min_count", 2 if self.is_on else 0, MAX_COUNT, ""),
        )
        for name, least, most, why in limits:
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(
                    f"repetition_detection.{name} must be in [{least}, {most}{why}], got {value}"
                )

    @property
    def is_on(self) -> bool:
        return self.max_pattern_size > 0


class ThinkingLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on the reasoning at the beginning of an answer, between two marker tokens."""

    max_tokens: int  # tokens between the markers
    begin_token_id: int
    end_token_id: int
    is_open: bool = False  # the prompt ends with the first marker


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick tokens and when to stop, with the names and meanings of the OpenAI and vLLM APIs.

    One text may be given for `stop`, and an object with the fields of `StructuredOutputsParams` or
    `RepetitionDetectionParams` for these.

    Raises:
        ValueError: a value is of another type or out of range; the text names the parameter, the
            value and the range.
    """

    n: int = 1  # completions per prompt; they share the prompt's blocks
    # Number of generated candidates. The n with the highest mean log-probability are returned.
    best_of: int | None = None
    # Beam search with `best_of` beams instead of sampling; returns the n best sequences.
    use_beam_search: bool = False
    length_penalty: float = 1.0  # score of a beam = log-probability / length ** length_penalty
    early_stopping: bool | Literal["never"] = False  # True = stop when `best_of` beams are finished
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    # A token's random number depends only on the seed and the token's position. null = random seed.
    seed: int | None = None
    max_tokens: int | None = 16  # null = up to the end of the context
    min_tokens: int = 0  # no stop before this many output tokens, unless a grammar is complete
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    # k = log-probabilities of the sampled token and of the k likeliest tokens; null = none.
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None  # tokens reported instead of the likeliest
    prompt_logprobs: int | None = None  # as logprobs, for the prompt's tokens after the first
    allowed_token_ids: tuple[int, ...] | None = None  # only these are sampled; null = all
    # Words that are not generated, with or without a space before them, unless no other token is
    # possible.
    bad_words: tuple[str, ...] = ()
    # Prompt tokens to keep; -1 = the largest number that fits; null = all.
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"  # where tokens are cut off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    skip_special_tokens: bool = True
    # A constraint on the answer. The answer ends when the constraint is complete.
    structured_outputs: StructuredOutputsParams | None = None
    thinking: ThinkingLimit | None = None  # set for chats with a model that reasons
    transcript: TranscriptRules | None = None  # set for transcripts of audio
    repetition_detection: RepetitionDetectionParams | None = None  # ends an output that repeats
    speculation: bool = True  # false = no drafts for this request

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        self._convert()
        _check(1 <= self.n <= MAX_N, "n", f"in [1, {MAX_N}]", self.n)
        _check(
            self.best_of is None or self.n <= self.best_of <= MAX_N,
            "best_of",
            f"null or in [n={self.n}, {MAX_N}]",
            self.best_of,
        )
        _check(0.0 <= self.temperature <= 2.0, "temperature", "in [0, 2]", self.temperature)
        _check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        _check(
            -1 <= self.top_k <= MAX_COUNT,
            "top_k",
            f"-1, 0 (both off) or in [1, {MAX_COUNT}]",
            self.top_k,
        )
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
        _check(
            0 <= self.min_tokens <= MAX_COUNT,
            "min_tokens",
            f"in [0, {MAX_COUNT}]",
            self.min_tokens,
        )
        self._check_min_tokens()
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
        """The number of completions that are generated; `n` of these are returned."""
        return self.best_of or self.n

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """A copy with another `max_tokens`, of at least 1.

        Raises:
            ValueError: `min_tokens` is larger.
        """
        changed = self.with_unchecked(max_tokens=max_tokens)
        changed._check_min_tokens()
        return changed

    def with_unchecked(self, **values: object) -> SamplingParams:
        """A copy with other values, which the caller knows to be valid.

        `msgspec.structs.replace` would check all parameters again. That takes a millisecond for
        `allowed_token_ids` of a large vocabulary.
        """
        changed = copy.copy(self)
        for name, value in values.items():
            msgspec.structs.force_setattr(changed, name, value)
        return changed

    def _check_min_tokens(self) -> None:
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens={self.max_tokens}",
            self.min_tokens,
        )

    def _convert(self) -> None:
        """Check the types, which Python does not, and convert lists, integers and objects."""
        try:
            typed = msgspec.convert(self, _Types, from_attributes=True)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at ")
            found = re.search(r"\$\.(\w+)", path)  # the parameter, without the fields inside it
            assert found is not None, path
            name, value = found[1], getattr(self, found[1])
            _check(name not in _CHOICES, name, _CHOICES.get(name, ""), value)
            raise ValueError(f"{name}={reprlib.repr(value)}: {reason}") from error
        for name in self.__struct_fields__:
            value = getattr(typed, name)
            if value is not getattr(self, name):
                msgspec.structs.force_setattr(self, name, value)

    def _check_tokens(self) -> None:
        """Check parameters that name or count tokens and texts."""
        _check(
            len(self.stop) <= MAX_STOP_STRINGS
            and all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in self.stop),
            "stop",
            f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
            self.stop,
        )
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} token ids",
            len(self.stop_token_ids),
        )
        _check(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids",
            "null or at least one token id",
            self.allowed_token_ids,
        )
        _check(
            len(self.bad_words) <= MAX_BAD_WORDS and all(map(_is_word, self.bad_words)),
            "bad_words",
            f"at most {MAX_BAD_WORDS} words that are not blank, of at most "
            f"{MAX_BAD_WORD_CHARACTERS} characters",
            self.bad_words,
        )
        _check(
            self.truncate_prompt_tokens is None
            or self.truncate_prompt_tokens == -1
            or 1 <= self.truncate_prompt_tokens <= MAX_COUNT,
            "truncate_prompt_tokens",
            f"null, -1 (as many as fit) or in [1, {MAX_COUNT}]",
            self.truncate_prompt_tokens,
        )
        _check(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"biases of at most {MAX_LOGIT_BIAS} tokens",
            len(self.logit_bias),
        )
        _check(
            all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()),
            "logit_bias",
            "biases in [-100, 100]",
            self.logit_bias,
        )

    def _check_chosen_tokens(self) -> None:
        """Check `logprob_token_ids`."""
        chosen = self.logprob_token_ids
        if chosen is None:
            return
        name = "logprob_token_ids"
        allowed = f"null or 1 to {MAX_LOGPROB_TOKEN_IDS} token ids"
        count = len(chosen)
        _check(1 <= len(chosen) <= MAX_LOGPROB_TOKEN_IDS, name, allowed, count)
        _check(self.logprobs is not None, name, "null without logprobs", count)
        why = "null with use_beam_search=true; a beam search chooses the reported tokens itself"
        _check(not self.use_beam_search, name, why, count)

    def _check_beam_search(self) -> None:
        """Refuse parameters that have no effect with, or without, beam search."""
        _check(
            -10.0 <= self.length_penalty <= 10.0,
            "length_penalty",
            "in [-10, 10]",
            self.length_penalty,
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
            reason = "with use_beam_search=true, which neither samples nor looks for stop strings"
            _check(
                len(self.stop_token_ids) <= MAX_BEAM_STOP_TOKENS,
                "stop_token_ids",
                f"at most {MAX_BEAM_STOP_TOKENS} tokens with use_beam_search=true",
                f"{len(self.stop_token_ids)} tokens",
            )
        else:
            neutral = {"length_penalty": (1.0,), "early_stopping": (False,)}
            reason = "without use_beam_search=true"
        for name, values in neutral.items():
            value = getattr(self, name)
            allowed = " or ".join(map(repr, values))
            _check(value in values, name, f"{allowed} {reason}", value)


# `SamplingParams` without its checks of values. msgspec checks types only when it makes a struct
# from something else.
_Types = msgspec.defstruct(
    "_Types", [(field.name, field.type) for field in msgspec.structs.fields(SamplingParams)]
)


class PoolingKind(StrEnum):
    """Which hidden states of a text become its vector."""

    mean = "mean"  # the mean over all tokens
    last = "last"  # the last token's
    cls = "cls"  # the first token's


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the vector of a pooled prompt is computed."""

    kind: PoolingKind = PoolingKind.last
    normalize: bool = True  # to a norm of 1
    dimensions: int | None = None  # keep this many values, then normalise; null = all
    # Return the output of the classification head instead: a sigmoid for one label, a softmax for
    # several, or the logits of a model whose config says so.
    classify: bool = False

    def __post_init__(self) -> None:
        # msgspec checks types only when it makes a struct from something else.
        _check(self.kind in set(PoolingKind), "kind", "mean, last or cls", self.kind)
        msgspec.structs.force_setattr(self, "kind", PoolingKind(self.kind))

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every token must be computed, because cached tokens have no hidden state."""
        return self.kind is not PoolingKind.last
