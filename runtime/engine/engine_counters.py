"""Counters of an engine that neither its scheduler nor its executor keeps: steps, queue, time."""

from __future__ import annotations

import time

from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("EngineCounters",)


class EngineCounters:
    """Grows from zero at the engine's start.

    Attributes:
        num_steps: whose results were read.
        step_seconds: in `Engine.step`.
        busy_seconds: in steps, and between steps while there was work.
        num_admitted: sequences that left the queue for the first time.
        queue_seconds: that those waited, summed.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_seconds = 0.0
        self.busy_seconds = 0.0
        self.num_admitted = 0
        self.queue_seconds = 0.0
        self._num_requests = 0
        self._num_prompt_tokens = 0  # of all requests
        self._busy_until: float | None = None  # end of the last step; None = no work was left

    def add(self, request: Request) -> None:
        """A request came."""
        self._num_requests += 1
        self._num_prompt_tokens += len(request.prompt_token_ids)

    def admit(self, output: SchedulerOutput) -> None:
        """Sequences take rows in this step."""
        # `arrival_time` is of this machine's clock. A resumed sequence has waited before.
        now = time.monotonic()
        for admitted in output.admitted:
            if not admitted.output_token_ids:
                self.num_admitted += 1
                self.queue_seconds += max(0.0, now - admitted.request.arrival_time)

    def end_step(self, begin: float, *, has_work: bool) -> None:
        """`Engine.step` ends that began at `time.perf_counter() == begin`."""
        end = time.perf_counter()
        self.step_seconds += end - begin
        self.busy_seconds += end - (self._busy_until or begin)
        self._busy_until = end if has_work else None

    def mean_prompt_tokens(self, max_model_len: int) -> int:
        """Of the requests so far; before the first request 256, or what a prompt may have."""
        if not self._num_requests:
            return min(256, max_model_len - 1)
        return round(self._num_prompt_tokens / self._num_requests)
