"""One request as it crosses the process border to the engine."""

from __future__ import annotations

import msgspec

from ostinato.runtime.types.params import PoolingParams, SamplingParams

__all__ = ("Request",)


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
    output_token_ids: list[int] = []  # given by an engine that died; generation goes on after them
    grammar: str = ""  # of `sampling.structured_outputs`, checked
    trace: bool = False  # its outputs carry the events of its time in the engine
    # What its keys and values depend on besides its tokens (an adapter, media): requests share
    # cached blocks only with equal ones.
    cache_keys: tuple[str, ...] = ()
    num_encoder_tokens: int = 0  # that a decoder's cross attention reads
