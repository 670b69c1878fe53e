"""Checks pooling requests and builds them for the engine; decodes their vectors.

A pooling request has no output tokens. Its result is an embedding of the prompt, or the output of a
classification head.
"""

from __future__ import annotations

import array
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.params import PoolingParams, SamplingParams
from ostinato.runtime.types.request import Request

__all__ = (
    "check_pooling",
    "check_score_head",
    "cosine",
    "make_pairs",
    "make_pooling_request",
    "numbers",
    "pair_token_ids",
    "require_task",
)

T = TypeVar("T")
_NO_SAMPLING = SamplingParams(max_tokens=1)
_WHERE = {
    ServedTask.generate: "/v1/chat/completions and /v1/completions",
    ServedTask.embed: "/v1/embeddings, /v1/score and /v1/rerank",
    ServedTask.classify: "/v1/score and /v1/rerank",
    ServedTask.transcribe: "/v1/audio/transcriptions and /v1/audio/translations",
}


def require_task(model: ServedModel, task: ServedTask) -> None:
    """Raises InvalidRequestError if the model cannot do `task`.

    The error's text names the endpoints that the model serves.
    """
    if task in model.tasks:
        return
    verbs = {
        "generate": "generate text",
        "embed": "give embeddings",
        "classify": "classify",
        "transcribe": "transcribe audio",
    }
    there = "; ".join(_WHERE[one] for one in model.tasks)
    raise InvalidRequestError(
        f"{model.name} does not {verbs[task]}; use {there} with this model",
        param="model",
        code="unsupported_task",
    )


def check_pooling(
    prompt_token_ids: Sequence[int],
    params: PoolingParams,
    model: ServedModel,
    *,
    has_segments: bool = False,
) -> None:
    """Check a text and its pooling parameters against the model.

    Args:
        has_segments: the ids are from `pair_token_ids`, which adds multiples of `vocab_size` for
            the segment types.

    Raises:
        InvalidRequestError: the model does not have the task, or a value cannot be served.
    """
    require_task(model, ServedTask.classify if params.classify else ServedTask.embed)
    length = len(prompt_token_ids)
    if not 1 <= length <= model.max_model_len:
        raise InvalidRequestError(
            f"input has {length} tokens, but {model.name} takes 1 to {model.max_model_len}; "
            + ("shorten it, or set truncate_prompt_tokens=-1" if length else "send some text"),
            param="input",
            code="context_length_exceeded" if length else "invalid_value",
        )
    num_ids = model.vocab_size * (max(1, model.num_segments) if has_segments else 1)
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= num_ids:
        wrong = next(t for t in prompt_token_ids if not 0 <= t < num_ids)
        raise InvalidRequestError(
            f"input has token id {wrong}, but the vocabulary of {model.name} is "
            f"[0, {model.vocab_size})",
            param="input",
            code="invalid_value",
        )
    if params.dimensions is not None and not 1 <= params.dimensions <= model.embedding_size:
        raise InvalidRequestError(
            f"dimensions={params.dimensions}, but {model.name} gives vectors of 1 to "
            f"{model.embedding_size} numbers",
            param="dimensions",
            code="invalid_value",
        )


def make_pooling_request(  # noqa: PLR0913 - the fields of a request
    request_id: str,
    prompt_token_ids: list[int],
    params: PoolingParams,
    model: ServedModel,
    *,
    has_segments: bool = True,
    priority: int = 0,
    cache_salt: str = "",
    place: int = 0,
    trace: bool = False,
    adapter: ServedAdapter | None = None,
) -> Request:
    """The engine's request for one text.

    Args:
        has_segments: see `check_pooling`.
        place: index of the text among the texts of its HTTP request.
        adapter: computes the text with the model; None = the model alone.

    Raises:
        InvalidRequestError: see `check_pooling`.
    """
    check_pooling(prompt_token_ids, params, model, has_segments=has_segments)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_NO_SAMPLING,
        arrival_time=time.monotonic(),
        priority=priority,
        place=place,
        cache_salt=cache_salt,
        pooling=params,
        trace=trace,
        cache_keys=() if adapter is None else (adapter.digest,),
        adapter_slot=-1 if adapter is None else adapter.slot,
    )


def make_pairs(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, T]]:
    """Pair each element of `second` with an element of `first`.

    If `first` has one element, all pairs begin with it. Otherwise the two elements of a pair have
    the same index.

    Raises:
        InvalidRequestError: `second` is empty, or `first` has neither one element nor as many as
            `second`.
    """
    if not second or len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"the list of first texts has length {len(first)}, and the list of second texts has "
            f"length {len(second)}; give one first text for all second texts, or one for each",
            param="text_1",
            code="invalid_value",
        )
    return list(zip(list(first) * len(second) if len(first) == 1 else first, second, strict=True))


def check_score_head(model: ServedModel) -> None:
    """Raises InvalidRequestError if the classification head gives no score."""
    if model.num_labels != 1:
        raise InvalidRequestError(
            f"{model.name} has {model.num_labels} labels; a score needs a model with one label",
            param="model",
            code="unsupported_task",
        )


def pair_token_ids(ids: Sequence[int], segments: Sequence[int], model: ServedModel) -> list[int]:
    """A pair's token ids for an encoder: `vocab_size` is added to the ids of segment 1."""
    last = model.num_segments - 1  # a model with one segment type treats all segments as 0
    return [
        token + min(segment, last) * model.vocab_size
        for token, segment in zip(ids, segments, strict=True)
    ]


def numbers(data: bytes) -> list[float]:
    """Decode a vector of little-endian float32."""
    values = array.array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def cosine(first: bytes, second: bytes) -> float:
    """The dot product of two encoded vectors whose norm is 1."""
    return sum(a * b for a, b in zip(numbers(first), numbers(second), strict=True))
