"""The hostile clients of the soak test, in a process of their own.

    python -m ostinato.benchmarks.soak.hostile URL --connections 250 --seconds 60

Every connection drips: it sends a byte of an unfinished request now and then. At random times it
does something else: a stage of `faults`, a hostile request, or a case of `stall_cases`. The process
writes `ready` when it has made its requests, begins when a line comes on stdin, and ends with its
counts as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from ostinato.benchmarks.soak.hostile.faults import STAGES, Answer, Stage, drip, post, read_answer
from ostinato.benchmarks.soak.hostile.hostile_requests import hostile_constraint, huge_number
from ostinato.benchmarks.soak.stall_cases import generation_cases
from ostinato.runtime.file_limit import raise_file_limit

__all__ = ("main",)

_NICENESS = 5  # a hostile client is to load the server, not the clients beside it
_WORDS = ("A", "melody", "that", "is", "learned", "once", "can", "be", "repeated")
_SHARE_OF_NUMBERS = 0.3  # of the light acts
_CONSTRAINT = "a constraint or template"
_PART = 1 << 20  # bytes of an answer that are read at once


class _Case(NamedTuple):
    """A case of `stall_cases` with its requests made."""

    requests: Sequence[bytes]
    num_at_once: int


@dataclass(slots=True)
class _Counts:
    acts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class _Hostile:
    """What the connections do.

    Args:
        url: of the server.
        cases: the stall cases by name.
        rates: of light and of heavy acts, per second of one connection.
    """

    def __init__(self, url: str, cases: Mapping[str, _Case], rates: tuple[float, float]) -> None:
        self._address = urlsplit(url)
        self._cases = cases
        self._light, self._heavy = rates
        self.counts = _Counts()

    async def run(self, seed: str, until: float) -> None:
        """One connection after the other, until `until` (time.monotonic)."""
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
            name = numbers.choice([_CONSTRAINT, *self._cases])
            requests, at_once = self._cases.get(name, ([hostile_constraint(numbers)], 1))
            for request in requests:
                await asyncio.gather(
                    *(self._connect(name, _read_whole, request) for _ in range(at_once))
                )
        elif numbers.random() < _SHARE_OF_NUMBERS:
            await self._connect("a huge number", _read_head, huge_number(numbers))
        else:
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
                writer.transport.abort()  # no farewell
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


async def _run(url: str, options: argparse.Namespace, cases: Mapping[str, _Case]) -> _Counts:
    share = 1 / options.connections
    hostile = _Hostile(url, cases, (options.rate * share, options.heavy_rate * share))
    until = time.monotonic() + options.seconds
    seeds = (f"{options.seed}/hostile/{number}" for number in range(options.connections))
    await asyncio.gather(*(hostile.run(seed, until) for seed in seeds))
    return hostile.counts


def main(arguments: list[str]) -> int:
    """Run; 0 as the exit code."""
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
    cases = {
        case.name: _Case(list(case.requests()), case.num_at_once)
        for case in generation_cases(model["max_model_len"])
        if re.search(options.cases, case.name)
    }
    print("ready", flush=True)
    sys.stdin.readline()
    counts = asyncio.run(_run(options.url, options, cases))
    result = {"acts": counts.acts, "statuses": counts.statuses, "wrong": counts.wrong[:20]}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
