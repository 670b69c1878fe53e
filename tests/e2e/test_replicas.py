"""A real server with two engines: kills, hangs, drains, reloads, and its reports of them.

The disturbed streams have the same events as undisturbed ones.
tests/runtime/replicas/test_replicas.py tests the choice of the engine.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.json_requests import COMPLETIONS
from tests.e2e.server_process import HTTP, ServerProcess
from tests.e2e.streams import Streams, body
from tests.waiting import PATIENCE_S, repeat_if_late, wait_until

REQUESTS = [(COMPLETIONS, body(number)) for number in range(20)]


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
    return asyncio.run(Streams(server.url, REQUESTS).run())


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


def all_serve(server: ServerProcess) -> bool:
    return all(one["state"] == "serving" for one in engines(server))


def post(server: ServerProcess, path: str) -> httpx.Response:
    return HTTP.post(f"{server.url}{path}")


def disturbed(
    server: ServerProcess, num_lines: int, act: Callable[[list[psutil.Process]], object]
) -> list[list[Any]]:
    """The events of streams; `act` is called with the engines when so many lines have come.

    Meanwhile the engines are suspended, and each of them has requests. Engines that `act` removes
    from the list stay suspended.
    """

    def attempt() -> list[list[Any]] | None:
        is_done = False

        def on_line(number: int) -> None:
            nonlocal is_done
            if number != num_lines:
                return
            suspended = [psutil.Process(pid) for pid in pids(server)]
            for engine in suspended:
                engine.suspend()
            try:
                if min(one["num_unfinished"] for one in engines(server)) > 0:
                    act(suspended)
                    is_done = True
            finally:
                for engine in suspended:
                    with suppress(psutil.NoSuchProcess):  # `act` has killed it
                        engine.resume()

        said = asyncio.run(Streams(server.url, REQUESTS, on_line).run())
        return said if is_done else None

    return repeat_if_late(attempt)


def test_streams_go_on_in_the_other_engine(
    server: ServerProcess, expected: list[list[Any]]
) -> None:
    before = restarts(server)
    assert disturbed(server, 400, lambda engines: engines[0].kill()) == expected
    wait_until(lambda: all_serve(server))
    after = restarts(server)
    assert after["0", "killed"] == before["0", "killed"] + 1
    assert after["1", "killed"] == before["1", "killed"]


def test_a_drain_loses_no_event(server: ServerProcess, expected: list[list[Any]]) -> None:
    def drain(_: list[psutil.Process]) -> None:
        drained = post(server, "/engines/1/drain?timeout_s=0")
        assert drained.json()["num_moved"] > 0
        assert [one["state"] for one in engines(server)] == ["serving", "drained"]
        assert engines(server)[1]["num_unfinished"] == 0
        refused = post(server, "/engines/0/drain")
        assert refused.status_code == 409
        assert "no other engine takes requests" in refused.json()["error"]["message"]
        assert post(server, "/engines/1/resume").status_code == 200
        assert post(server, "/engines/2/resume").status_code == 404
        assert post(server, "/engines/0/drain?timeout_s=-1").status_code == 400

    assert disturbed(server, 100, drain) == expected
    assert all_serve(server)


def test_a_reload_loses_no_event(server: ServerProcess, expected: list[list[Any]]) -> None:
    old = pids(server)
    with ThreadPoolExecutor(1) as pool:
        reloads: list[Future[httpx.Response]] = []

        def reload(_: list[psutil.Process]) -> None:
            reloads.append(pool.submit(post, server, "/reload_weights?timeout_s=0"))

        assert disturbed(server, 100, reload) == expected
        (reloaded,) = (one.result() for one in reloads)
    assert reloaded.status_code == 200, reloaded.text
    assert set(old).isdisjoint(pids(server))
    assert all_serve(server)


def test_a_frozen_engine_is_killed_and_its_streams_go_on(
    server: ServerProcess, expected: list[list[Any]]
) -> None:
    before = restarts(server)
    assert disturbed(server, 100, lambda engines: engines.pop(1)) == expected
    wait_until(lambda: all_serve(server))
    assert restarts(server)["1", "hang"] >= before["1", "hang"] + 1


@pytest.mark.slow
def test_streams_survive_the_death_of_both_engines(
    server: ServerProcess, expected: list[list[Any]]
) -> None:
    def kill_both(engines: list[psutil.Process]) -> None:
        for engine in engines:
            engine.kill()
        wait_until(lambda: HTTP.get(f"{server.url}/ready").json()["status"] == "restarting")

    before = restarts(server)
    assert disturbed(server, 400, kill_both) == expected
    wait_until(lambda: all_serve(server))
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
