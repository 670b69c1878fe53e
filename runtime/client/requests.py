"""Checks generation requests and builds the requests that are sent to the engine."""

from __future__ import annotations

import reprlib
import secrets
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.audio import PromptAudio, PromptSound
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import MAX_BAD_WORD_TOKENS, SamplingParams
from ostinato.runtime.types.request import Request

__all__ = (
    "ALONE",
    "PreparedParts",
    "RequestShare",
    "TextEncoder",
    "bad_words_token_ids",
    "check_sampling",
    "fit_prompt",
    "make_requests",
    "resolve",
    "truncate",
)

_MASK = (1 << 63) - 1


class PreparedParts(msgspec.Struct, frozen=True):
    """Parts of a request that are computed after its prompt and parameters are resolved."""

    grammar: str = ""  # the constraint's grammar, from `GrammarCompiler`; empty = no constraint
    bad_words_token_ids: list[list[int]] = []
    prediction_token_ids: list[int] = []  # the client's guess of the output
    images: list[PromptImage] = []  # in the order of the prompt, with their pixels
    audio: PromptAudio | None = None  # for a model that transcribes, with its features
    sounds: list[PromptSound] = []  # in the order of the prompt, with their features


class RequestShare(NamedTuple):
    """Says which part of an HTTP request a prompt is."""

    place: int = 0  # number of sequences of the earlier prompts in the HTTP request
    group: int = 0  # identifies the HTTP request; 0 = no HTTP request
    size: int = 1  # number of sequences of all prompts in the HTTP request


ALONE = RequestShare()  # a prompt that is not a part of an HTTP request


class TextEncoder(Protocol):
    """The part of a tokenizer that is needed to check a request."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...


def truncate(
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    model: ServedModel,
    *,
    default_max_tokens: int | None = None,
) -> list[int]:
    """The part of a prompt that `truncate_prompt_tokens` leaves.

    The value -1 leaves room for `max_tokens` output tokens. Without `max_tokens`, a prompt that
    fits stays whole. A longer one leaves room for `default_max_tokens`, or for a quarter of the
    context if that is less.
    """
    limit = sampling.truncate_prompt_tokens
    if limit is None:
        return prompt_token_ids
    if limit == -1:
        room = sampling.max_tokens
        if room is None:
            fits = len(prompt_token_ids) < model.max_model_len
            share = model.max_model_len // 4
            room = 1 if fits else min(share, default_max_tokens or share)
        limit = max(1, model.max_model_len - room)
    if len(prompt_token_ids) <= limit:
        return prompt_token_ids
    return (
        prompt_token_ids[-limit:]
        if sampling.truncation_side == "left"
        else prompt_token_ids[:limit]
    )


def bad_words_token_ids(words: Sequence[str], tokenizer: TextEncoder | None) -> list[list[int]]:
    """Token ids of each word in three forms: as given, without leading spaces, after one space.

    Raises:
        InvalidRequestError: a word has too many tokens, or there is no tokenizer.
    """
    if not words:
        return []
    if tokenizer is None:
        raise InvalidRequestError(
            "bad_words needs a tokenizer, and this model was loaded without one; use logit_bias"
            " with token ids",
            param="bad_words",
            code="no_tokenizer",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for form in (word, bare, " " + bare):
            token_ids = tuple(tokenizer.encode(form, add_special_tokens=False))
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError(
                    f"bad_words: {word[:40]!r} has {len(token_ids)} tokens, but a word may "
                    f"have at most {MAX_BAD_WORD_TOKENS}; shorten it",
                    param="bad_words",
                )
            if token_ids:
                found[token_ids] = None
    return [list(token_ids) for token_ids in found]


def check_sampling(sampling: SamplingParams, model: ServedModel) -> None:
    """Check parameters against the model.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary, or nothing can be sampled.
    """
    for name, token_ids in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("logprob_token_ids", sampling.logprob_token_ids or ()),
    ):
        wrong = _outside(token_ids, model)
        if wrong is not None:
            raise InvalidRequestError(
                f"{name} names token id {wrong}, but the vocabulary of {model.name} is "
                f"[0, {model.vocab_size})",
                param=name,
            )
    _check_that_something_is_allowed(sampling, model)


def fit_prompt(
    prompt_token_ids: Sequence[int], sampling: SamplingParams, model: ServedModel
) -> SamplingParams:
    """Check a prompt and `max_tokens` against the model; fill in `max_tokens`.

    Args:
        prompt_token_ids: from `truncate`.
        sampling: has passed `check_sampling`.

    Raises:
        InvalidRequestError: a value cannot be served; names parameter, value and range.
        ValueError: `min_tokens` is larger than the rest of the context.
    """
    length = len(prompt_token_ids)
    if length == 0:
        raise InvalidRequestError(
            "prompt has 0 tokens, and at least 1 is needed; send some text", param="prompt"
        )
    if length >= model.max_model_len:
        raise InvalidRequestError(
            f"prompt has {length} tokens, and the context of {model.name} holds "
            f"{model.max_model_len}, of which the answer needs at least 1; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    wrong = _outside(prompt_token_ids, model)
    if wrong is not None:
        raise InvalidRequestError(
            f"prompt has token id {wrong}, but the vocabulary of {model.name} is "
            f"[0, {model.vocab_size})",
            param="prompt",
        )
    room = model.max_model_len - length
    if sampling.max_tokens is None:
        return sampling.with_max_tokens(room)
    if sampling.max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens={sampling.max_tokens} and the prompt's length, {length}, together exceed "
            f"the context of {model.name}, {model.max_model_len} tokens; set max_tokens to at most "
            f"{room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return sampling


def _outside(token_ids: Collection[int], model: ServedModel) -> int | None:
    """The first token id that is not in the vocabulary; None = all are."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        return None
    return next(one for one in token_ids if not 0 <= one < model.vocab_size)


def _check_that_something_is_allowed(sampling: SamplingParams, model: ServedModel) -> None:
    if sampling.allowed_token_ids is None or not sampling.min_tokens:
        return
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
    if ends.issuperset(sampling.allowed_token_ids):
        raise InvalidRequestError(
            f"allowed_token_ids={reprlib.repr(list(sampling.allowed_token_ids))} are all stop"
            " tokens, which "
            f"min_tokens={sampling.min_tokens} forbids; allow another token or set min_tokens=0",
            param="allowed_token_ids",
        )


def resolve(
    prompt_token_ids: list[int], sampling: SamplingParams, model: ServedModel
) -> tuple[list[int], SamplingParams]:
    """Call `check_sampling` for the parameters, then `truncate` and `fit_prompt` for the prompt."""
    check_sampling(sampling, model)
    prompt_token_ids = truncate(prompt_token_ids, sampling, model)
    return prompt_token_ids, fit_prompt(prompt_token_ids, sampling, model)


def make_requests(  # noqa: PLR0913 - the parts of a request
    request_id: str,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    model: ServedModel,
    *,
    priority: int = 0,
    cache_salt: str = "",
    share: RequestShare = ALONE,
    parts: PreparedParts = PreparedParts(),  # noqa: B008 - it is frozen
    adapter: ServedAdapter | None = None,
) -> list[Request]:
    """The engine's requests for one prompt.

    There is one request for each candidate, and these share the prompt's cached blocks. A beam
    search is one request. Every request gets a seed, so that it can be replayed. The seed is random
    if the caller gave none.

    Args:
        prompt_token_ids: from `resolve`, like `sampling`.
        share: which part of an HTTP request the prompt is.
        parts: the parts that were computed from `sampling`.
        adapter: computes the prompt with the model; None = the model alone.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    has_grammar = sampling.structured_outputs is not None
    assert has_grammar == bool(parts.grammar), "structured_outputs need their grammar in `parts`"
    count = sampling.num_candidates
    # `parts` has the grammar and the words' tokens, so the engine does not need these two.
    each = sampling.with_unchecked(structured_outputs=None, bad_words=())
    if sampling.use_beam_search:
        count, each = 1, each.with_unchecked(temperature=0.0)
    else:
        # The best candidates are those with the highest log-probabilities.
        ranked = sampling.logprobs is None and count > sampling.n
        logprobs = 0 if ranked else sampling.logprobs
        each = each.with_unchecked(n=1, best_of=None, logprobs=logprobs)
    first = Request(
        request_id=request_id if count == 1 else f"{request_id}:0",
        prompt_token_ids=prompt_token_ids,
        sampling=each.with_unchecked(seed=seed),
        eos_token_ids=model.eos_token_ids,
        arrival_time=time.monotonic(),
        priority=priority,
        place=share.place,
        group=share.group,
        group_size=share.size,
        cache_salt=cache_salt,
        bad_words_token_ids=parts.bad_words_token_ids,
        prediction_token_ids=parts.prediction_token_ids,
        grammar=parts.grammar,
        cache_keys=() if adapter is None else (adapter.digest,),
        adapter_slot=-1 if adapter is None else adapter.slot,
        images=parts.images,
        audio=parts.audio,
        sounds=parts.sounds,
    )
    # The first request scores the prompt for all requests (`PromptCompletions`).
    each = each.with_unchecked(prompt_logprobs=None)
    return [
        first,
        *(
            msgspec.structs.replace(
                first,
                request_id=f"{request_id}:{index}",
                place=share.place + index,
                # An odd multiplier spreads neighbouring seeds apart.
                sampling=each.with_unchecked(seed=(seed + index * 0x9E3779B97F4A7C15) & _MASK),
            )
            for index in range(1, count)
        ),
    ]
