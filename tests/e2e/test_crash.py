"""Streams through a real server whose engine is killed.

Each stream has the same events as without the kill. The requests are of seven plain kinds and of
three kinds with a constraint.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.e2e.json_requests import CHAT, COMPLETIONS
from tests.e2e.server_process import HTTP, ServerProcess
from tests.e2e.streams import ZOO, Streams, body, run_streams
from tests.waiting import PATIENCE_S, repeat_if_late, wait_until

NUM_STREAMS = 28  # four of each kind


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
        "server.max_restarts=100",
        "server.drain_timeout_s=200",
    ) as process:
        yield process


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


def kill_starting_engine(server: ServerProcess) -> bool:
    """Kill the engine while it starts. Returns False, and kills none, if it serves already."""
    wait_until(server.has_engine)
    engine = server.engine
    engine.suspend()
    if HTTP.get(f"{server.url}/ready").status_code == 200:
        engine.resume()
        return False
    engine.kill()
    engine.wait(PATIENCE_S)
    return True


def test_many_streams_survive_three_kills(server: ServerProcess) -> None:
    requests = [(COMPLETIONS, body(number)) for number in range(NUM_STREAMS)]
    expected = asyncio.run(Streams(server.url, requests).run())
    assert sum(tokens for (_, tokens), *_ in expected) > NUM_STREAMS * 100

    def attempt() -> float | None:
        before = server.num_restarts()
        kills: list[bool] = []

        def on_line(num_lines: int) -> None:
            if num_lines == 20:  # prompts are still computed, some streams wait
                kills.extend((server.kill_busy_engine(), kill_starting_engine(server)))
            elif num_lines == NUM_STREAMS * 30:  # in the middle
                kills.append(server.kill_busy_engine())

        assert asyncio.run(Streams(server.url, requests, on_line).run()) == expected
        return before if kills == [True] * 3 else None

    before = repeat_if_late(attempt)
    wait_until(lambda: server.num_restarts() == before + 3)
    assert server.metrics()['ostinato_engine_restarts_total{reason="killed"}'] >= 2
    wait_until(lambda: server.metrics()["ostinato_kv_cache_usage_ratio"] == 0)
    wait_until(lambda: HTTP.get(f"{server.url}/ready").json() == {"status": "ready"})


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

    def attempt() -> list[str] | None:
        with HTTP.stream("POST", server.url + COMPLETIONS, json=request) as reply:
            lines = reply.iter_lines()
            next(lines)
            if not server.kill_busy_engine():
                return None
            server.signal(signal.SIGTERM)
            return [line for line in lines if line]

    events = repeat_if_late(attempt)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 100
    assert server.wait() == 0
