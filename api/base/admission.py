"""What is refused because there is too much of it, and how long a request may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from ostinato.api.base.errors import OverloadedError
from ostinato.conf.schema import ServerConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import EngineStats

__all__ = ("TIMEOUT_HEADER", "EngineQueue", "check_prompts", "queue_refusal", "timeout_of")

TIMEOUT_HEADER = "x-request-timeout-ms"
MAX_DEADLINE_MS = 24 * 3600 * 1000
_LONGEST_RETRY_S = 600


class EngineQueue(Protocol):
    """What waits for its first token."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...


def queue_refusal(
    engine: EngineQueue, server: ServerConfig, num_new_tokens: int = 0
) -> OverloadedError | None:
    """Why a request finds the queue full, or None.

    Args:
        num_new_tokens: of its prompts, where they are known already. One that is alone is never
            refused for them.
    """
    limit = server.max_queued_requests
    if limit is not None and (count := engine.num_queued) >= limit:
        return _full(engine, f"{count} completions wait, server.max_queued_requests={limit}")
    limit = server.max_queued_tokens
    if limit is not None and (count := engine.num_queued_tokens) + num_new_tokens > limit and count:
        text = f"{count} prompt tokens wait and {num_new_tokens} would follow"
        return _full(engine, f"{text}, server.max_queued_tokens={limit}")
    return None


def check_prompts(lengths: Sequence[int], server: ServerConfig) -> None:
    """Raises InvalidRequestError for a prompt that is longer than the server allows."""
    limit, longest = server.max_prompt_tokens, max(lengths)
    if limit is not None and longest > limit:
        raise InvalidRequestError(
            f"the prompt has {longest} tokens, this server takes at most {limit}"
            " (server.max_prompt_tokens); shorten it, or set truncate_prompt_tokens",
            param="prompt",
            code="prompt_too_long",
        )


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Milliseconds of the timeout header; None without one.

    Raises:
        InvalidRequestError: it is not a number of the right size.
    """
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_ms = float(text)
    except ValueError:
        timeout_ms = math.nan
    if not 1 <= timeout_ms <= MAX_DEADLINE_MS:
        raise InvalidRequestError(
            f"the header {TIMEOUT_HEADER} is {text[:20]!r}, it must be milliseconds in"
            f" [1, {MAX_DEADLINE_MS}]",
            param=TIMEOUT_HEADER,
            code="invalid_value",
        )
    return timeout_ms


def _full(engine: EngineQueue, text: str) -> OverloadedError:
    # When a request that came now would have its first token, this one's queue is worked off.
    seconds = math.ceil(engine.stats.predicted_ttft_seconds)
    return OverloadedError(
        f"the queue is full: {text}; try again later",
        code="queue_full",
        retry_after_s=min(max(1, seconds), _LONGEST_RETRY_S),
    )
