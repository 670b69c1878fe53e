"""`HangWatch`: kills the engine process of a replica when it hangs. `Watchdog` says when."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from ostinato.runtime.process.engine_process import EngineProcess
from ostinato.runtime.replicas.watchdog import TICK_S, HangLimits, Watchdog

__all__ = ("HangWatch",)


class HangWatch:
    """Watches the engine processes of one replica, one after the other, from `begin` to `close`.

    It watches nothing until `resume` is called. All methods run on one event loop.

    Args:
        limits: how long an engine may be silent.
        num_requests: returns how many requests the replica has.

    Attributes:
        watchdog: gets the messages of the present process.
        reason: why the present process was killed; None = it was not.
    """

    def __init__(self, limits: HangLimits, num_requests: Callable[[], int]) -> None:
        self._limits = limits
        self._num_requests = num_requests
        self._engine: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self.watchdog = Watchdog()
        self.reason: str | None = None

    def begin(self) -> None:
        """Start the task that looks at the process several times a second."""
        self._task = asyncio.create_task(self._run())

    def resume(self, engine: EngineProcess) -> None:
        """Watch a new process, which is ready."""
        self._engine, self.reason, self.watchdog = engine, None, Watchdog()

    def pause(self) -> None:
        """Watch no process: the present one has ended, or was asked to end."""
        self._engine = None

    async def close(self) -> None:
        """End the task. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        """Kill the engine when it exceeds one of the limits."""
        then, cpu_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if self._engine is not None:
                before_s, cpu_s = cpu_s, self._engine.cpu_seconds
                is_stopped = self._num_requests() > 0 and self._engine.is_stopped
                self.watchdog.tick(now - then, cpu_s - before_s, is_stopped=is_stopped)
                reason = self.watchdog.why_killed(self._limits)
                if reason is not None and self.reason is None:
                    self.reason = reason
                    self._engine.kill()
            then = now
