"""Runs one soak test: a server, good and hostile clients, kills of the engine, observations."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ostinato.benchmarks.soak.clients import REPLY_S, ClientCounts, send_traffic
from ostinato.benchmarks.soak.libraries.client_libraries import command
from ostinato.benchmarks.soak.side_process import SideProcess
from ostinato.benchmarks.soak.soak_server import Resources, SoakServer
from ostinato.runtime.file_limit import raise_file_limit

__all__ = ("ALLOWED_GROWTH", "OVERRIDES", "Observations", "SoakPlan", "measure")

# The KV cache is so small that sequences wait and are preempted. The store of replies is so small
# that it is full before the growth of memory is measured.
OVERRIDES = (
    "server.port=0",
    "model.name=demo",
    "cache.memory_gib=0.004",
    "server.response_store_mib=8",
)
# The allowed growth of each resource. Pools of threads and of helper processes grow to their
# limits.
ALLOWED_GROWTH = Resources(
    fds=16, engine_fds=16, threads=16, engine_threads=16, processes=8, temporary_files=0
)
_SETTLE_S = 60.0
_SAMPLE_S = 2.0
_LATE_S = 300.0  # a process beside the test may take this long for its last answers
_HERE = "ostinato.benchmarks.soak"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """The traffic, the attacks and the kills of one soak test.

    Attributes:
        seconds: how long requests are sent, the calm time included.
        seed: the seed of all requests. Their order at the server depends on timing.
        num_clients: good clients.
        rate: requests per second of all good clients; 0 = each sends as soon as it can.
        calm_s: seconds before the hostile connections and the kills begin.
        num_hostile: hostile connections.
        hostile_rate: short attacks per second of all hostile connections.
        heavy_rate: large requests, hard constraints and templates per second of all hostile
            connections.
        stall_cases: a regular expression for names of `stall_cases`.
        kill_every_s: seconds between two kills of the engine process; 0 = it is not killed.
        libraries: names of client libraries that send requests too.
        library_directory: where these are installed; None = in the environment of this process.
        overrides: configuration of the server, besides OVERRIDES.
    """

    seconds: float
    seed: int = 0
    num_clients: int = 12
    rate: float = 0.0
    calm_s: float = 0.0
    num_hostile: int = 0
    hostile_rate: float = 20.0
    heavy_rate: float = 0.2
    stall_cases: str = ""
    kill_every_s: float = 0.0
    libraries: Sequence[str] = ()
    library_directory: Path | None = None
    overrides: Sequence[str] = ()


@dataclass(slots=True, kw_only=True)
class Observations:
    """What was observed in one soak test; times are those of `time.time()`."""

    begin: float = 0.0
    counts: ClientCounts = field(default_factory=ClientCounts)
    hostile: dict[str, Any] = field(default_factory=dict)
    polls: list[tuple[float, float, int]] = field(default_factory=list)  # when, seconds, status
    pauses: list[tuple[float, float]] = field(default_factory=list)  # of the machine: when, seconds
    libraries: dict[str, dict[str, Any]] = field(default_factory=dict)  # result or why skipped
    kills: list[float] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)  # at, MiB by process
    metrics: dict[str, float] = field(default_factory=dict)
    before: Resources | None = None
    after: Resources | None = None
    lines: list[str] = field(default_factory=list)
    exit_code: int = 0

    @property
    def restarts(self) -> list[tuple[float, float]]:
        """The time of each kill, and of the first `/health` with a working engine after it."""
        spans = []
        for killed in self.kills:
            later = [poll for poll in self.polls if poll[0] >= killed]
            first_bad = next((at for at, _, status in later if status != 200), None)
            if first_bad is None:
                spans.append((killed, killed))
                continue
            good = [at + took for at, took, status in later if status == 200 and at > first_bad]
            spans.append((killed, min(good, default=float("inf"))))
        return spans


def measure(plan: SoakPlan) -> Observations:
    """Run the test.

    Raises:
        RuntimeError: the server or a process beside the test did not start, or failed.
        subprocess.TimeoutExpired: a process beside the test did not end within `_LATE_S`.
    """
    seen = Observations()
    server = SoakServer([*OVERRIDES, *plan.overrides])
    try:
        url = server.wait_until_ready()
        raise_file_limit()
        with _side_processes(plan, url, seen) as sides:
            seen.before = server.resources()
            asyncio.run(_drive(plan, url, server, sides, seen))
        seen.metrics = _settled_metrics(url)
        seen.after = _settled(server, seen.before)
        seen.exit_code = server.stop()
    finally:
        server.kill()
    seen.lines = server.lines
    return seen


@contextmanager
def _side_processes(
    plan: SoakPlan, url: str, seen: Observations
) -> Iterator[dict[str, SideProcess]]:
    """Start the health poll, the libraries, and the hostile clients, which wait for `begin`."""
    sides: dict[str, SideProcess] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if plan.num_hostile:
                numbers = {
                    "--connections": plan.num_hostile,
                    "--seconds": plan.seconds - plan.calm_s,
                    "--rate": plan.hostile_rate,
                    "--heavy-rate": plan.heavy_rate,
                    "--cases": plan.stall_cases,
                    "--seed": plan.seed,
                }
                options = [str(one) for pair in numbers.items() for one in pair]
                sides["hostile"] = SideProcess(
                    "hostile", [sys.executable, "-m", f"{_HERE}.hostile", url, *options]
                )
                sides["hostile"].wait_until_ready()
            sides["health"] = SideProcess(
                "health poll", [sys.executable, "-m", f"{_HERE}.health_poll", url]
            )
            sides["health"].wait_until_ready()
            for name in plan.libraries:
                found = command(name, url, plan.seconds, plan.library_directory)
                if isinstance(found, str):
                    seen.libraries[name] = {"skipped": found}
                else:
                    directory = plan.library_directory or Path(scratch)
                    sides[name] = SideProcess(name, found, directory)
            yield sides
        finally:
            for side in sides.values():
                side.kill()


async def _drive(
    plan: SoakPlan, url: str, server: SoakServer, sides: dict[str, SideProcess], seen: Observations
) -> None:
    seen.begin = time.time()

    async def sample() -> None:
        while True:
            at = round(time.time() - seen.begin, 1)
            seen.memory.append({"at": at, **await asyncio.to_thread(server.rss_mib)})
            await asyncio.sleep(_SAMPLE_S)

    async def storm() -> None:
        await asyncio.sleep(plan.calm_s)
        if "hostile" in sides:
            sides["hostile"].begin()
        while plan.kill_every_s:
            await asyncio.sleep(plan.kill_every_s)
            if time.time() + plan.kill_every_s / 2 > seen.begin + plan.seconds:
                return
            if await asyncio.to_thread(server.kill_engine):
                seen.kills.append(time.time())

    others = [asyncio.create_task(sample()), asyncio.create_task(storm())]
    seen.counts = await send_traffic(
        url, plan.seconds, seed=plan.seed, num_clients=plan.num_clients, rate=plan.rate
    )
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for name in [name for name in sides if name != "health"]:  # the health poll ends last
        result = await asyncio.to_thread(sides[name].result, _LATE_S)
        if name == "hostile":
            seen.hostile = result
        else:
            seen.libraries[name] = result
    health = await asyncio.to_thread(sides["health"].result, _LATE_S)
    seen.polls = [(at, took, status) for at, took, status in health["polls"]]
    seen.pauses = [(at, took) for at, took in health["pauses"]]


def _settled_metrics(url: str) -> dict[str, float]:
    """`/metrics` by name and labels, as soon as no request is left, or after a minute."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        text = httpx.get(f"{url}/metrics", timeout=REPLY_S).text
        found = {
            "".join((sample.name, *(f" {k}={v}" for k, v in sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        unfinished = found["ostinato_requests_running"] + found["ostinato_requests_waiting"]
        if unfinished == 0 or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _settled(server: SoakServer, before: Resources) -> Resources:
    """The server's resources as soon as they are within the limits, or after a minute."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        now = server.resources()
        limits = (one + more for one, more in zip(before, ALLOWED_GROWTH, strict=True))
        is_within = all(one <= limit for one, limit in zip(now, limits, strict=True))
        if is_within or time.monotonic() > deadline:
            return now
        time.sleep(0.2)
