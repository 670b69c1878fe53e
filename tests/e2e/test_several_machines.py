"""Servers with an engine on another machine: the network is cut, or a process is killed.

tests/runtime/nodes/test_nodes.py tests the connection without a second network or a server.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.json_requests import COMPLETIONS
from tests.e2e.machines import Namespace, RankProcess, join_command, lives
from tests.e2e.server_process import HTTP, ServerProcess
from tests.e2e.streams import Streams, body
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class SpreadServer:
    """A server with two engines on two machines, or with one engine whose ranks are on both."""

    def __init__(
        self, host: str, *overrides: str, prefix: list[str] | None = None, num_engines: int = 2
    ) -> None:
        self.server = ServerProcess(
            *(f"parallel.data={num_engines}", "parallel.nodes=2", f"parallel.host={host}"),
            *("server.restart_backoff_s=0.01", "server.max_restarts=50", *overrides),
        )
        self.words = join_command(self.server.wait_for_line("run rank tcp"))
        self.rank = RankProcess(self.words, prefix or [])

    def __enter__(self) -> SpreadServer:
        self.server.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.__exit__()
        self.rank.__exit__()

    @property
    def engines(self) -> list[dict[str, Any]]:
        """The engines. The list is empty while the only engine of a server is down."""
        return HTTP.get(f"{self.server.url}/health").json().get("engines", [])

    def all_serve(self) -> bool:
        return all(one["state"] == "serving" for one in self.engines)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    one = Namespace()
    yield one
    one.close()


def test_streams_go_on_when_the_cable_of_a_machine_is_pulled(namespace: Namespace) -> None:
    with SpreadServer(namespace.host, "parallel.tensor=2", prefix=namespace.prefix) as spread:
        streams = [(COMPLETIONS, body(number)) for number in range(20)]

        def run(on_half: Callable[[], None] = lambda: None) -> list[list[Any]]:
            async def scenario() -> list[list[Any]]:
                running = Streams(spread.server.url, streams)
                task = asyncio.create_task(running.run())
                while running.num_lines < 20 * 20:
                    await asyncio.sleep(0.01)
                on_half()
                return await task

            return asyncio.run(scenario())

        expected = run()
        before = spread.engines
        assert before[1]["node"] == os.uname().nodename
        assert [one["rank"] for one in before[1]["ranks"]] == [0, 1]
        assert run(lambda: namespace.plug(is_in=False)) == expected
        wait_until(lambda: spread.engines[1]["state"] == "restarting")
        assert "was lost" in spread.engines[1]["reason"]
        wait_until(lambda: not any(lives(one["pid"]) for one in before[1]["ranks"]))
        namespace.plug(is_in=True)
        wait_until(spread.all_serve)
        assert run() == expected
        spread.server.signal(signal.SIGTERM)
        assert spread.server.wait() == 0
        assert spread.rank.wait() == 0
        assert "has ended" in "".join(spread.rank.output)


@pytest.mark.parametrize("division", ["parallel.tensor=2", "parallel.pipeline=2"])
def test_streams_of_an_engine_on_two_machines_wait_for_the_cable_that_was_pulled(
    namespace: Namespace, division: str
) -> None:
    settings = (division, "parallel.rank_timeout_s=2")
    prefix = namespace.prefix
    with SpreadServer(namespace.host, *settings, prefix=prefix, num_engines=1) as spread:
        streams = [(COMPLETIONS, body(number)) for number in range(8)]

        async def scenario(*, is_pulled: bool) -> list[list[Any]]:
            running = Streams(spread.server.url, streams)
            task = asyncio.create_task(running.run())
            while running.num_lines < 8 * 10:
                await asyncio.sleep(0.01)
            if is_pulled:
                restarts = spread.engines[0]["num_restarts"]
                namespace.plug(is_in=False)
                while (now := spread.engines) and now[0]["num_restarts"] == restarts:
                    await asyncio.sleep(0.1)
                namespace.plug(is_in=True)
            return await task

        expected = asyncio.run(scenario(is_pulled=False))
        (before,) = spread.engines
        assert [one["machine"] for one in before["ranks"]] == [0, 1]
        assert asyncio.run(scenario(is_pulled=True)) == expected
        wait_until(lambda: not any(lives(one["pid"]) for one in before["ranks"]))


def test_a_killed_rank_of_an_engine_elsewhere_ends_its_group_which_starts_again() -> None:
    with SpreadServer("127.0.0.1", "parallel.tensor=2") as spread:
        before = spread.engines[1]["ranks"]
        os.kill(before[1]["pid"], signal.SIGKILL)
        wait_until(lambda: not any(lives(one["pid"]) for one in before))
        wait_until(lambda: spread.engines[1]["num_restarts"] == 1)
        wait_until(spread.all_serve)
        assert spread.engines[0]["num_restarts"] == 0
        assert any("was killed by SIGKILL" in line for line in spread.rank.output)


def test_nothing_is_left_on_the_other_machine_of_a_killed_server() -> None:
    with SpreadServer("127.0.0.1", "parallel.tensor=2") as spread:
        pids = [rank["pid"] for one in spread.engines for rank in one["ranks"]]
        assert len(pids) == 4
        spread.server.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(lives, pids)))
        assert not psutil.Process(spread.rank.process.pid).children(recursive=True)


@pytest.mark.timeout(7200)
def test_many_servers_that_start_at_the_same_time_take_different_ports() -> None:
    for _ in range(20):
        kinds = (["parallel.tensor=2"], ["parallel.data=2"], [])
        servers = [ServerProcess(*one) for one in kinds]
        begun: list[ServerProcess | SpreadServer] = [*servers]
        try:
            spread = SpreadServer("127.0.0.1")
            begun.append(spread)
            for one in begun:
                one.__enter__()
            urls = {one.url for one in [*servers, spread.server]}
            assert len(urls) == 4
            for url in urls:
                assert HTTP.get(f"{url}/health").status_code == 200
        finally:
            for one in begun:
                one.__exit__()
