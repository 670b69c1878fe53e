"""A real server with two engines: kills, hangs, drains, reloads, and its reports of them.

The disturbed streams have the same events as undisturbed ones.
tests/runtime/replicas/test_replicas.py tests the choice of the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.json_requests import COMPLETIONS
from tests.e2e.server_process import HTTP, ServerProcess
from tests.e2e.streams import Streams, body
from tests.waiting import PATIENCE_S, until

NUM_STREAMS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        "parallel.data=2",
        "server.admin=true",
        "server.max_restarts=50",
        "server.restart_backoff_s=0.01",
        "server.hang_timeout_s=5",
    ) as process:
        yield process


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[list[Any]]:
    """The events of undisturbed streams."""
    return asyncio.run(streams(server).run())


def streams(server: ServerProcess) -> Streams:
    return Streams(server.url, [(COMPLETIONS, body(number)) for number in range(NUM_STREAMS)])


def engines(server: ServerProcess) -> list[dict[str, Any]]:
    return HTTP.get(f"{server.url}/health").json()["engines"]


def pids(server: ServerProcess) -> list[int]:
    return [one["pid"] for one in engines(server)]


def restarts(server: ServerProcess) -> dict[tuple[str, str], float]:
    """(engine, reason) -> restarts."""
    name = "ostinato_engine_restarts_total"
    reasons = ("killed", "hang", "reload")
    metrics = server.metrics()
    return {
        (str(engine), reason): metrics[f'{name}{{engine="{engine}"}}{{reason="{reason}"}}']
        for engine in range(2)
        for reason in reasons
    }


async def all_serve(server: ServerProcess) -> None:
    await until(lambda: all(one["state"] == "serving" for one in engines(server)))


def post(server: ServerProcess, path: str) -> httpx.Response:
    return HTTP.post(f"{server.url}{path}", timeout=250)


def test_streams_go_on_in_the_other_engine(
    server: ServerProcess, expected: list[list[Any]]
) -> None:
    async def scenario() -> None:
        running = streams(server)
        task = asyncio.create_task(running.run())
        await until(lambda: running.num_lines >= NUM_STREAMS * 20)
        before = [one["num_unfinished"] for one in engines(server)]
        assert min(before) > 0, "the router left an engine without work"
        os.kill(pids(server)[0], signal.SIGKILL)
        assert await task == expected
        await all_serve(server)

    asyncio.run(scenario())
    counts = restarts(server)
    assert (counts["0", "killed"], counts["1", "killed"]) == (1, 0)


def test_a_drain_and_a_reload_lose_no_event(
    server: ServerProcess, expected: list[list[Any]]
) -> None:
    old = pids(server)

    async def scenario() -> None:
        running = streams(server)
        task = asyncio.create_task(running.run())
        await until(lambda: running.num_lines >= NUM_STREAMS * 5)
        drained = await asyncio.to_thread(post, server, "/engines/1/drain?timeout_s=0")
        assert drained.json()["num_moved"] > 0
        assert [one["state"] for one in engines(server)] == ["serving", "drained"]
        assert engines(server)[1]["num_unfinished"] == 0
        refused = post(server, "/engines/0/drain")
        assert refused.status_code == 409
        assert "no other engine takes requests" in refused.json()["error"]["message"]
        assert post(server, "/engines/1/resume").status_code == 200
        assert post(server, "/engines/2/resume").status_code == 404
        assert post(server, "/engines/0/drain?timeout_s=-1").status_code == 400
        reloaded = await asyncio.to_thread(post, server, "/reload_weights?timeout_s=0")
        assert reloaded.status_code == 200, reloaded.text
        assert await task == expected

    asyncio.run(scenario())
    assert set(old).isdisjoint(pids(server))
    assert [one["state"] for one in engines(server)] == ["serving", "serving"]


def test_a_frozen_engine_is_killed_and_its_streams_go_on(
    server: ServerProcess, expected: list[list[Any]]
) -> None:
    async def scenario() -> None:
        running = streams(server)
        task = asyncio.create_task(running.run())
        await until(lambda: running.num_lines >= NUM_STREAMS * 5)
        os.kill(pids(server)[1], signal.SIGSTOP)
        assert await task == expected
        await all_serve(server)

    before = restarts(server)
    asyncio.run(scenario())
    assert restarts(server)["1", "hang"] >= before["1", "hang"] + 1


@pytest.mark.slow
def test_streams_survive_the_death_of_both_engines(
    server: ServerProcess, expected: list[list[Any]]
) -> None:
    async def scenario() -> None:
        running = streams(server)
        task = asyncio.create_task(running.run())
        await until(lambda: running.num_lines >= NUM_STREAMS * 20)
        for pid in pids(server):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: HTTP.get(f"{server.url}/ready").json()["status"] == "restarting")
        assert await task == expected
        await all_serve(server)

    before = restarts(server)
    asyncio.run(scenario())
    after = restarts(server)
    for engine in ("0", "1"):
        assert after[engine, "killed"] == before[engine, "killed"] + 1


def test_metrics_are_given_for_each_engine_and_summed_under_vllms_names(
    server: ServerProcess, expected: list[list[Any]]
) -> None:
    metrics = server.metrics()
    name = "ostinato_kv_cache_blocks"
    each = [metrics[f'{name}{{engine="{number}"}}'] for number in range(2)]
    assert each[0] == each[1] > 0
    (cache,) = [name for name in metrics if name.startswith("vllm:cache_config_info")]
    assert f'{{num_gpu_blocks="{int(sum(each))}"}}' in cache
    assert metrics['ostinato_process_resident_memory_bytes{process="engine 1"}'] > 1e7
    state = HTTP.get(f"{server.url}/debug/state?engine=1").json()
    assert state["engine_pid"] == pids(server)[1]
    assert [one["status"]["state"] for one in state["engines"]] == ["serving", "serving"]
    assert HTTP.get(f"{server.url}/debug/state?engine=2").status_code == 400


def test_no_engine_outlives_the_server(server: ServerProcess) -> None:
    """This test ends the server, so it is the last test of this module."""
    processes = [psutil.Process(pid) for pid in pids(server)]
    server.signal(signal.SIGKILL)
    server.wait()
    gone, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert (len(gone), alive) == (2, [])
