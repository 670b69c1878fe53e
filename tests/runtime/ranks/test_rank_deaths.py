"""Engines of two ranks, with real processes: death and stop of each rank while streams run.

The ranks form a tensor-parallel group, or they are the stages of a pipeline.

tests/e2e/test_ranks.py has the same for servers, with their logs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import psutil
import pytest

from ostinato import SamplingParams
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import StartupError
from ostinato.runtime.types.engine_info import RankInfo
from tests.runtime.tiny import tiny_config
from tests.waiting import until

LONG = SamplingParams(temperature=1.3, seed=7, max_tokens=150, ignore_eos=True)
PROMPTS = [[5 + index, 6, 7, 8] * (1 + index) for index in range(6)]
Scenario = Callable[[EngineClient], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture(scope="module", params=["parallel.tensor=2", "parallel.pipeline=2"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs scenarios with one client. Before and after each, its engine is alive and idle."""

    async def run_one(scenario: Scenario) -> None:
        await asyncio.wait_for(scenario(client), 250)
        await until(lambda: client.is_alive)
        await until(lambda: client.num_unfinished == client.stats.num_running == 0)

    overrides = (
        request.param,
        "server.restart_backoff_s=0.01",
        "server.max_restarts=50",
    )
    with asyncio.Runner() as runner:
        client = EngineClient(tiny_config(*overrides))
        try:
            runner.run(client.start())
            yield lambda scenario: runner.run(run_one(scenario))
        finally:
            runner.run(client.close())


async def tokens_of(
    client: EngineClient, name: str, prompt: list[int], begun: set[str] | None = None
) -> list[int]:
    """The tokens of one request. At the first token the request's name is added to `begun`."""
    tokens: list[int] = []
    async for output in client.generate(name, prompt, LONG):
        tokens += output.new_token_ids
        if begun is not None:
            begun.add(name)
    return tokens


async def together(client: EngineClient, begun: set[str] | None = None) -> list[list[int]]:
    each = (tokens_of(client, f"{i}", p, begun) for i, p in enumerate(PROMPTS))
    return await asyncio.gather(*each)


def ranks_of(client: EngineClient) -> tuple[RankInfo, ...]:
    return client.replicas[0].status.ranks


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def disturb(client: EngineClient, rank: int, number: signal.Signals) -> dict[str, int]:
    """Send a signal to a rank while streams run, and check the streams.

    Returns the number of restarts by reason.
    """
    before = client.restarts
    expected = await together(client)
    assert all(len(tokens) == 150 for tokens in expected)
    pids = [one.pid for one in ranks_of(client)]
    begun: set[str] = set()
    task = asyncio.create_task(together(client, begun))
    await until(lambda: len(begun) == 6)
    os.kill(pids[rank], number)
    # A stopped rank is noticed in a step. The streams may have had their last step before the stop.
    late = asyncio.create_task(tokens_of(client, "late", PROMPTS[0]))
    await until(lambda: not client.is_alive)
    if number == signal.SIGSTOP:
        assert "it has been stopped for" in (client.restart_reason or "")
    assert await task == expected
    assert await late == expected[0]
    await until(lambda: not any(map(lives, pids)))
    assert not {one.pid for one in ranks_of(client)} & set(pids)
    after = client.restarts
    return {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if count != before.get(name, 0)
    }


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_streams_go_on_after_the_kill_of_a_rank(run: Run, rank: int) -> None:
    async def scenario(client: EngineClient) -> None:
        assert await disturb(client, rank, signal.SIGKILL) == {"killed": 1}

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_streams_go_on_after_the_stop_of_a_rank(run: Run, rank: int) -> None:
    """A stop is found after `parallel.rank_timeout_s`, long before `server.hang_timeout_s`."""

    async def scenario(client: EngineClient) -> None:
        assert await disturb(client, rank, signal.SIGSTOP) == {"hang": 1}

    run(scenario)


@pytest.mark.slow
def test_a_rank_that_ends_while_idle_is_noticed(run: Run) -> None:
    async def scenario(client: EngineClient) -> None:
        _, second = ranks_of(client)
        os.kill(second.pid, signal.SIGKILL)
        await until(lambda: not client.is_alive)
        assert "rank 1" in (client.restart_reason or "")
        await until(lambda: client.is_alive)
        assert await tokens_of(client, "after", PROMPTS[0])

    run(scenario)


def test_idle_ranks_use_no_processor(run: Run) -> None:
    async def scenario(client: EngineClient) -> None:
        await tokens_of(client, "before", PROMPTS[0])
        second = psutil.Process(ranks_of(client)[1].pid)
        used: list[tuple[object, int]] = []
        for _ in range(20):  # a busy machine may take longer to end the last step
            before = second.cpu_times(), second.num_ctx_switches().voluntary
            await asyncio.sleep(1.0)
            after = second.cpu_times(), second.num_ctx_switches().voluntary
            if after[0] == before[0] and after[1] - before[1] <= 3:  # it waits, it does not poll
                return
            used += [before, after]
        pytest.fail(f"rank 1 is never idle: {used}")

    run(scenario)


def test_a_rank_that_can_not_start_is_named_in_one_line() -> None:
    async def scenario() -> None:
        client = EngineClient(tiny_config("parallel.tensor=3", model__max_model_len=64))
        try:
            with pytest.raises(StartupError) as caught:
                await client.start()
        finally:
            await client.close()
        assert str(caught.value).startswith("parallel.tensor=3: num_attention_heads=4 cannot")
        assert "set parallel.tensor to 1 or 2 or 4" in str(caught.value)

    asyncio.run(scenario())


@pytest.mark.slow
def test_fifty_streams_outlive_three_kills_of_ranks(run: Run) -> None:
    """A rank is killed each time when the streams have 1500 more tokens."""
    prompts = [[5 + number % 40, 6 + number % 7, 7, 8] for number in range(50)]

    async def scenario(client: EngineClient) -> None:
        num_tokens = 0

        async def stream(number: int) -> list[int]:
            nonlocal num_tokens
            tokens: list[int] = []
            async for output in client.generate(f"{number}", prompts[number], LONG):
                tokens += output.new_token_ids
                num_tokens += len(output.new_token_ids)
            return tokens

        async def all_streams() -> list[list[int]]:
            return await asyncio.gather(*map(stream, range(50)))

        expected = await all_streams()
        assert all(len(tokens) == 150 for tokens in expected)
        before, num_tokens = client.restarts, 0
        task = asyncio.create_task(all_streams())
        for kill, rank in enumerate((1, 0, 1), 1):
            await until(lambda: num_tokens > kill * 1500)  # noqa: B023 - it ends in this round
            ranks = ranks_of(client)
            os.kill(ranks[rank].pid, signal.SIGKILL)
            await until(lambda: not any(lives(one.pid) for one in ranks))  # noqa: B023 - as above
        assert await task == expected
        await until(lambda: client.restarts["killed"] - before.get("killed", 0) == 3)

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("division", ["parallel.tensor=2", "parallel.pipeline=2"])
def test_two_engines_of_two_ranks_take_over_each_others_streams(division: str) -> None:
    async def scenario() -> None:
        overrides = (division, "parallel.data=2", "parallel.router=least_load")
        client = EngineClient(tiny_config(*overrides))
        try:
            await client.start()
            expected = await together(client)
            first, second = client.replicas
            assert len(first.status.ranks) == len(second.status.ranks) == 2
            begun: set[str] = set()
            task = asyncio.create_task(together(client, begun))
            await until(lambda: len(begun) == 6)
            os.kill(first.status.ranks[1].pid, signal.SIGKILL)
            await until(lambda: not first.is_alive)
            assert client.is_alive, "the second engine must go on serving"
            assert await task == expected
            await until(lambda: first.is_alive)
            assert await together(client) == expected
        finally:
            await client.close()

    asyncio.run(scenario())
