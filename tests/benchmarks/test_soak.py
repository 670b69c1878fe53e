"""A soak test of a few seconds, and the requests that the soak test sends."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from ostinato.benchmarks.soak.__main__ import run_soak
from ostinato.benchmarks.soak.hostile.hostile_requests import (
    hostile_constraint,
    hostile_template,
    huge_number,
)
from ostinato.benchmarks.soak.libraries.client_libraries import command
from ostinato.benchmarks.soak.request_phases import GoodRequest, HeavyAct, slowest
from ostinato.benchmarks.soak.soak_run import Observations, SoakPlan
from ostinato.benchmarks.soak.traffic import OPTIONS, Traffic
from ostinato.runtime.types.params import SamplingParams

# These are not in OPTIONS: `logprobs` has other values in chat than in completions, and
# `max_tokens` is always set.
OTHER_FIELDS = {"max_tokens", "logprobs"}


def test_a_client_sends_the_same_again() -> None:
    def requests(seed: int, client: int) -> list[object]:
        traffic = Traffic(seed, client, range(500), 256)
        return [traffic.next() for _ in range(50)]

    assert requests(1, 2) == requests(1, 2)
    assert requests(1, 2) != requests(2, 2)
    assert requests(1, 2) != requests(1, 3)


def test_every_sampling_parameter_is_sent() -> None:
    searches = {"best_of", "early_stopping", "length_penalty", "use_beam_search"}  # not in the soak
    reasoning = {"thinking"}  # only for models that reason
    reasoning |= {"transcript"}  # only for models that transcribe
    fields = set(SamplingParams.__struct_fields__) - searches - reasoning
    assert fields - OTHER_FIELDS - OPTIONS.keys() == set()
    traffic = Traffic(0, 0, range(500), 256)
    sent: Counter[str] = Counter()
    for _ in range(1000):
        sent.update(traffic.next().body.keys())
    assert {name for name in (*OPTIONS, *OTHER_FIELDS) if sent[name] < 20} == set()


def test_compared_requests_are_repeatable() -> None:
    traffic = Traffic(4, 0, range(500), 256)
    compared = [one for one in (traffic.next() for _ in range(400)) if one.is_compared]
    assert len(compared) > 40
    for exchange in compared:
        assert "seed" in exchange.body
        assert "speculation" not in exchange.body
        assert not exchange.body["stream"]


def test_prompts_leave_room_for_the_answer() -> None:
    traffic = Traffic(3, 0, range(500), 256)
    lengths, totals = [], []
    for _ in range(500):
        body = traffic.next().body
        prompt = body.get("prompt")
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            lengths.append(len(prompt))
            totals.append(len(prompt) + body["max_tokens"])
    assert min(lengths) <= 3
    assert max(lengths) >= 100
    assert max(totals) <= 256


@pytest.mark.slow
def test_a_soak_of_seconds() -> None:
    """The server has compiled and captured steps. Most servers of `tests/e2e` run in eager mode."""
    plan = SoakPlan(
        seconds=5.0,
        seed=7,
        num_clients=4,
        num_hostile=24,
        hostile_rate=15.0,
        heavy_rate=0.5,
        stall_cases="^(a header of 40 MB|20,000 pipelined requests|100,000 stop strings)$",
        libraries=("openai",),
        overrides=("device.threads=1",),
    )
    record = run_soak(plan)
    assert set(record["checks"].values()) == {True}, {
        name: record[name] for name in ("checks", "late_compiles", "statuses", "wrong", "errors")
    }
    assert record["statuses"]["200"] > 0
    assert len(record["hostile"]["acts"]) >= 6
    groups = {"hard constraints", "hard templates", "many parts", "large HTTP"}
    assert record["hostile"]["groups"].keys() == groups | {"broken HTTP", "huge numbers"}
    assert record["libraries"]["openai"]["calls"] > 0
    assert 0 < len(record["slowest"]) <= 20  # a slow machine answers fewer in five seconds
    for row in record["slowest"]:
        assert row["phases"][row["phase"]] == max(
            seconds
            for name, seconds in row["phases"].items()
            if name not in ("grammar", "preemptions")
        )
    assert any("first token" in row["phases"] for row in record["slowest"])
    assert record["health"]["storm"]["polls"] > 0
    assert record["engine"]["steps_total kind=captured"] > 0
    assert record["drafts"]["draft_tokens"] >= record["drafts"]["accepted_tokens"]
    assert record["drafts"]["equal_answers"] > 0
    assert record["drafts"]["different_answers"] == 0
    assert record["engine"]["steps_total kind=compiled"] > 0
    assert record["memory_mib"][0].keys() == {"at", "api", "engine"}


def test_restarts_are_the_spans_in_which_health_says_so() -> None:
    def poll(at: float, status: int) -> tuple[float, float, int]:
        return at, 0.01, status

    polls = [poll(1.0, 200), poll(2.0, 200), poll(2.1, 503), poll(3.0, 503), poll(3.5, 200)]
    seen = Observations(polls=[*polls, poll(9.0, 200)], kills=[1.9, 8.0])
    assert seen.restarts == [(1.9, 3.51), (8.0, 8.0)]


def test_the_phases_of_slow_requests_come_from_the_log() -> None:
    lines = [
        "2026-11-21 17:38:52 INFO cmpl-good-1-2 done prompt=61 preparation=40ms queue=240ms ttft=1240ms"
        " e2e=1300ms finish=stop preemptions=2 endpoint=/v1/completions",
        "2026-11-21 17:38:53 INFO resp_17 done prompt=9 preparation=2010ms queue=2012ms ttft=2020ms"
        " e2e=2100ms preemptions=0 grammar=2000ms x_request_id=openai-7",
        "2026-11-21 17:38:53 INFO ignored disconnected phase=preparation",
    ]
    requests = [
        GoodRequest("good-1-2", "good", "completions", 103.0, 1.5),
        GoodRequest("openai-7", "openai", "response", 110.0, 2.2),
        GoodRequest("gone", "good", "completions", 120.0, 1.0),
        GoodRequest("quick", "good", "completions", 120.0, 0.1),
    ]
    acts = [HeavyAct("128 beams", 99.0, 4.5), HeavyAct("128 beams", 104.0, 9.0)]
    acts.append(HeavyAct("a schema", 90.0, 100.0))
    rows = slowest(requests, lines, 100.0, [(104.0, 105.0)], acts, count=2)
    assert [row["client"] for row in rows] == ["openai", "good", "good"]
    assert [row["phase"] for row in rows] == ["preparation", "first token", "outside"]
    assert [row["in_restart"] for row in rows] == [False, True, False]
    assert rows[0]["phases"]["grammar"] == 2.0
    assert rows[1] == {
        "client": "good",
        "kind": "completions",
        "at": 3.0,
        "seconds": 1.5,
        "in_restart": True,
        "phase": "first token",
        "phases": {
            "preparation": 0.04,
            "queue": 0.2,
            "first token": 1.0,
            "further tokens": 0.06,
            "preemptions": 2.0,
            "outside": 0.2,
        },
        "beside": {"a schema": 1.5, "128 beams": 1.0},
    }


def test_a_library_that_is_not_there_is_skipped_with_the_reason(tmp_path: Path) -> None:
    found = command("AI SDK", "http://127.0.0.1:1", 1.0, None)
    assert isinstance(found, str)
    assert found.startswith("there is no ")
    python = command("openai", "http://127.0.0.1:1", 1.0, tmp_path)
    assert python[0] == str(tmp_path / "venv-openai" / "bin" / "python")


def test_hostile_requests_are_http() -> None:
    numbers = random.Random(0)
    makers = (huge_number, hostile_constraint, hostile_template)
    for request in [make(numbers) for make in makers for _ in range(99)]:
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/")
        assert f"Content-Length: {len(body)}".encode() in head
        assert body.startswith(b"{")
        assert body.endswith(b"}")
