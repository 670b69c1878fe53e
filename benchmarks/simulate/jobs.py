"""Simulates a job of the load client: the same requests, arrivals, turns and limits.

A request may wait for the end of another one (turns of a conversation, a closed loop, a limit of
concurrency), so its time is not known beforehand. Replicas are then run in the order of their
clocks, and not past the next time at which a request may arrive.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.benchmarks.simulate.results import SimulationResults
from ostinato.benchmarks.simulate.simulated_drafts import OUTPUT_TOKEN_ID
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.simulated_replica import Arrival, Replica
from ostinato.runtime.replicas.router import make_router

__all__ = ("JobTraffic", "simulate_job")


def _ids(request: JobRequest) -> list[int]:
    assert not isinstance(request.prompt, str), "simulated prompts are token ids"
    return request.prompt


class JobTraffic:
    """Independent requests, repeated in rounds with other token ids in each.

    The ids differ so that the prefix cache finds only prefixes that requests share within a round.

    Args:
        requests: requests with their times.
        rounds: number of rounds.
        period_s: seconds from the beginning of a round to that of the next.
        vocab_size: token ids are below it.
    """

    def __init__(
        self, requests: list[JobRequest], rounds: int, period_s: float, vocab_size: int
    ) -> None:
        self._requests = sorted(requests, key=lambda one: one.at_s or 0.0)
        self._rounds, self._period_s, self._vocab_size = rounds, period_s, vocab_size
        self.num_requests = rounds * len(requests)

    def __call__(self) -> Iterator[Arrival]:
        for number in range(self._rounds):
            begin = number * self._period_s
            # Ids have 32 bits in a block's digest, so a long run repeats the first ids.
            offset = number * self._vocab_size % ((1 << 31) - self._vocab_size)
            for request in self._requests:
                ids = _ids(request)
                prompt = [token_id + offset for token_id in ids] if offset else ids
                yield Arrival(begin + (request.at_s or 0.0), prompt, request.max_tokens)


def simulate_job(
    spec: EngineSpec,
    job: LoadJob,
    *,
    num_replicas: int = 1,
    router: str = "round_robin",
    fast_forward: bool = True,
    on_request: Callable[[int], None] = lambda number: None,
) -> SimulationResults:
    """Run a job on simulated replicas.

    Args:
        spec: the engine of every replica.
        job: a job with prompts of token ids.
        num_replicas: engines behind the router.
        router: `round_robin`, `least_load` or `prefix_aware`.
        fast_forward: whether equal decode steps are simulated at once.
        on_request: called repeatedly with the number of requests sent so far.
    """
    depends = any(request.after is not None for request in job.requests)
    if depends or job.concurrency or job.max_concurrency:
        return _Dependent(spec, job, num_replicas, router, fast_forward).run(on_request)
    return simulate_open(
        spec,
        JobTraffic(job.requests, 1, 0.0, 0),
        num_replicas=num_replicas,
        router=router,
        fast_forward=fast_forward,
        on_request=on_request,
    )


class _Dependent:
    """Simulates requests of which some wait for the end of others."""

    def __init__(
        self, spec: EngineSpec, job: LoadJob, num_replicas: int, router: str, fast_forward: bool
    ) -> None:
        self._job = job
        self._results = SimulationResults()
        self._router = make_router(router, num_replicas, spec.block_size)
        self._replicas = [
            Replica(spec, self._results, fast_forward=fast_forward, on_end=self._end)
            for _ in range(num_replicas)
        ]
        self._due: list[tuple[float, int]] = []  # heap: (time to send, index of the request)
        # requests that wait because of the limit of concurrency, as in `_due`
        self._held: deque[tuple[float, int]] = deque()
        self._num_live = 0
        self._num_sent = 0
        self._prompts: dict[int, list[int]] = {}  # prompts of the turns that were sent
        self._next = {
            request.after: place
            for place, request in enumerate(job.requests)
            if request.after is not None
        }
        heads = [place for place, one in enumerate(job.requests) if one.after is None]
        self._heads = iter(heads)
        if job.concurrency:
            for _ in range(job.concurrency):
                self._begin(0.0)
        else:
            self._due = [(job.requests[place].at_s or 0.0, place) for place in heads]
            heapq.heapify(self._due)

    def run(self, on_request: Callable[[int], None]) -> SimulationResults:
        while True:
            time_s = self._due[0][0] if self._due else math.inf
            busy = [one for one in self._replicas if one.has_work and one.now < time_s]
            if busy:
                first = min(busy, key=lambda one: one.now)
                others = (one.quiet_until for one in busy if one is not first)
                until = min(time_s, min(others, default=math.inf))
                # Run at least one step, even if another replica's clock has the same time.
                first.advance(max(until, math.nextafter(first.now, math.inf)), num_ends=1)
            elif self._due:
                self._arrive(*heapq.heappop(self._due))
                on_request(self._num_sent)
            else:
                break
        for replica in self._replicas:
            replica.finish()
        return self._results

    def _begin(self, now: float) -> None:
        """Start the next conversation of a closed loop."""
        limit = self._job.stop_after_s
        place = None if limit is not None and now > limit else next(self._heads, None)
        if place is not None:
            heapq.heappush(self._due, (now, place))

    def _arrive(self, time_s: float, place: int) -> None:
        limit = self._job.max_concurrency
        if limit is not None and self._num_live >= limit:
            self._held.append((time_s, place))
        else:
            self._send(time_s, place, time_s)

    def _send(self, time_s: float, place: int, now: float) -> None:
        request = self._job.requests[place]
        prompt = _ids(request)
        if request.after is not None:
            before = self._job.requests[request.after]
            answer = [OUTPUT_TOKEN_ID] * before.max_tokens
            prompt = self._prompts.pop(request.after) + answer + prompt
        if place in self._next:
            self._prompts[place] = prompt
        arrival = Arrival(time_s, prompt, request.max_tokens)
        index = self._router.choose(arrival.prompt)
        replica = self._replicas[index]
        self._num_sent += 1
        if replica.add(place, arrival, now):
            self._num_live += 1
            self._router.note(index, replica.num_live)
        else:
            self._results.num_refused += 1
            if self._job.concurrency:
                self._begin(now)

    def _end(self, place: int, now: float) -> None:
        self._num_live -= 1
        if self._router.reads_loads:
            for index, replica in enumerate(self._replicas):
                self._router.note(index, replica.num_live)
        following = self._next.get(place)
        if following is not None:
            think_s = self._job.requests[following].think_s
            heapq.heappush(self._due, (now + think_s, following))
        elif self._job.concurrency:
            self._begin(now)
        if self._held:
            time_s, held = self._held.popleft()
            self._send(time_s, held, now)
