"""Admission control: accepts or refuses new requests. Health checks use the same rules."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ostinato.api.base.errors import OverloadedError, UnavailableError
from ostinato.api.service import health
from ostinato.api.service.health import EngineSigns
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import EngineStats

__all__ = ("Admission", "EngineQueue")

_MAX_RETRY_AFTER_S = 600
_MIB = 1 << 20
_POLL_S = 0.02


class EngineQueue(EngineSigns, Protocol):
    """The engine's health and the requests that wait for their first token."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...


class Admission:
    """Accepts or refuses requests by the server's state and the length of the queue.

    Args:
        engine: the engine, whose state is read at each call.
        server: the section with the limits.

    Attributes:
        phase: how far the start is, such as `loading` or `launch is done`; None = the engine has
            started.
        is_draining: whether the server is shutting down and refuses new requests.
        num_admitted: admitted requests whose answers have not been sent yet.
        num_media_bytes: bytes of the prepared images, videos and audio of requests in progress.
    """

    def __init__(self, engine: EngineQueue, server: ServerConfig) -> None:
        self._engine = engine
        self._server = server
        self.phase: str | None = "starting"
        self.is_draining = False
        self.num_admitted = 0
        self.num_media_bytes = 0

    def health_problem(self) -> str | None:
        """Why the engine does not work; None = it works."""
        if self.phase is not None:
            return f"the engine is starting: {self.phase}"
        return health.engine_problem(self._engine, self._server)

    def liveness_problem(self) -> str | None:
        """Why a supervisor should restart this process; None = there is no reason."""
        return None if self.phase else health.liveness_problem(self._engine, self._server)

    def refusal(self) -> UnavailableError | None:
        """Why a new request is refused, apart from the queue's length; None = it is accepted."""
        if self.is_draining:
            return UnavailableError("the server is shutting down", code="shutting_down")
        if self.phase is not None:
            return self._starting()
        return health.death(self._engine)

    def unreadiness(self) -> UnavailableError | OverloadedError | None:
        """Why a new request would be refused, or would wait for the engine to recover.

        None = it would be served.
        """
        return (
            self.refusal()
            or health.unreadiness(self._engine, self._server)
            or self._queue_refusal()
        )

    def check_started(self) -> None:
        """Raises UnavailableError until the engine has reported its model."""
        if self.phase is not None:
            raise self._starting()

    def check(self) -> None:
        """Raises UnavailableError or OverloadedError if a new request would be refused."""
        refusal = self.refusal() or self._queue_refusal()
        if refusal is not None:
            raise refusal

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished. Their bodies may be in preparation."""
        return bool(self.num_admitted or self._engine.num_unfinished)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until all others have ended, or the engine is down."""
        self.is_draining = True
        end = time.monotonic() + timeout_s
        while self.has_work and self._engine.death_reason is None and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)

    def check_prompts(self, lengths: Sequence[int]) -> None:
        """Check the prompts of one request against the limits.

        Args:
            lengths: tokens of each prompt.

        Raises:
            InvalidRequestError: a prompt is longer than `server.max_prompt_tokens`.
            OverloadedError: the queue is full, or would be with these prompts.
        """
        limit, longest = self._server.max_prompt_tokens, max(lengths)
        if limit is not None and longest > limit:
            raise InvalidRequestError(
                f"the prompt has {longest} tokens, but this server takes at most {limit}"
                " (server.max_prompt_tokens); shorten it, or set truncate_prompt_tokens where the"
                " endpoint has it",
                param="prompt",
                code="prompt_too_long",
            )
        full = self._queue_refusal(sum(lengths))
        if full is not None:
            raise full

    def check_media(self, num_bytes: int) -> None:
        """Check the prepared images, videos or audio of one request against the limit.

        If no other request has any, they can have any size.

        Raises:
            OverloadedError: with these bytes, all requests in progress have more than
                `server.max_media_mib`.
        """
        limit, held = self._server.max_media_mib, self.num_media_bytes
        if limit is not None and held and num_bytes and held + num_bytes > limit * _MIB:
            raise self._overloaded(
                f"images, videos and audio of requests in progress: {held / _MIB:.1f} MiB, of this "
                f"request: {num_bytes / _MIB:.1f} MiB, server.max_media_mib={limit:g}"
            )

    @contextmanager
    def holding_media(self, num_bytes: int) -> Iterator[None]:
        """A context in which so many bytes count as those of a request in progress."""
        self.num_media_bytes += num_bytes
        try:
            yield
        finally:
            self.num_media_bytes -= num_bytes

    def _starting(self) -> UnavailableError:
        return UnavailableError(f"the engine is starting: {self.phase}", code="starting")

    def _queue_refusal(self, num_new_tokens: int = 0) -> OverloadedError | None:
        """Why the queue has no room for a request with `num_new_tokens` prompt tokens.

        None = there is room. An empty queue takes a request of any length.
        """
        engine, server = self._engine, self._server
        limit = server.max_queued_requests
        if limit is not None and (count := engine.num_queued) >= limit:
            return self._full(f"completions that wait: {count}, server.max_queued_requests={limit}")
        limit = server.max_queued_tokens
        # Counting the tokens takes time for each waiting request.
        count = 0 if limit is None else engine.num_queued_tokens
        if limit is not None and count and count + num_new_tokens > limit:
            text = f"prompt tokens that wait: {count}, of this request: {num_new_tokens}"
            return self._full(f"{text}, server.max_queued_tokens={limit}")
        return None

    def _full(self, text: str) -> OverloadedError:
        return self._overloaded(f"the queue is full: {text}")

    def _overloaded(self, text: str) -> OverloadedError:
        # When the predicted TTFT of a new request has passed, the present queue has been served.
        seconds = math.ceil(self._engine.stats.predicted_ttft_seconds)
        return OverloadedError(
            f"{text}; try again later",
            code="queue_full",
            retry_after_s=min(max(1, seconds), _MAX_RETRY_AFTER_S),
        )
