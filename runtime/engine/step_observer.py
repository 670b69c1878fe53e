"""Records steps for metrics, request timelines and the flight recorder; changes no step.

The observer reads the scheduler's output and the results of steps. It takes a few microseconds a
step when no request is traced.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from ostinato.runtime.engine.flight_recorder import FlightRecorder, StepRecord
from ostinato.runtime.types.engine_info import ITERATION_TOKENS
from ostinato.runtime.types.outputs import SequenceOutput, TimelineEvent
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("StepObserver",)

_NUM_RECENT = 120


class _Progress:
    """A request that has had a row."""

    __slots__ = ("is_preempted", "is_reported", "num_preemptions", "scheduled_at")

    def __init__(self, scheduled_at: float) -> None:
        self.scheduled_at = scheduled_at
        self.is_reported = False  # whether an output has carried `scheduled_at`
        self.is_preempted = False  # only for traced requests
        self.num_preemptions = 0


class StepObserver:
    """Follows the steps of one engine.

    Args:
        step_log: a flight recorder that also gets every step; None = no recorder.
        clock: the monotonic clock of `Request.arrival_time`, in seconds.
        on_step: called with each step that has ended and the seconds since its launch.

    Attributes:
        recent: the last steps, oldest first, without their sequences.
        num_scheduled_tokens: tokens of all launched steps, without padding.
        progress: {request id: positions computed} for the requests that took part in the last
            finished step and had no output in it.
        iteration_tokens: a histogram of tokens per step: one count for each bound of
            ITERATION_TOKENS, and one count for larger steps.
    """

    def __init__(
        self,
        step_log: FlightRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[SchedulerOutput, float], None] | None = None,
    ) -> None:
        self._recorder = step_log
        self._clock = clock
        self._on_step = on_step
        self._rows: dict[int, str] = {}
        self._live: dict[str, _Progress] = {}
        self._traces: dict[str, list[TimelineEvent]] = {}  # events that no output has carried yet
        self._num_steps = 0
        self._launched: deque[tuple[float, StepRecord]] = deque()
        self.recent: deque[StepRecord] = deque(maxlen=_NUM_RECENT)
        self.progress: dict[str, int] = {}
        self.num_scheduled_tokens = 0
        self.iteration_tokens = [0] * (len(ITERATION_TOKENS) + 1)

    @property
    def traced(self) -> Iterable[str]:
        """Ids of the requests whose timeline is recorded."""
        return self._traces.keys()

    def add(self, request: Request) -> None:
        """Record that a request was queued."""
        if request.trace:
            self._traces[request.request_id] = []

    def grammar_built(self, request: Request) -> None:
        """Record that a request's grammar is built."""
        if request.trace:
            seconds = max(0.0, self._clock() - request.arrival_time)
            event = TimelineEvent("grammar_built", request.arrival_time, seconds)
            self._traces[request.request_id].append(event)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that was aborted."""
        self._live.pop(request_id, None)
        self._traces.pop(request_id, None)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Record that traced requests were preempted."""
        now = self._clock()
        for request_id in request_ids:
            progress = self._live.get(request_id)
            if progress is not None and not progress.is_preempted:
                progress.is_preempted = True
                self._traces[request_id].append(TimelineEvent("preempted", now))

    def begin(
        self, output: SchedulerOutput, *, num_running: int, num_waiting: int, num_free_blocks: int
    ) -> None:
        """Record that a step is about to be launched."""
        now = self._clock()
        for admitted in output.admitted:
            self._admit(admitted.row, admitted.request, now)
        rows, scheduled = self._rows, output.scheduled
        self._num_steps += 1
        record = StepRecord(
            self._num_steps,
            time.time(),
            output.num_tokens,
            output.num_seqs,
            num_running,
            num_waiting,
            num_free_blocks,
            sum(1 for entry in scheduled if entry.is_decode),
            [],
        )
        if self._recorder is not None:
            record.entries = FlightRecorder.entries(
                [(rows[e.row], e.start, e.num_new_tokens) for e in islice(scheduled, 32)]
            )
            self._recorder.write(record)
        self._launched.append((now, record))

    def launch(self, kind: str, num_padded_tokens: int) -> None:
        """Record which kind of program runs the newest step.

        Args:
            kind: captured, compiled or eager.
            num_padded_tokens: tokens that the program computes, padding included.
        """
        _, record = self._launched[-1]
        record.kind, record.num_padded_tokens = kind, num_padded_tokens
        self.num_scheduled_tokens += record.num_tokens
        self.iteration_tokens[bisect_left(ITERATION_TOKENS, record.num_tokens)] += 1
        if self._recorder is not None:
            self._recorder.write(record)

    def end(self, output: SchedulerOutput, outputs: Iterable[SequenceOutput]) -> None:
        """Record that the oldest launched step is done, and add timings to its outputs."""
        began, record = self._launched.popleft()
        now = self._clock()
        record.seconds = max(now - began, 1e-9)
        self.recent.append(record)
        if self._recorder is not None:
            self._recorder.write(record)
        if record.num_decodes < record.num_seqs:
            self._note_progress(output, outputs)
        if self._on_step is not None:
            self._on_step(output, record.seconds)
        if self._traces:
            self._trace_chunks(output, began, now, record)
        live = self._live
        for one in outputs:
            progress = live.get(one.request_id)
            if progress is None:
                continue
            if not progress.is_reported:
                progress.is_reported = True
                one.scheduled_time = progress.scheduled_at
                if one.request_id in self._traces and one.pooled is None:
                    self._traces[one.request_id].append(TimelineEvent("first_token", now))
            if one.finish_reason is not None:
                one.num_preemptions = progress.num_preemptions
                del live[one.request_id]
        if self._traces:
            self._deliver(outputs)

    def _admit(self, row: int, request: Request, now: float) -> None:
        request_id = request.request_id
        self._rows[row] = request_id
        progress = self._live.get(request_id)
        events = self._traces.get(request_id)
        if progress is None:
            self._live[request_id] = _Progress(now)
            if events is not None:
                events.append(TimelineEvent("scheduled", now))
        elif not request.sampling.use_beam_search:  # beams take rows again without a preemption
            progress.num_preemptions += 1
            if events is not None:
                if not progress.is_preempted:
                    events.append(TimelineEvent("preempted", now))
                progress.is_preempted = False
                events.append(TimelineEvent("resumed", now))

    def _note_progress(self, output: SchedulerOutput, outputs: Iterable[SequenceOutput]) -> None:
        """Note the positions of requests that computed tokens and have no output."""
        self.progress = {
            self._rows[entry.row]: entry.start + entry.num_new_tokens
            for entry in output.scheduled
            if entry.token_ids
        }
        for one in outputs:
            self.progress.pop(one.request_id, None)

    def _trace_chunks(
        self, output: SchedulerOutput, began: float, now: float, record: StepRecord
    ) -> None:
        """Record the prompt chunks of traced requests that a step computed."""
        for entry in output.scheduled:
            if entry.is_decode:
                continue
            events = self._traces.get(self._rows[entry.row])
            if events is not None:
                events.append(
                    TimelineEvent(
                        "prefill",
                        began,
                        now - began,
                        entry.start,
                        entry.num_new_tokens,
                        record.step,
                        record.kind,
                        record.num_seqs,
                    )
                )

    def _deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        for one in outputs:
            events = self._traces.get(one.request_id)
            if events is None:
                continue
            if events:
                one.events = events
                self._traces[one.request_id] = []
            if one.finish_reason is not None:
                del self._traces[one.request_id]
