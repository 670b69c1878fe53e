"""Counters of an engine for metrics: steps, time in steps, and the queue."""

from __future__ import annotations

import time

from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("EngineCounters",)


class EngineCounters:
    """Counters that start at zero with the engine.

    Attributes:
        num_steps: steps whose results were read.
        step_seconds: seconds spent in `Engine.step`.
        busy_seconds: seconds spent in steps, and between steps while there was work.
        num_admitted: sequences that left the queue for the first time.
        queue_seconds: the sum of the seconds that these sequences waited in the queue.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_seconds = 0.0
        self.busy_seconds = 0.0
        self.num_admitted = 0
        self.queue_seconds = 0.0
        self._num_requests = 0
        self._num_prompt_tokens = 0  # prompt tokens of all requests
        self._busy_until: float | None = None  # end of the last step; None = no work was left

    def add(self, request: Request) -> None:
        """Count a new request."""
        self._num_requests += 1
        self._num_prompt_tokens += len(request.prompt_token_ids)

    def admit(self, output: SchedulerOutput) -> None:
        """Count the sequences that take a row for the first time, and their time in the queue."""
        # `arrival_time` is a time.monotonic() of this machine. Two kinds of sequences begin with
        # output tokens and are not counted: beams, and requests that go on after an engine's death.
        now = time.monotonic()
        for admitted in output.admitted:
            if not (admitted.is_resumed or admitted.output_token_ids):
                self.num_admitted += 1
                self.queue_seconds += max(0.0, now - admitted.request.arrival_time)

    def end_step(self, begin: float, *, has_work: bool) -> None:
        """Count a call of `Engine.step` that ends now; `begin` is from time.perf_counter()."""
        end = time.perf_counter()
        self.step_seconds += end - begin
        self.busy_seconds += end - (self._busy_until or begin)
        self._busy_until = end if has_work else None

    def mean_prompt_tokens(self, max_model_len: int) -> int:
        """Mean prompt length of the requests so far, in tokens.

        Before the first request it is 256, or the longest possible prompt if that is shorter.
        """
        if not self._num_requests:
            return min(256, max_model_len - 1)
        return round(self._num_prompt_tokens / self._num_requests)
