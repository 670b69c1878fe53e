"""The queue whose reader lets other tasks run."""

from __future__ import annotations

import asyncio

from ostinato.runtime.fair_queue import FairQueue


def test_other_tasks_run_while_a_full_queue_is_read() -> None:
    async def main() -> tuple[list[int], int]:
        queue: FairQueue[int] = FairQueue()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        for number in range(100):
            queue.put_nowait(number)
        task = asyncio.create_task(other())
        read = [await queue.get() for _ in range(100)]
        task.cancel()
        return read, turns

    read, turns = asyncio.run(main())
    assert read == list(range(100))
    assert turns >= 20


def test_it_waits_for_an_item() -> None:
    async def main() -> int:
        queue: FairQueue[int] = FairQueue()
        asyncio.get_running_loop().call_soon(queue.put_nowait, 7)
        return await queue.get()

    assert asyncio.run(main()) == 7
