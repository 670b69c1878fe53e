"""Several pooled requests as one reply: run together, timed, counted and logged once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from ostinato.api.errors import UnavailableError, status_of
from ostinato.api.metrics import Metrics
from ostinato.api.request_log import log_request
from ostinato.runtime.errors import EngineError
from ostinato.runtime.types import FinishReason, PooledOutput, PoolingParams

__all__ = ("pool_batch",)


async def pool_batch(
    pool: Callable[..., Awaitable[PooledOutput]],
    metrics: Metrics,
    reply_id: str,
    batch: Sequence[list[int]],
    params: PoolingParams,
    *,
    priority: int,
    cache_salt: str,
) -> list[PooledOutput]:
    """The vectors of several texts. Cancelling it aborts all.

    Args:
        pool: as `EngineClient.pool`.

    Raises:
        EngineError: the engine failed, or gave one up; the others are aborted.
    """

    async def one(index: int, token_ids: list[int]) -> PooledOutput:
        output = await pool(
            f"{reply_id}:{index}", token_ids, params, priority=priority, cache_salt=cache_salt
        )
        if output.finish_reason is FinishReason.error:
            raise EngineError(output.error or "the engine gave this request up")
        if output.finish_reason is FinishReason.abort:
            raise UnavailableError("the request was aborted by the server", code="aborted")
        return output

    begin, outcome, num_tokens = time.monotonic(), "disconnected", sum(map(len, batch))
    tasks = [asyncio.create_task(one(index, ids)) for index, ids in enumerate(batch)]
    try:
        outputs = await asyncio.gather(*tasks)
    except Exception as error:
        outcome = f"error {status_of(error)}"
        raise
    else:
        outcome = "done"
        metrics.count_vectors(len(batch), num_tokens, time.monotonic() - begin)
        return outputs
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        e2e_ms = (time.monotonic() - begin) * 1e3
        log_request(
            reply_id, outcome, {"prompt": num_tokens, "vectors": len(batch), "e2e_ms": e2e_ms}
        )
