"""`Request`: one request, as sent to the engine process."""

from __future__ import annotations

import msgspec

from ostinato.runtime.types.params import PoolingParams, SamplingParams

__all__ = ("Request",)


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sequence to generate, or, with `pooling`, a text whose vector is computed.

    `n` completions of a prompt are n requests that share cached blocks.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0  # seconds, monotonic clock of the sender
    priority: int = 0  # lower runs first under the priority policy
    # Sequences of the same HTTP request that come before this one. The scheduler lets sequences of
    # other requests run before those with a high place.
    place: int = 0
    cache_salt: str = ""  # requests share cached blocks only if their salts are equal
    bad_words_token_ids: list[list[int]] = []  # tokens of `sampling.bad_words`; none is empty
    pooling: PoolingParams | None = None  # compute a vector; `sampling` is not read
    output_token_ids: list[int] = []  # output so far, from an engine that died; it is continued
    grammar: str = ""  # made from `sampling.structured_outputs`
    trace: bool = False  # its outputs carry timeline events
    # Other things that its keys and values depend on (an adapter, media). Requests share cached
    # blocks only if these are equal.
    cache_keys: tuple[str, ...] = ()
    num_encoder_tokens: int = 0  # encoder tokens that cross attention reads
    prediction_token_ids: list[int] = []  # a guess of its output
    # Sequences of one HTTP request have the same number. It limits how much time they take together
    # while sequences of other requests run. Without an HTTP request it is 0.
    group: int = 0
    group_size: int = 1  # sequences of the HTTP request
