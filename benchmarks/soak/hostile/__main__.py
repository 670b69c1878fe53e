"""The hostile clients of the soak test, in a process of their own.

    python -m ostinato.benchmarks.soak.hostile URL --connections 250 --seconds 60

Each of the `--connections` clients has a connection that "drips": it sends one byte of an
unfinished request every two seconds. At random times the client closes it, performs an act on new
connections, and begins to drip again. Light acts are the `STAGES` of faults.py, and requests with
huge numbers. Heavy acts are hard constraints, hard templates and the cases of `stall_cases`. The
groups of heavy acts take turns, so each group gets equally many acts. The process builds the
requests of the stall cases and writes `ready`. It starts to send when it gets a line on stdin. At
the end it writes its counts as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from ostinato.benchmarks.soak.hostile.faults import STAGES, Answer, Stage, drip, post, read_answer
from ostinato.benchmarks.soak.hostile.hostile_requests import (
    hostile_constraint,
    hostile_template,
    huge_number,
)
from ostinato.benchmarks.soak.stall_cases import generation_cases
from ostinato.runtime.file_limit import raise_file_limit

__all__ = ("main",)

_NICENESS = 5  # hostile clients must not take processor time from the other clients
_WORDS = ("A", "melody", "that", "is", "learned", "once", "can", "be", "repeated")
_SHARE_OF_NUMBERS = 0.3  # share of the light acts that are _HUGE_NUMBERS
_BROKEN_HTTP, _HUGE_NUMBERS = "broken HTTP", "huge numbers"  # the groups of light acts
_PART = 1 << 20  # bytes of an answer that are read at once


class _Heavy(NamedTuple):
    """A heavy act: its requests are sent one after the other."""

    name: str
    requests: Callable[[random.Random], Sequence[bytes]]
    num_at_once: int = 1


class _Rotation:
    """Chooses the heavy acts: the groups take turns, and the acts of a group are in random order.

    Args:
        groups: the acts by the name of their group; no group is empty.
        seed: the seed of these orders.
    """

    def __init__(self, groups: Mapping[str, Sequence[_Heavy]], seed: str) -> None:
        numbers = random.Random(f"{seed}/rotation")
        self._acts = {
            name: itertools.cycle(numbers.sample(acts, len(acts))) for name, acts in groups.items()
        }
        self._names = itertools.cycle(groups)

    def next(self) -> tuple[str, _Heavy]:
        """The next act and its group."""
        name = next(self._names)
        return name, next(self._acts[name])


@dataclass(slots=True)
class _Counts:
    acts: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    heavy: list[tuple[str, float, float]] = field(default_factory=list)  # name, time.time(), s
    wrong: list[str] = field(default_factory=list)


class _Hostile:
    """The acts of the connections, and counts of their outcomes.

    Args:
        url: the URL of the server.
        rotation: the heavy acts, for all connections.
        rates: light acts and heavy acts per second of each connection.
    """

    def __init__(self, url: str, rotation: _Rotation, rates: tuple[float, float]) -> None:
        self._address = urlsplit(url)
        self._rotation = rotation
        self._light, self._heavy = rates
        self.counts = _Counts()

    async def run(self, seed: str, until: float) -> None:
        """Open one connection after the other, until `until` (time.monotonic)."""
        numbers = random.Random(seed)
        while (now := time.monotonic()) < until:
            rest = min(numbers.expovariate(self._light + self._heavy), until - now)
            await self._drip(rest, in_body=numbers.random() < 0.5)
            if time.monotonic() < until:
                await self._act(numbers)

    async def _drip(self, seconds: float, *, in_body: bool) -> None:
        async def stage(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
        ) -> Answer | None:
            return await drip(reader, writer, seconds, in_body=in_body)

        await self._connect(f"drips a {'body' if in_body else 'header'}", stage, b"")

    async def _act(self, numbers: random.Random) -> None:
        if numbers.random() * (self._light + self._heavy) < self._heavy:
            group, act = self._rotation.next()
            self.counts.groups[group] += 1
            began = time.time()
            for request in act.requests(numbers):
                await asyncio.gather(
                    *(self._connect(act.name, _read_whole, request) for _ in range(act.num_at_once))
                )
            self.counts.heavy.append((act.name, began, time.time() - began))
        elif numbers.random() < _SHARE_OF_NUMBERS:
            self.counts.groups[_HUGE_NUMBERS] += 1
            await self._connect("a huge number", _read_head, huge_number(numbers))
        else:
            self.counts.groups[_BROKEN_HTTP] += 1
            name = numbers.choice(sorted(STAGES))
            words = " ".join(numbers.choices(_WORDS, k=numbers.randint(1, 60)))
            body = {"prompt": words, "max_tokens": 60, "stream": True, "ignore_eos": True}
            await self._connect(
                name, STAGES[name], post("/v1/completions", json.dumps(body).encode())
            )

    async def _connect(self, name: str, stage: Stage, request: bytes) -> None:
        """Run a stage on a connection of its own, and count how it went."""
        counts = self.counts
        answer = None
        try:
            reader, writer = await asyncio.open_connection(
                self._address.hostname, self._address.port, limit=1 << 24
            )
            try:
                answer = await stage(reader, writer, request)
            finally:
                writer.transport.abort()  # closes at once, without sending what is buffered
        except (OSError, asyncio.IncompleteReadError):
            pass
        except (RuntimeError, TimeoutError) as error:
            counts.wrong.append(f"{name}: {type(error).__name__} {str(error)[:1000]}")
        counts.acts[name] += 1
        counts.statuses["none" if answer is None else str(answer.status)] += 1
        if answer is not None and answer.is_fault:
            counts.wrong.append(f"{name} was answered with {answer.text[:1500]!r}")


async def _read_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    writer.write(request)
    return await read_answer(reader)


async def _read_whole(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    writer.write(request)
    answer = await read_answer(reader)
    if answer is not None and "\r\nconnection: close" in answer.text.lower():
        while await reader.read(_PART):
            pass
    return answer


def _heavy_acts(max_model_len: int, pattern: str) -> dict[str, list[_Heavy]]:
    """The heavy acts by group. Only stall cases whose names match the pattern are included."""
    groups = {
        "hard constraints": [
            _Heavy("a hard constraint", lambda numbers: [hostile_constraint(numbers)])
        ],
        "hard templates": [_Heavy("a hard template", lambda numbers: [hostile_template(numbers)])],
    }
    for case in generation_cases(max_model_len):
        if re.search(pattern, case.name):
            made = list(case.requests())
            act = _Heavy(case.name, lambda numbers, made=made: made, case.num_at_once)
            groups.setdefault(case.group, []).append(act)
    return groups


async def _run(
    url: str, options: argparse.Namespace, groups: Mapping[str, Sequence[_Heavy]]
) -> _Counts:
    share = 1 / options.connections
    rotation = _Rotation(groups, options.seed)
    hostile = _Hostile(url, rotation, (options.rate * share, options.heavy_rate * share))
    hostile.counts.groups.update(dict.fromkeys((*groups, _BROKEN_HTTP, _HUGE_NUMBERS), 0))
    until = time.monotonic() + options.seconds
    seeds = (f"{options.seed}/hostile/{number}" for number in range(options.connections))
    await asyncio.gather(*(hostile.run(seed, until) for seed in seeds))
    return hostile.counts


def main(arguments: list[str]) -> int:
    """Send hostile requests and print the counts; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0, help="light acts per second")
    parser.add_argument("--heavy-rate", type=float, default=0.2, help="heavy acts per second")
    parser.add_argument("--cases", default="", help="a regular expression for stall cases")
    parser.add_argument("--seed", default="0")
    options = parser.parse_args(arguments)
    raise_file_limit()
    os.nice(_NICENESS)
    model = httpx.get(f"{options.url}/v1/models", timeout=60).json()["data"][0]
    groups = _heavy_acts(model["max_model_len"], options.cases)
    print("ready", flush=True)
    sys.stdin.readline()
    counts = asyncio.run(_run(options.url, options, groups))
    result = {
        "acts": counts.acts,
        "groups": counts.groups,
        "statuses": counts.statuses,
        "heavy": counts.heavy,
        "wrong": counts.wrong[:20],
    }
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
