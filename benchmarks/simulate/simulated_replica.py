"""One simulated engine: the real scheduler and block pool with a simulated device clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ostinato.benchmarks.simulate.fast_forward import FastForwardScheduler
from ostinato.benchmarks.simulate.results import SimulationResults
from ostinato.benchmarks.simulate.simulated_drafts import OUTPUT_TOKEN_ID, simulated_result
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.step_times.overheads import StepClock
from ostinato.runtime.types.outputs import SequenceOutput
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("Arrival", "Replica")

_MAX_STEPS = 1 << 20
# Tokens that reach a client within this time count as one piece.
_ONE_PIECE_S = 20e-6


class Arrival(NamedTuple):
    """A simulated request."""

    time_s: float  # when the client sends it
    prompt: Sequence[int]  # token ids, in [0, 2**32)
    max_tokens: int  # generated in full
    priority: int = 0


class _Live:
    """A request that has not ended."""

    __slots__ = ("arrival", "first_s", "key", "last_s", "longest_s", "num_cached")

    def __init__(self, key: int, arrival: Arrival) -> None:
        self.key = key
        self.arrival = arrival
        self.first_s = self.last_s = math.nan
        self.longest_s = 0.0  # the longest gap between two tokens
        self.num_cached = 0


class Replica:
    """Runs an engine's loop in simulated time.

    Args:
        spec: the engine.
        results: gets the results; may be shared between replicas.
        fast_forward: simulate several equal decode steps at once. It has no effect if the times of
            steps are drawn at random, with drafts, with several stages, or with states of recurrent
            layers.
        on_end: called with a request's key and the time at which its client has the last token.
    """

    def __init__(
        self,
        spec: EngineSpec,
        results: SimulationResults,
        *,
        fast_forward: bool = True,
        on_end: Callable[[int, float], None] | None = None,
    ) -> None:
        self.now = 0.0  # simulated seconds of the engine's loop
        self.quiet_until = 0.0  # no request ends before this time, unless a request is added
        self._spec = spec
        self._results = results
        self._on_end = on_end
        self._clock = StepClock(spec.costs, spec.overheads, spec.seed)
        drafts = spec.drafts
        self._fast_forwards = (
            fast_forward and self._clock.is_exact and drafts is None and spec.num_stages == 1
        ) and not spec.num_states
        self._proposer = None if drafts is None else drafts.proposer()
        self._cache = spec.cache()
        self._scheduler = FastForwardScheduler(
            spec.scheduler,
            self._cache,
            max_model_len=spec.max_model_len,
            limits=spec.limits,
            bound=spec.bound(),
            max_in_flight=max(2, spec.num_stages),
            has_lanes=spec.num_stages > 1,
            proposer=self._proposer,
            draft_costs=spec.costs if drafts is not None and drafts.adaptive else None,
        )
        self._live: dict[str, _Live] = {}
        # requests that have not reached the engine
        self._pending: deque[tuple[float, Request]] = deque()
        # launched steps with the times of their ends
        self._in_flight: deque[tuple[SchedulerOutput, float]] = deque()
        self._max_in_flight = spec.max_in_flight
        self._device_free = 0.0
        self._stages_free = [0.0] * spec.num_stages
        self._num_equal_steps = 0  # equal steps so far, the last one included

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._live)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def add(self, key: int, arrival: Arrival, now: float) -> bool:
        """Add a request that arrives at `now`.

        `now` must not be before the arrival of another added request or the start of a simulated
        step. `arrival.time_s` is earlier than `now` if the request waited elsewhere.

        Returns:
            False if the engine refuses it because its prompt leaves no room for output.
        """
        if not 1 <= len(arrival.prompt) < self._spec.max_model_len:
            return False
        if not self._live:
            self.now = max(self.now, now)
        request_id = str(key)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(arrival.prompt),
            sampling=SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True),
            priority=arrival.priority,
        )
        self._live[request_id] = _Live(key, arrival)
        at = now + self._clock.request(len(self._live) - 1)
        if self._pending:
            at = max(at, self._pending[-1][0])  # requests arrive in order
        self._pending.append((at, request))
        self.quiet_until = self.now
        return True

    def advance(self, until: float, *, num_ends: int | None = None) -> None:
        """Run every step that begins before `until`.

        Args:
            until: seconds; infinite to run all requests to their ends.
            num_ends: return also after the step in which this number of requests has ended.
        """
        enough = None if num_ends is None else len(self._live) - num_ends
        while self._live and self.now < until:
            if self._scheduler.has_work:
                self.now += self._clock.pause()
            self._admit()
            if self._fast_forwards and self._num_equal_steps >= self._max_in_flight:
                self._fast_forward(until)
                if self.now >= until:
                    break
                self._admit()
            self._step()
            if enough is not None and len(self._live) <= enough:
                break
        self.quiet_until = self._next_end() if self._live else math.inf

    def finish(self) -> None:
        """Add the counters of the whole run to the results. No step may follow."""
        self._results.count(
            preemptions=self._scheduler.num_preemptions,
            prefix_queries=self._cache.prefix_queries,
            prefix_hits=self._cache.prefix_hits,
            prompt_tokens=self._scheduler.num_prompt_tokens,
        )

    def _admit(self) -> None:
        pending = self._pending
        if not self._in_flight and not self._scheduler.has_work and pending:
            self.now = max(self.now, pending[0][0])  # an idle engine waits for the next request
        while pending and pending[0][0] <= self.now:
            self._scheduler.add(pending.popleft()[1])
            self._num_equal_steps = 0

    def _step(self) -> None:
        """Does what Engine.step does: schedule, launch, update with the oldest step that is due."""
        output = self._scheduler.schedule()
        if self._proposer is not None:
            self.now += self._proposer.take_seconds()
        if output is not None:
            self._device_free = self._end_of(self._clock.step(output))
            self._in_flight.append((output, self._device_free))
        if not self._in_flight:
            # There is nothing to do until the next request arrives.
            self.now = self._pending[0][0]
            return
        if output is not None and len(self._in_flight) < self._max_in_flight:
            return
        oldest, done = self._in_flight.popleft()
        begin, self.now = self.now, max(self.now, done)
        outputs = self._scheduler.update(oldest, simulated_result(oldest))
        self._results.add_step(self.now - begin, len(oldest.scheduled), self._used_blocks())
        self._deliver(outputs)
        # With a step in flight, the rows and blocks of ended sequences become free one step late.
        # So an earlier plan does not show whether a waiting sequence can be admitted now.
        is_alike = output is not None and len(oldest.scheduled) == len(output.scheduled)
        has_lanes = self._spec.num_stages > 1
        if output is None or has_lanes:
            self._num_equal_steps = 0
        elif is_alike and self._scheduler.repeats_last_step(output):
            self._num_equal_steps += 1
        else:
            self._num_equal_steps = 0

    def _end_of(self, seconds: float) -> float:
        """The time at which a step that is launched now has passed through all stages.

        The stages take equal times. A stage begins the step when the previous stage has ended it,
        and when its own previous step has ended.
        """
        end = self.now
        for stage, free in enumerate(self._stages_free):
            end = max(end, free) + seconds / len(self._stages_free)
            self._stages_free[stage] = end
        return end

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        """Deliver the outputs of a step to the clients."""
        gaps: dict[float, int] = {}
        for one, delay in zip(outputs, self._clock.deliveries(len(outputs)), strict=True):
            live = self._live[one.request_id]
            at = self.now + delay
            if live.first_s != live.first_s:  # not a number, so this is its first token
                live.first_s = at
                live.num_cached = one.num_cached_tokens
            else:
                at = max(at, live.last_s)
                gap = at - live.last_s
                # A token that arrives together with the previous token belongs to the same piece.
                if gap > _ONE_PIECE_S:
                    gaps[gap] = gaps.get(gap, 0) + 1
                    live.longest_s = max(live.longest_s, gap)
            live.last_s = at
            if one.finish_reason is not None:
                self._end(one.request_id, live)
        for gap, count in gaps.items():
            self._results.add_gaps(gap, count)

    def _fast_forward(self, until: float) -> None:
        """Simulate at once equal steps that will certainly follow and begin before `until`."""
        scheduler, clock = self._scheduler, self._clock
        if self._pending:
            until = min(until, self._pending[0][0])
        num_seqs, contexts = scheduler.num_running, scheduler.contexts
        first_s = clock.decodes(num_seqs, contexts / num_seqs)
        room = (until - self.now) / max(first_s, 1e-9) + len(self._in_flight)
        most = scheduler.num_equal_steps(_MAX_STEPS if room > _MAX_STEPS else math.ceil(room))
        if most < 2:
            return
        # The seconds of these steps grow linearly with the context, by `growth` per step.
        last_s = clock.decodes(num_seqs, contexts / num_seqs + most - 1)
        growth = (last_s - first_s) / (most - 1)

        def seconds(count: int) -> float:
            return count * (first_s + growth * (count - 1) / 2)

        # With a step in flight, the loop is one step behind the device.
        ahead, done = len(self._in_flight), self._device_free if self._in_flight else self.now

        def loop_at(count: int) -> float:
            return done + seconds(count - ahead) if count else self.now

        while most > 1 and loop_at(most - 1) >= until:
            most -= 1
        used = self._used_blocks()
        scheduler.fast_forward(most, OUTPUT_TOKEN_ID)
        took = loop_at(most) - self.now
        self.now += took
        if ahead:
            output, _ = self._in_flight.pop()
            self._device_free = done + seconds(most)
            self._stages_free = [self._device_free]  # without a pipeline there is one stage
            self._in_flight.append((output, self._device_free))
        results = self._results
        results.add_step(took, num_seqs, (used + self._used_blocks()) / 2, count=most)
        results.add_gaps(took / most, most * num_seqs)
        for request_id in scheduler.running_ids():
            live = self._live[request_id]
            live.last_s = self.now
            live.longest_s = max(live.longest_s, last_s)

    def _end(self, request_id: str, live: _Live) -> None:
        del self._live[request_id]
        arrival = live.arrival
        self._results.add_request(
            live.key,
            (arrival.time_s, live.first_s, live.last_s, live.longest_s),
            (len(arrival.prompt), arrival.max_tokens, live.num_cached),
        )
        if self._on_end is not None:
            self._on_end(live.key, live.last_s + self._clock.end())

    def _used_blocks(self) -> int:
        return self._cache.num_blocks - self._cache.num_free_blocks

    def _next_end(self) -> float:
        """The time before which no request ends, unless a request is added."""
        scheduler = self._scheduler
        few = self._num_equal_steps < self._max_in_flight
        if few or not scheduler.num_running or not self._clock.is_exact:
            return self.now
        count = scheduler.num_equal_steps(_MAX_STEPS)
        context = scheduler.contexts / scheduler.num_running
        return self.now + count * self._clock.decodes(scheduler.num_running, context)
