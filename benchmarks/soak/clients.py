"""The good clients of the soak test: they send generated requests, and check every answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from ostinato.benchmarks.soak.request_phases import GoodRequest
from ostinato.benchmarks.soak.traffic import TEXT, Exchange, Traffic

__all__ = ("REPLY_S", "ClientCounts", "send_traffic")

REPLY_S = 120.0  # the longest wait for a response


@dataclass(slots=True)
class ClientCounts:
    """How the clients' requests ended."""

    # answered, refused, hung up (by the client), told to come again (a 503 with Retry-After),
    # equal without drafts, different without drafts
    exchanges: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    options: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # answers that are not as expected
    answered: list[GoodRequest] = field(default_factory=list)

    def add_wrong(self, exchange: Exchange, what: str) -> None:
        self.wrong.append(f"{exchange.path} {what[:500]}: {json.dumps(exchange.body)[:2000]}")


async def _exchange(
    client: httpx.AsyncClient, exchange: Exchange, counts: ClientCounts, request_id: str
) -> None:
    counts.options.update(exchange.body.keys())
    sent, begin = time.time(), time.perf_counter()
    is_whole = False
    choices: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(exchange.patience_s):
            headers = {"X-Request-Id": request_id}
            sending = client.stream("POST", exchange.path, json=exchange.body, headers=headers)
            async with sending as response:
                counts.statuses[response.status_code] += 1
                if response.status_code == 503 and "retry-after" in response.headers:
                    counts.exchanges["told to come again"] += 1
                elif response.status_code != exchange.status:
                    await response.aread()
                    counts.add_wrong(exchange, f"gave {response.status_code}: {response.text}")
                elif response.status_code != 200:
                    await response.aread()
                    counts.exchanges["refused"] += 1
                elif exchange.body["stream"]:
                    is_whole = await _read_stream(response, exchange, counts)
                else:
                    await response.aread()
                    is_whole = True
                    choices = response.json()["choices"]
                    _check_choices(choices, exchange, counts)
    except TimeoutError:
        counts.exchanges["hung up"] += 1
    except httpx.HTTPError as error:
        counts.add_wrong(exchange, f"broke: {type(error).__name__}: {error}")
    if is_whole:
        seconds = time.perf_counter() - begin
        counts.answered.append(GoodRequest(request_id, "good", exchange.kind, sent, seconds))
        if exchange.is_compared:
            await _compare(client, exchange, choices, counts)


async def _compare(
    client: httpx.AsyncClient,
    exchange: Exchange,
    choices: list[dict[str, Any]],
    counts: ClientCounts,
) -> None:
    """Send a request again, without drafts. Its choices must be equal, log-probabilities too."""
    try:
        body = {**exchange.body, "speculation": False}
        response = await client.post(exchange.path, json=body)
    except httpx.HTTPError as error:
        counts.add_wrong(exchange, f"broke without drafts: {type(error).__name__}: {error}")
        return
    counts.statuses[response.status_code] += 1
    if response.status_code == 503 and "retry-after" in response.headers:
        counts.exchanges["told to come again"] += 1
    elif response.status_code != 200:
        counts.add_wrong(exchange, f"gave {response.status_code} without drafts: {response.text}")
    elif (plain := response.json()["choices"]) == choices:
        counts.exchanges["equal without drafts"] += 1
    else:
        counts.exchanges["different without drafts"] += 1
        counts.add_wrong(exchange, f"differs: {choices} with drafts, {plain} without")


async def _read_stream(response: httpx.Response, exchange: Exchange, counts: ClientCounts) -> bool:
    """Read and check a stream; returns whether the client read to its end."""
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
        counts.add_wrong(exchange, f"the stream ended with {last}")
    return True


def _check_choices(choices: list[dict[str, Any]], exchange: Exchange, counts: ClientCounts) -> None:
    _check_ends([choice["finish_reason"] for choice in choices], exchange, counts)


def _check_ends(reasons: list[str], exchange: Exchange, counts: ClientCounts) -> None:
    counts.exchanges["answered"] += 1
    if len(reasons) != exchange.num_choices or not set(reasons) <= {"stop", "length", "repetition"}:
        counts.add_wrong(exchange, f"{exchange.num_choices} choices ended as {reasons}")


async def send_traffic(
    url: str, seconds: float, *, seed: int, num_clients: int, rate: float
) -> ClientCounts:
    """Send traffic for `seconds`, then wait until all clients have their last answers.

    Args:
        url: the URL of the server.
        seconds: how long requests are sent.
        seed: the seed of all requests.
        num_clients: how many clients send. Each has one request in progress at a time, and they
            share as many connections.
        rate: requests per second of all clients together; 0 = each sends as soon as it can.
    """
    counts = ClientCounts()
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=REPLY_S, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]
        token_ids = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]

        async def send(number: int) -> None:
            traffic = Traffic(seed, number, token_ids, model["max_model_len"])
            rests = random.Random(f"{seed}/rest/{number}")
            for index in itertools.count():
                if rate:
                    rest = rests.expovariate(rate / num_clients)
                    await asyncio.sleep(min(rest, max(0.0, until - time.monotonic())))
                if time.monotonic() >= until:
                    return
                await _exchange(client, traffic.next(), counts, f"good-{number}-{index}")

        await asyncio.gather(*(send(number) for number in range(num_clients)))
    return counts
