"""Engines whose ranks are on several "machines".

In this file machines are simulated: the first one is this process with its children, and all others
are `run rank` processes that connect over 127.0.0.1. The tokens must equal those of an engine
whose ranks are all on one machine. tests/runtime/nodes/test_nodes.py tests machines that run whole
engines.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import psutil
import pytest

from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.types.engine_info import RankInfo
from tests.runtime.nodes.test_nodes import Machine, lives
from tests.runtime.ranks.test_rank_deaths import ranks_of, together
from tests.runtime.tiny import tiny_config
from tests.waiting import until

# A dead engine starts again almost at once, at most 50 times.
RESTARTS = ("server.restart_backoff_s=0.01", "server.max_restarts=50")


class Site:
    """A client whose engine has ranks on several machines, and these machines."""

    def __init__(self, *overrides: str, num_machines: int = 2, **variables: str) -> None:
        """`variables` are in the environment of the other machines."""
        nodes = (f"parallel.nodes={num_machines}", "parallel.host=127.0.0.1")
        self.client = EngineClient(tiny_config(*nodes, *RESTARTS, *overrides))
        self.machines: list[Machine] = []
        self._num_others = num_machines - 1
        self._variables = variables

    async def start(self) -> None:
        await self.client.spawn()
        hub = self.client._hosts._hub
        assert hub is not None
        for _ in range(self._num_others):
            machine = Machine(hub.address, hub.token, **self._variables)
            self.machines.append(machine)
            await machine.start()
        await self.client.wait_until_ready()

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        return ranks_of(self.client)

    async def close(self) -> None:
        await self.client.close()
        for machine in self.machines:
            assert machine.process is not None
            assert await asyncio.wait_for(machine.process.wait(), 240) == 0
            assert os.listdir(machine.directory) == []
            os.rmdir(machine.directory)


async def tokens_on_one_machine(*overrides: str) -> list[list[int]]:
    client = EngineClient(tiny_config(*overrides))
    try:
        await client.start()
        return await together(client)
    finally:
        await client.close()


Scenario = Callable[[Site], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs scenarios with one site. Before and after each, its engine is alive and idle."""

    async def run_one(scenario: Scenario) -> None:
        await asyncio.wait_for(scenario(site), 250)
        await until(lambda: site.client.is_alive)
        await until(lambda: site.client.num_unfinished == 0)

    with asyncio.Runner() as runner:
        # On a busy computer a rank may do nothing for longer than the default limit of 1 s.
        site = Site("parallel.tensor=2", "parallel.rank_timeout_s=100")
        runner.run(site.start())
        yield lambda scenario: runner.run(run_one(scenario))
        runner.run(site.close())


async def disturb(site: Site, rank: int, number: signal.Signals) -> None:
    """Send a signal to a rank while streams run, and check the streams."""
    client = site.client
    expected = await together(client)
    pids = [one.pid for one in site.ranks]
    begun: set[str] = set()
    task = asyncio.create_task(together(client, begun))
    await until(lambda: len(begun) == 6)
    os.kill(pids[rank], number)
    await until(lambda: not client.is_alive)
    assert await task == expected
    await until(lambda: not any(map(lives, pids)))
    assert not {one.pid for one in site.ranks} & set(pids)


def test_ranks_on_two_machines_give_the_tokens_of_ranks_on_one(run: Run) -> None:
    async def scenario(site: Site) -> None:
        assert [one.machine for one in site.ranks] == [0, 1]
        machine = psutil.Process(site.machines[0].pid)
        assert site.ranks[1].pid in [one.pid for one in machine.children(recursive=True)]
        assert site.client.replicas[0].status.local_rank_pids == []
        assert await together(site.client) == await tokens_on_one_machine("parallel.tensor=2")

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_streams_go_on_after_the_kill_of_a_rank(run: Run, rank: int) -> None:
    async def scenario(site: Site) -> None:
        before = site.client.restarts.get("killed", 0)
        await disturb(site, rank, signal.SIGKILL)
        assert site.client.restarts["killed"] == before + 1

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["bridge_main", "rank_host_main", "rank"])
def test_streams_go_on_after_the_kill_of_a_process_between_ranks(run: Run, which: str) -> None:
    async def scenario(site: Site) -> None:
        client = site.client
        expected = await together(client)
        pids = [one.pid for one in site.ranks]
        near = psutil.Process(os.getpid()).children(recursive=True)
        [victim] = [
            one
            for one in near
            if (f"{which}" in " ".join(one.cmdline()) and which != "rank")
            or (which == "rank" and one.pid == site.machines[0].pid)
        ]
        begun: set[str] = set()
        task = asyncio.create_task(together(client, begun))
        await until(lambda: len(begun) == 6)
        victim.kill()
        await until(lambda: not client.is_alive)
        await until(lambda: not any(map(lives, pids)))
        if which == "rank":
            assert site.machines[0].process is not None
            await site.machines[0].process.wait()
            await until(lambda: not os.listdir(site.machines[0].directory))
            await site.machines[0].start()
        assert await task == expected

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.pipeline=2",),
        ("parallel.tensor=2", "parallel.pipeline=2"),
        ("parallel.tensor=4", "model.dtype=bfloat16"),
        ("parallel.tensor=2", "parallel.exchange=gloo"),
        ("parallel.tensor=2", "parallel.pipeline=2", "parallel.exchange=gloo"),
    ],
)
def test_stages_and_more_ranks_on_two_machines(overrides: tuple[str, ...]) -> None:
    """The tokens must equal those of one machine whose ranks exchange values through shared memory.

    With gloo, ranks connect to each other and stages send hidden states with the code that GPUs use
    with NCCL.
    """

    async def scenario() -> None:
        expected = await tokens_on_one_machine(
            *(one for one in overrides if one != "parallel.exchange=gloo")
        )
        site = Site(*overrides, "parallel.rank_timeout_s=100")
        try:
            await site.start()
            assert {one.machine for one in site.ranks} == {0, 1}
            assert await together(site.client) == expected
            await disturb(site, len(site.ranks) - 1, signal.SIGKILL)
        finally:
            await site.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_ranks_on_four_machines_exchange_their_parts_through_the_first() -> None:
    async def scenario() -> None:
        expected = await tokens_on_one_machine("parallel.tensor=4")
        site = Site("parallel.tensor=4", "parallel.rank_timeout_s=100", num_machines=4)
        try:
            await site.start()
            assert [one.machine for one in site.ranks] == [0, 1, 2, 3]
            assert await together(site.client) == expected
        finally:
            await site.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_groups_of_gloo_that_are_divided_among_machines_connect_through_the_bridge() -> None:
    """Each of the four machines has one rank.

    The two ranks of a stage form a tensor-parallel group, so each of the two groups is on two
    machines.
    """

    async def scenario() -> None:
        divided = ("parallel.tensor=2", "parallel.pipeline=2")
        expected = await tokens_on_one_machine(*divided)
        gloo = (*divided, "parallel.exchange=gloo", "parallel.rank_timeout_s=100")
        site = Site(*gloo, num_machines=4)
        try:
            await site.start()
            assert await together(site.client) == expected
            await disturb(site, 3, signal.SIGKILL)
        finally:
            await site.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_two_engines_on_four_machines() -> None:
    async def scenario() -> None:
        division = ("parallel.pipeline=2", "parallel.data=2", "parallel.router=least_load")
        expected = await tokens_on_one_machine("parallel.pipeline=2")
        site = Site(*division, "parallel.rank_timeout_s=100", num_machines=4)
        try:
            await site.start()
            first, second = site.client.replicas
            assert first.status.node is None
            assert second.status.node == os.uname().nodename
            assert await together(site.client) == expected
            begun: set[str] = set()
            task = asyncio.create_task(together(site.client, begun))
            await until(lambda: len(begun) == 6)
            os.kill(second.status.ranks[1].pid, signal.SIGKILL)
            await until(lambda: not second.is_alive)
            assert await task == expected
            await until(lambda: second.is_alive)
        finally:
            await site.close()

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "host"])
def test_a_stopped_rank_or_machine_ends_the_group_which_starts_again(victim: str) -> None:
    async def scenario() -> None:
        site = Site("parallel.tensor=2", "parallel.rank_timeout_s=8")
        try:
            await site.start()
            client = site.client
            expected = await together(client)
            pids = [one.pid for one in site.ranks]
            stopped = pids[1] if victim == "rank" else psutil.Process(pids[1]).ppid()
            begun: set[str] = set()
            task = asyncio.create_task(together(client, begun))
            await until(lambda: len(begun) == 6)
            restarts = client.replicas[0].status.num_restarts
            os.kill(stopped, signal.SIGSTOP)
            # The streams may have had their last step before the stop.
            late = asyncio.create_task(together(client))
            await until(lambda: client.replicas[0].status.num_restarts > restarts)
            if victim == "host" and lives(stopped):
                os.kill(stopped, signal.SIGCONT)
            assert await task == expected
            assert await late == expected
            await until(lambda: not any(map(lives, pids)))
        finally:
            await site.close()

    asyncio.run(scenario())
