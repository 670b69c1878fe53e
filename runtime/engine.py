"""The engine: `step()` schedules, executes and reports. The one loop of the whole system.

    schedule -> execute -> update

Runs in its own process behind runtime/worker.py, or in-process behind runtime/llm.py; the code is
the same.
"""

from __future__ import annotations

import time

from ostinato.graphs.seal import CompileMonitor
from ostinato.runtime.kv_cache import KVCacheManager
from ostinato.runtime.model_runner import ModelRunner
from ostinato.runtime.scheduler import Scheduler
from ostinato.runtime.types import (
    EngineStats,
    Request,
    SequenceOutput,
    ServedModel,
)

__all__ = ("Engine",)


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCacheManager,
        runner: ModelRunner,
        monitor: CompileMonitor,
        model: ServedModel,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._monitor = monitor
        self.model = model
        self._num_steps = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request is running or waiting."""
        return self._scheduler.has_work

    def add_request(self, request: Request) -> None:
        """Queue a request; `step` reports its tokens. It was validated before it came here."""
        self._scheduler.add(request)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request now; its terminal output, or None when it had ended already."""
        return self._scheduler.abort(request_id)

    def abort_all(self) -> list[SequenceOutput]:
        """End everything; the terminal outputs."""
        outputs = (self._scheduler.abort(i) for i in self._scheduler.request_ids())
        return [output for output in outputs if output is not None]

    def step(self) -> list[SequenceOutput]:
        """One step: every scheduled sequence advances. Returns the news, empty when nothing could
        run.
        """
        begin = time.perf_counter()
        output = self._scheduler.schedule()
        if output is None:
            return []
        news = self._scheduler.update(output, self._runner.execute(output))
        self._num_steps += 1
        self._step_seconds += time.perf_counter() - begin
        return news

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False when sequences still use some."""
        return self._cache.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError when block accounting is broken; cheap enough for an idle moment."""
        self._cache.check_integrity()

    def stats(self) -> EngineStats:
        """A snapshot for metrics and health."""
        cache, scheduler = self._cache, self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_free_blocks,
            num_steps=self._num_steps,
            steps_by_kind=dict(self._runner.graphs.steps_by_kind),
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_output_tokens=scheduler.num_output_tokens,
            prefix_queries=cache.prefix_queries,
            prefix_hits=cache.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            late_compiles=self._monitor.late_compiles,
            step_seconds=self._step_seconds,
            model_seconds=self._runner.model_seconds,
        )
