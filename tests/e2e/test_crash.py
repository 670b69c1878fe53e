"""Fifty streams through a real server whose engine is killed three times: every stream is bitwise
the one that an undisturbed server sends.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.server_process import ServerProcess

NUM_STREAMS = 50
TEXTS = ("Once upon a time", "A block table is", "The scheduler", "Count to ten: one,", "Hello")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # As it is served: native kernels, packed weights, captured programs.
    with ServerProcess(
        "graphs.mode=captured",
        "graphs.attention=auto",
        "graphs.pack_weights=true",
        "cache.memory_gib=0.2",
        "scheduler.max_num_seqs=40",  # some of the streams wait
        "server.restart_backoff_s=0.1",
        "server.drain_timeout_s=200",
    ) as process:
        yield process


def body(number: int) -> dict[str, Any]:
    """One of many kinds of requests; each always gets the same answer."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "seed": number},
        {"temperature": 0.9, "seed": number, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.5, "seed": number, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.0, "seed": number, "n": 2},
        {"temperature": 1.1, "seed": number, "min_tokens": 100, "stop": ["e"]},
        {"temperature": 0, "logprobs": 1, "frequency_penalty": 0.8},
    ]
    chosen = options[number % len(options)]
    return {
        "prompt": f"{TEXTS[number % len(TEXTS)]} {number}",
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **chosen,
    }


def what_was_said(lines: list[str]) -> list[Any]:
    """A stream's events without its id and its time; cached tokens depend on who came before."""
    assert lines[-1] == "data: [DONE]", lines[-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not any("error" in event for event in events), events[-1]
    usage = events[-1]["usage"]
    told: list[Any] = [(usage["prompt_tokens"], usage["completion_tokens"])]
    # Completions of one request come in any order; each has its own.
    for index in range(max(c["index"] for e in events for c in e["choices"]) + 1):
        told.append([c for e in events for c in e["choices"] if c["index"] == index])
    return told


class Streams:
    """All streams at once, and how far they have come."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.lines: list[list[str]] = [[] for _ in range(NUM_STREAMS)]

    @property
    def num_lines(self) -> int:
        return sum(map(len, self.lines))

    async def run(self) -> list[list[Any]]:
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with httpx.AsyncClient(base_url=self._url, timeout=250, limits=limits) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(NUM_STREAMS)))
        return [what_was_said(lines) for lines in self.lines]

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        async with client.stream("POST", "/v1/completions", json=body(number)) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line:
                    self.lines[number].append(line)


async def until(condition: Callable[[], bool], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


def engine_of(server: ServerProcess) -> psutil.Process | None:
    """The engine that runs now; None while there is none."""
    try:
        return server.engine
    except (ValueError, psutil.Error):
        return None


def test_fifty_streams_survive_three_kills(server: ServerProcess) -> None:
    async def undisturbed() -> list[list[Any]]:
        return await Streams(server.url).run()

    async def killed() -> list[list[Any]]:
        streams = Streams(server.url)
        task = asyncio.create_task(streams.run())

        async def kill_at(num_lines: int) -> None:
            await until(lambda: streams.num_lines >= num_lines or task.done())
            assert not task.done(), "the streams ended before the engine was killed"
            await until(lambda: engine_of(server) is not None)
            engine = engine_of(server)
            assert engine is not None
            engine.kill()
            await until(lambda: not engine.is_running())

        await kill_at(20)  # prompts are still computed, some streams wait
        await kill_at(20)  # the next one while it starts
        await kill_at(4000)  # in the middle
        return await task

    expected = asyncio.run(undisturbed())
    assert sum(tokens for (_, tokens), *_ in expected) > NUM_STREAMS * 100
    assert asyncio.run(killed()) == expected
    metrics = server.metrics()
    restarts = {
        name: value
        for name, value in metrics.items()
        if name.startswith("ostinato_engine_restarts_total{") and value
    }
    assert sum(restarts.values()) == 3
    assert restarts['ostinato_engine_restarts_total{reason="killed"}'] >= 2
    assert metrics["ostinato_kv_cache_usage_ratio"] == 0
    assert httpx.get(f"{server.url}/ready", timeout=30).json() == {"status": "ready"}


def test_a_drain_waits_for_an_engine_that_is_started_again(server: ServerProcess) -> None:
    """The last test of this server: it ends it."""
    request = {**body(0), "max_tokens": 100}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=250) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.engine.kill()
        server.signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 100
    assert server.wait() == 0
