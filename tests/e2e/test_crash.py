"""Streams through a real server whose engine is killed.

Each stream has the same events as without the kill. The requests are of seven plain kinds and of
three kinds with a constraint.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import psutil
import pytest

from tests.e2e.server_process import HTTP, ServerProcess

NUM_STREAMS = 28  # four of each kind
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = ("Once upon a time", "A block table is", "The scheduler", "Count to ten: one,", "Hello")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # The default settings of `graphs`: native kernels, packed weights, captured programs.
    with ServerProcess(
        "graphs.mode=captured",
        "graphs.attention=auto",
        "graphs.pack_weights=true",
        "cache.memory_gib=0.2",
        "scheduler.max_num_seqs=20",  # some of the streams wait
        "server.restart_backoff_s=0.01",
        "server.drain_timeout_s=200",
    ) as process:
        yield process


def body(number: int) -> dict[str, Any]:
    """The body of a request; `number` selects its kind. Equal bodies get equal answers."""
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


ZOO = {
    "type": "array",
    "minItems": 3,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 30},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
CALL = {"type": "object", "properties": {"animals": ZOO}, "required": ["animals"]}
PATTERN = "([a-z]{3,9} ){12,16}end"
TOOL = {"type": "function", "function": {"name": "feed", "parameters": CALL}}


def constrained(number: int) -> tuple[str, dict[str, Any]]:
    """The path and body of a request with a constraint; `number` selects its kind and sampling."""
    fields: dict[str, Any] = {
        "max_tokens": 240,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **({"temperature": 0} if number % 2 else {"temperature": 1.1, "seed": number}),
    }
    messages = [{"role": "user", "content": f"Feed the animals {number}"}]
    schema = {"name": "zoo", "schema": ZOO, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    match number % 3:
        case 0:
            return CHAT, {**fields, "messages": messages, "response_format": form}
        case 1:
            asked = {"messages": messages, "tools": [TOOL], "tool_choice": "required"}
            return CHAT, {**fields, **asked, "parallel_tool_calls": False}
        case _:
            asked = {"prompt": "Words: ", "structured_outputs": {"regex": PATTERN}}
            return COMPLETIONS, {**fields, **asked}


def check_form(number: int, told: list[Any]) -> None:
    """Checks that the answer obeys the constraint of `constrained`."""
    parts = told[1]
    assert parts[-1]["finish_reason"] == ("tool_calls" if number % 3 == 1 else "stop")
    if number % 3 == 2:
        assert re.fullmatch(PATTERN, "".join(part["text"] for part in parts))
        return
    deltas = [part["delta"] for part in parts]
    if number % 3 == 0:
        text = "".join(delta.get("content") or "" for delta in deltas)
        jsonschema.validate(json.loads(text), ZOO)
        return
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = "".join(call.get("arguments", "") for call in calls)
    jsonschema.validate(json.loads(arguments), CALL)


def what_was_said(lines: list[str]) -> list[Any]:
    """A stream's `[(prompt tokens, completion tokens), choices of completion 0, of 1, ...]`.

    The choices are those of the chunks, in order. Ids, times and the count of cached
    tokens are left out, because they differ between two runs.
    """
    assert lines[-1] == "data: [DONE]", lines[-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not any("error" in event for event in events), events[-1]
    for event in events:
        for choice in event["choices"]:
            for call in choice.get("delta", {}).get("tool_calls", ()):
                call.pop("id", None)  # each answer has new ids
    usage = events[-1]["usage"]
    told: list[Any] = [(usage["prompt_tokens"], usage["completion_tokens"])]
    # Chunks of several completions arrive in any order.
    for index in range(max(c["index"] for e in events for c in e["choices"]) + 1):
        told.append([c for e in events for c in e["choices"] if c["index"] == index])
    return told


class Streams:
    """Runs all streams at once, and keeps the lines of each."""

    def __init__(self, url: str, requests: list[tuple[str, dict[str, Any]]]) -> None:
        self._url = url
        self._requests = requests
        self.lines: list[list[str]] = [[] for _ in requests]

    @property
    def num_lines(self) -> int:
        return sum(map(len, self.lines))

    async def run(self) -> list[list[Any]]:
        limits = httpx.Limits(max_connections=len(self.lines))
        async with httpx.AsyncClient(base_url=self._url, timeout=250, limits=limits) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(len(self.lines))))
        return [what_was_said(lines) for lines in self.lines]

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        path, request = self._requests[number]
        async with client.stream("POST", path, json=request) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line:
                    self.lines[number].append(line)


async def until(condition: Callable[[], bool], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def run_streams(
    server: ServerProcess, requests: list[tuple[str, dict[str, Any]]], kill_at: int | None = None
) -> list[list[Any]]:
    """What all streams said.

    Args:
        server: the server.
        requests: path and body of each stream.
        kill_at: the engine is killed when so many lines have come; None = it is not killed.
    """

    async def run() -> list[list[Any]]:
        streams = Streams(server.url, requests)
        task = asyncio.create_task(streams.run())
        if kill_at is not None:
            await until(lambda: streams.num_lines >= kill_at or task.done())
            assert not task.done(), "the streams ended before the engine was killed"
            server.engine.kill()
        return await task

    return asyncio.run(run())


def engine_of(server: ServerProcess) -> psutil.Process | None:
    """The engine process, or None while it restarts."""
    try:
        return server.engine
    except (ValueError, psutil.Error):
        return None


def test_many_streams_survive_three_kills(server: ServerProcess) -> None:
    requests = [(COMPLETIONS, body(number)) for number in range(NUM_STREAMS)]

    async def undisturbed() -> list[list[Any]]:
        return await Streams(server.url, requests).run()

    async def killed() -> list[list[Any]]:
        streams = Streams(server.url, requests)
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
        await kill_at(20)  # at once again: this kills the next engine during its start
        # In the middle. Drafts can end a stream soon afterwards, before this task runs again.
        await kill_at(NUM_STREAMS * 30)
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
    assert HTTP.get(f"{server.url}/ready").json() == {"status": "ready"}


def test_answers_name_what_their_bits_depend_on(server: ServerProcess) -> None:
    version = HTTP.get(f"{server.url}/version").json()
    fingerprint = version["system_fingerprint"]
    assert version["determinism"] == "bitwise"
    assert re.fullmatch(f"fp-bitwise-{version['isa']}-[0-9a-f]{{12}}", fingerprint)
    request = {"prompt": "Hello", "max_tokens": 3, "temperature": 0}
    whole = HTTP.post(f"{server.url}/v1/completions", json=request, timeout=250).json()
    assert whole["system_fingerprint"] == fingerprint
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    stream = HTTP.post(f"{server.url}/v1/completions", json=request, timeout=250)
    *chunks, done = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    assert done == "[DONE]"
    assert {json.loads(chunk)["system_fingerprint"] for chunk in chunks} == {fingerprint}
    metrics = HTTP.get(f"{server.url}/metrics").text
    (line,) = (
        each for each in metrics.splitlines() if each.startswith("ostinato_determinism_info{")
    )
    assert f'fingerprint="{fingerprint}"' in line


def test_answers_with_a_form_keep_it_over_a_kill(server: ServerProcess) -> None:
    """The requests have schemas, patterns and required tool calls, greedy and with a seed."""
    requests = [constrained(number) for number in range(6)]

    expected = run_streams(server, requests)
    for number, told in enumerate(expected):
        check_form(number, told)
    num_lines = sum(len(told[1]) for told in expected)
    assert run_streams(server, requests, kill_at=num_lines // 3) == expected


def test_a_drain_waits_for_an_engine_that_is_started_again(server: ServerProcess) -> None:
    """This test ends the server, so it is the last test of this module."""
    request = {**body(0), "max_tokens": 100}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=request, timeout=250) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.engine.kill()
        server.signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 100
    assert server.wait() == 0
