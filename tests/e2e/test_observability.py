"""A real server: the timeline of a request, the state, the flight recorder after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import repeat_if_late, wait_until


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flight")


@pytest.fixture(scope="module")
def server(dumps: Path) -> Iterator[ServerProcess]:
    options = (
        f"server.flight_recorder_dir={dumps}",
        "server.log_format=json",
        "scheduler.max_num_batched_tokens=64",
    )
    with ServerProcess(*options) as process:
        yield process


def complete(server: ServerProcess, **fields: object) -> dict:
    body = {"prompt": "Once upon a time " * 40, "max_tokens": 5, "ignore_eos": True, **fields}
    headers = {"x-trace": "1"}
    response = HTTP.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_timeline_of_a_request(server: ServerProcess) -> None:
    reply = complete(server, cache_salt="timeline")
    (one,) = reply["trace"]["completions"]
    chunks = [event for event in one["events"] if event["event"] == "prefill"]
    assert len(chunks) > 1  # at most 64 tokens a step
    assert chunks[0]["start"] == 0
    assert sum(chunk["tokens"] for chunk in chunks) == reply["usage"]["prompt_tokens"]
    assert [chunk["start"] + chunk["tokens"] for chunk in chunks[:-1]] == [
        chunk["start"] for chunk in chunks[1:]
    ]
    times = [event["at_ms"] for event in one["events"]]
    assert times == sorted(times)
    assert [event["event"] for event in one["events"][-2:]] == ["first_token", "finished"]
    assert len(one["output_ms"]) == 5
    assert 0 <= one["queue_ms"] <= one["first_token_ms"] <= reply["trace"]["total_ms"]


def test_a_log_line_as_json(server: ServerProcess) -> None:
    complete(server, request_id="mine")
    line = json.loads(server.wait_for_line("cmpl-mine"))
    assert (line["outcome"], line["output"], line["finish"]) == ("done", 5, "length")
    assert line["process"] == "api"
    assert "Once" not in json.dumps(line)


def test_the_state_and_the_last_steps(server: ServerProcess) -> None:
    complete(server)
    state = HTTP.get(f"{server.url}/debug/state").json()
    assert state["problem"] is None
    assert state["engine"]["blocks"]["counts"][1] > 0  # cached blocks
    assert state["engine"]["steps"][-1]["kind"] == "eager"
    assert set(state["use"]["processes"]) == {"api", "engine"}
    steps = HTTP.get(f"{server.url}/debug/flight").json()["steps"]
    assert {step["state"] for step in steps} == {"done"}
    assert steps[-1]["step"] == steps[0]["step"] + len(steps) - 1


def test_the_last_steps_of_a_killed_engine_are_kept(server: ServerProcess, dumps: Path) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}

    def attempt() -> list[str] | None:
        with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            return list(lines) if server.kill_busy_engine() else None

    assert "data: [DONE]" in repeat_if_late(attempt)  # the restarted engine completes the stream
    wait_until(lambda: list(dumps.glob("flight-*.json")), "no dump was written")
    files = list(dumps.glob("flight-*.json"))
    steps = json.loads(files[0].read_text())["steps"]
    assert steps
    assert steps[-1]["entries"][0][0].startswith("cmpl-")
    assert files[0].name in server.wait_for_line("flight recorder")
    killed = 'ostinato_engine_restarts_total{reason="killed"}'
    wait_until(lambda: server.metrics()[killed] == 1)
