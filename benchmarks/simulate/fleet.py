"""Simulates several replicas behind a router.

With requests at given times, a replica is advanced only when its state is needed: when a request is
routed to it, or when its load may have changed. A round-robin router reads no state, so its
replicas are independent and can run in several processes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from ostinato.benchmarks.simulate.results import SimulationResults
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.simulated_replica import Arrival, Replica
from ostinato.runtime.replicas.router import RoundRobin, Router, make_router

__all__ = ("Traffic", "simulate_open")

Traffic = Callable[[], Iterator[Arrival]]
"""Returns the same requests at each call, in the order of their times. With several processes it
must be picklable."""


def simulate_open(
    spec: EngineSpec,
    traffic: Traffic,
    *,
    num_replicas: int = 1,
    router: str = "round_robin",
    num_processes: int = 1,
    fast_forward: bool = True,
    on_request: Callable[[int], None] = lambda number: None,
) -> SimulationResults:
    """Send requests at given times (an open loop), and run all to their ends.

    Args:
        spec: the engine of every replica.
        traffic: the requests.
        num_replicas: engines behind the router.
        router: `round_robin`, `least_load` or `prefix_aware`.
        num_processes: processes at most; routers other than `round_robin` use one.
        fast_forward: whether equal decode steps are simulated at once.
        on_request: called repeatedly with the number of requests sent so far; not called if
            several processes are used.
    """
    chosen = make_router(router, num_replicas, spec.block_size)
    num_processes = min(num_processes, num_replicas)
    if not isinstance(chosen, RoundRobin) or num_processes == 1:
        return _run(spec, traffic, chosen, range(num_replicas), fast_forward, on_request)
    parts = [range(first, num_replicas, num_processes) for first in range(num_processes)]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(_run, spec, traffic, RoundRobin(num_replicas), part, fast_forward)
            for part in parts
        ]
        results = futures[0].result()
        results.merge(future.result() for future in futures[1:])
    return results


def _ignore(number: int) -> None:
    """Does nothing; `on_request` of a process that simulates a part of the fleet."""


def _run(
    spec: EngineSpec,
    traffic: Traffic,
    router: Router,
    mine: range,
    fast_forward: bool,
    on_request: Callable[[int], None] = _ignore,
) -> SimulationResults:
    """Simulate the replicas `mine` of the fleet. Other requests only advance the router."""
    results = SimulationResults()
    replicas = {index: Replica(spec, results, fast_forward=fast_forward) for index in mine}
    watch = _Watch(replicas) if router.reads_loads else None
    for key, arrival in enumerate(traffic()):
        if watch is not None:
            watch.advance(arrival.time_s, router)
        index = router.choose(arrival.prompt)
        if index in replicas:
            replica = replicas[index]
            replica.advance(arrival.time_s)
            if replica.add(key, arrival, arrival.time_s):
                router.note(index, replica.num_live)
            else:
                results.num_refused += 1
            if watch is not None:
                watch.note(index)
        if key % 256 == 0:
            on_request(key)
    for index in list(replicas):
        replica = replicas.pop(index)
        replica.advance(math.inf)
        replica.finish()
    return results


class _Watch:
    """Keeps a router's loads up to date, and runs only replicas whose load may have changed.

    A replica's load cannot fall before one of its running requests has all its tokens. Until then
    the replica is run only if a request is routed to it.
    """

    def __init__(self, replicas: dict[int, Replica]) -> None:
        self._replicas = replicas
        self._due: list[tuple[float, int]] = []  # heap: when a replica's load may fall
        self._when: dict[int, float] = {}

    def note(self, index: int) -> None:
        """Note that a replica was run or got a request."""
        when = self._replicas[index].quiet_until
        if not math.isinf(when):
            self._when[index] = when
            heapq.heappush(self._due, (when, index))

    def advance(self, time_s: float, router: Router) -> None:
        """Run the replicas whose load may have fallen before `time_s`."""
        due = self._due
        while due and due[0][0] < time_s:
            when, index = heapq.heappop(due)
            if self._when.get(index) != when:
                continue  # an outdated entry: the replica has been run since
            del self._when[index]
            replica = self._replicas[index]
            replica.advance(time_s)
            router.note(index, replica.num_live)
            if replica.has_work:
                # The replica's clock is at or after `time_s`. It is checked again at a later
                # request.
                self._when[index] = max(replica.quiet_until, time_s)
                heapq.heappush(due, (self._when[index], index))
