"""The clients of the soak test: they send generated requests, check every answer, and count."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from ostinato.benchmarks.soak.faults import kill_engines, misbehave
from ostinato.benchmarks.soak.soak_server import SoakServer
from ostinato.benchmarks.soak.traffic import TEXT, Exchange, Traffic

__all__ = ("REPLY_S", "ClientCounts", "Faults", "drive")

REPLY_S = 120.0  # the longest wait for a response
_SAMPLE_S = 1.0


@dataclass(slots=True)
class ClientCounts:
    """Counts and errors of all clients."""

    exchanges: Counter[str] = field(default_factory=Counter)  # answered, refused, hung up
    statuses: Counter[int] = field(default_factory=Counter)
    options: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # of soak.faults
    wrong: list[str] = field(default_factory=list)  # unexpected answers
    answered: list[tuple[float, float]] = field(default_factory=list)  # when sent, seconds it took

    def blame(self, exchange: Exchange, what: str) -> None:
        self.wrong.append(f"{exchange.path} {what[:500]}: {json.dumps(exchange.body)[:2000]}")


async def _exchange(client: httpx.AsyncClient, exchange: Exchange, counts: ClientCounts) -> None:
    counts.options.update(exchange.body.keys())
    sent = time.monotonic()
    is_whole = False
    try:
        async with asyncio.timeout(exchange.patience_s):
            async with client.stream("POST", exchange.path, json=exchange.body) as response:
                counts.statuses[response.status_code] += 1
                if response.status_code != exchange.status:
                    await response.aread()
                    counts.blame(exchange, f"gave {response.status_code}: {response.text}")
                elif response.status_code != 200:
                    await response.aread()
                    counts.exchanges["refused"] += 1
                elif exchange.body["stream"]:
                    is_whole = await _read_stream(response, exchange, counts)
                else:
                    await response.aread()
                    is_whole = True
                    _check_choices(response.json()["choices"], exchange, counts)
    except TimeoutError:
        counts.exchanges["hung up"] += 1
    except httpx.HTTPError as error:
        counts.blame(exchange, f"broke: {type(error).__name__}: {error}")
    if is_whole:
        counts.answered.append((sent, time.monotonic() - sent))


async def _read_stream(response: httpx.Response, exchange: Exchange, counts: ClientCounts) -> bool:
    """Whether the client read to the end."""
    last, chunks, ended = "", 0, set()
    if exchange.chunks_read == 0:
        counts.exchanges["hung up"] += 1
        return False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        last, chunks = line, chunks + 1
        if line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk.get("choices", ()):
                if choice["finish_reason"] is not None:
                    ended.add((choice["index"], choice["finish_reason"]))
        if chunks == exchange.chunks_read:
            counts.exchanges["hung up"] += 1
            return False
    _check_ends([reason for _, reason in ended], exchange, counts)
    if last != "data: [DONE]":
        counts.blame(exchange, f"the stream ended with {last}")
    return True


def _check_choices(choices: list[dict[str, Any]], exchange: Exchange, counts: ClientCounts) -> None:
    _check_ends([choice["finish_reason"] for choice in choices], exchange, counts)


def _check_ends(reasons: list[str], exchange: Exchange, counts: ClientCounts) -> None:
    counts.exchanges["answered"] += 1
    if len(reasons) != exchange.num_choices or not set(reasons) <= {"stop", "length", "repetition"}:
        counts.blame(exchange, f"{exchange.num_choices} choices ended as {reasons}")


class Faults(NamedTuple):
    """The faults to inject."""

    num_bad_clients: int = 0  # clients of soak.faults.misbehave
    calm_s: float = 0.0  # seconds with good clients alone, before the bad ones start
    kill_every_s: float = 0.0  # seconds between kills of the engine; 0 = no kills


async def drive(
    url: str, seconds: float, seed: int, num_clients: int, server: SoakServer, faults: Faults
) -> tuple[ClientCounts, list[dict[str, float]]]:
    """Send traffic for `seconds`, then wait until all clients have their last answers.

    Returns:
        The counts, and the server's memory once a second: `at` seconds, MiB by process.
    """
    counts, memory = ClientCounts(), []
    begin = time.monotonic()
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=REPLY_S, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]
        token_ids = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]

        async def send(number: int) -> None:
            traffic = Traffic(seed, number, token_ids, model["max_model_len"])
            while time.monotonic() - begin < seconds:
                await _exchange(client, traffic.next(), counts)

        async def sample() -> None:
            while True:
                memory.append({"at": round(time.monotonic() - begin, 1), **server.rss_mib()})
                await asyncio.sleep(_SAMPLE_S)

        others = [asyncio.create_task(sample())]
        if faults.kill_every_s:
            killing = kill_engines(server.process, faults.kill_every_s, counts.faults)
            others.append(asyncio.create_task(killing))

        async def send_bad(number: int) -> None:
            await asyncio.sleep(faults.calm_s)
            await misbehave(
                url,
                token_ids,
                seed=f"{seed}/bad/{number}",
                until=begin + seconds,
                counts=counts.faults,
            )

        bad = (send_bad(number) for number in range(faults.num_bad_clients))
        await asyncio.gather(*(send(number) for number in range(num_clients)), *bad)
        for task in others:
            task.cancel()
    counts.answered = [(sent - begin, took) for sent, took in counts.answered]
    return counts, memory
