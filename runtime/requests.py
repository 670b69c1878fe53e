"""At the door: everything that can be refused is refused here, before a request reaches the
scheduler.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types import Request, SamplingParams, ServedModel

__all__ = ("make_requests", "resolve_sampling")

_MASK = (1 << 63) - 1


def resolve_sampling(
    prompt_token_ids: Sequence[int], sampling: SamplingParams, model: ServedModel
) -> SamplingParams:
    """Check a prompt and its parameters against the model; fill in `max_tokens`.

    Raises:
        InvalidRequestError: what can not be served, naming parameter, value, range and remedy.
    """
    length = len(prompt_token_ids)
    if length == 0:
        raise InvalidRequestError(
            "prompt has 0 tokens, it needs at least 1; send some text", param="prompt"
        )
    if length >= model.max_model_len:
        raise InvalidRequestError(
            f"prompt has {length} tokens, and the context of {model.name} holds "
            f"{model.max_model_len} with at least 1 for the answer; shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= model.vocab_size:
        wrong = next(t for t in prompt_token_ids if not 0 <= t < model.vocab_size)
        raise InvalidRequestError(
            f"prompt has token id {wrong}, the vocabulary of {model.name} is "
            f"[0, {model.vocab_size})",
            param="prompt",
        )
    for name, token_ids in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < model.vocab_size:
                raise InvalidRequestError(
                    f"{name} names token id {token_id}, the vocabulary of {model.name} is "
                    f"[0, {model.vocab_size})",
                    param=name,
                )
    room = model.max_model_len - length
    if sampling.max_tokens is None:
        return msgspec.structs.replace(sampling, max_tokens=room)
    if sampling.max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens={sampling.max_tokens} with a prompt of {length} tokens exceeds the "
            f"context of {model.name}, {model.max_model_len} tokens; ask for at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return sampling


def make_requests(
    request_id: str,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    model: ServedModel,
    *,
    priority: int = 0,
    cache_salt: str = "",
) -> list[Request]:
    """The `n` engine requests of one prompt; they share the prompt's cached blocks.

    Every request gets a seed, drawn when the caller gave none, so that it can be replayed.

    Raises:
        InvalidRequestError: as `resolve_sampling`.
    """
    sampling = resolve_sampling(prompt_token_ids, sampling, model)
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    arrival = time.monotonic()
    return [
        Request(
            request_id=request_id if sampling.n == 1 else f"{request_id}:{index}",
            prompt_token_ids=prompt_token_ids,
            # An odd multiplier spreads neighbouring seeds apart; index 0 keeps the caller's seed.
            sampling=msgspec.structs.replace(
                sampling, n=1, seed=(seed + index * 0x9E3779B97F4A7C15) & _MASK if index else seed
            ),
            eos_token_ids=model.eos_token_ids,
            arrival_time=arrival,
            priority=priority,
            cache_salt=cache_salt,
        )
        for index in range(sampling.n)
    ]
