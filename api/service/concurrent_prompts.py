"""Runs many prompts of one request at once, with time for other tasks of the loop in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import aclosing
from typing import Any, TypeVar, cast

from ostinato.api.base.request_context import RequestContext
from ostinato.runtime.errors import DeadlineError
from ostinato.runtime.fair_queue import FairQueue
from ostinato.runtime.types.outputs import PooledOutput, RequestOutput

__all__ = ("IndexedOutput", "Outputs", "all_in_time", "merged_outputs")

T = TypeVar("T")
_AT_ONCE = 8  # prompts of one request that are started before other tasks run

IndexedOutput = tuple[int, RequestOutput]  # (index of the prompt, one output for it)
# A client's `generate` is a generator. Closing it aborts the request.
Outputs = AsyncGenerator[RequestOutput, None]


async def merged_outputs(
    generate: Callable[[int], AsyncIterator[RequestOutput]],
    cut: Callable[[int], Iterable[RequestOutput]],
    num_prompts: int,
    window: asyncio.Semaphore,
) -> AsyncGenerator[IndexedOutput, None]:
    """Outputs of several prompts in the order of their arrival.

    Args:
        generate: called with the index of a prompt; returns a generator of its outputs.
        cut: called with the index of a prompt that its deadline has ended before its first output;
            returns outputs that end its completions.
        num_prompts: number of prompts of the request.
        window: limits the prompts that are in the engines at once.

    Raises:
        DeadlineError: the deadline passed before the first output of all prompts.
    """
    queue: FairQueue[IndexedOutput | Exception | None] = FairQueue()
    late: dict[int, DeadlineError] = {}  # by prompts without output

    async def pump(prompt_index: int) -> None:
        try:
            outputs = generate(prompt_index)
            async with window, aclosing(cast("Outputs", outputs)) as outputs:
                async for output in outputs:
                    queue.put_nowait((prompt_index, output))
            queue.put_nowait(None)
        except DeadlineError as error:
            late[prompt_index] = error
            queue.put_nowait(None)
        except Exception as error:  # the reader raises it
            queue.put_nowait(error)

    tasks: list[asyncio.Task[None]] = []

    async def begin() -> None:
        async for task in _started(map(pump, range(num_prompts))):
            tasks.append(task)

    starter = asyncio.create_task(begin())
    try:
        num_running, has_outputs = num_prompts, False
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                has_outputs = True
                yield item
        if late and not has_outputs:
            raise next(iter(late.values()))
        for prompt_index in late:
            for output in cut(prompt_index):
                yield prompt_index, output
    finally:
        # The web framework cancels a stream again at each `await`, until the stream has ended.
        await asyncio.shield(_cancel([starter], tasks))


async def all_in_time(
    work: Sequence[Coroutine[Any, Any, PooledOutput]], context: RequestContext
) -> list[PooledOutput]:
    """All results. Raises the first failure; then unfinished work is cancelled."""
    remaining_s = None
    if context.timeout_ms is not None:
        remaining_s = context.arrived_at + context.timeout_ms / 1e3 - time.monotonic()
    tasks: list[asyncio.Task[PooledOutput]] = []
    try:
        async with asyncio.timeout(remaining_s):
            async for task in _started(work):
                tasks.append(task)
            return await asyncio.gather(*tasks)
    except TimeoutError as error:
        raise DeadlineError("the request's deadline passed before its answer") from error
    finally:
        await _cancel(tasks)
        for one in work[len(tasks) :]:
            one.close()


async def _started(work: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[asyncio.Task[T], None]:
    """Start tasks for many coroutines. After every few starts, other tasks of the loop run."""
    for number, one in enumerate(work, 1):
        yield asyncio.create_task(one)
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)


async def _cancel(*groups: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel and await many tasks, a few at a time. Other tasks of the loop run in between.

    Args:
        groups: the tasks. Those of an earlier group can add tasks to a later group.
    """
    for tasks in groups:
        for begin in range(0, len(tasks), _AT_ONCE):
            some = tasks[begin : begin + _AT_ONCE]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
