"""A client of two engine processes: where requests go when an engine dies or is drained.

tests/e2e/test_replicas.py has the same for servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import SamplingParams
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.process.ipc import AddRequest, ClientMessage
from ostinato.runtime.types.engine_info import EngineStats, continued, sum_stats
from tests.runtime.tiny import tiny_config
from tests.waiting import PATIENCE_S, until

LONG = SamplingParams(temperature=1.3, seed=7, max_tokens=200, ignore_eos=True)
PROMPTS = [[5 + index, 6, 7, 8] * (1 + index) for index in range(6)]
Scenario = Callable[[EngineClient], Awaitable[None]]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Scenario], None]]:
    """Runs scenarios with one client.

    Before and after each, both engines are in the state `serving` and have no requests.
    """

    async def run_one(scenario: Scenario) -> None:
        await asyncio.wait_for(scenario(client), 250)
        await until(lambda: all(one.status.state == "serving" for one in client.replicas))
        await until(lambda: client.num_unfinished == client.stats.num_running == 0)

    overrides = ("parallel.data=2", "parallel.router=least_load", "server.restart_backoff_s=0.01")
    with asyncio.Runner() as runner:
        client = EngineClient(tiny_config(*overrides, "server.max_restarts=50"))
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


@contextmanager
def held(client: EngineClient) -> Iterator[None]:
    """A context in which the engine processes are stopped.

    No request advances in it, however fast the machine is.
    """
    pids = [replica.pid for replica in client.replicas if replica.pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def together(client: EngineClient, begun: set[str] | None = None) -> list[list[int]]:
    each = (tokens_of(client, f"{i}", p, begun) for i, p in enumerate(PROMPTS))
    return await asyncio.gather(*each)


def restarts_of(client: EngineClient) -> list[dict[str, int]]:
    return [dict(replica.restarts) for replica in client.replicas]


def test_requests_of_a_killed_engine_go_on_in_the_other_at_once(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: EngineClient) -> None:
        expected = [await tokens_of(client, f"alone-{i}", p) for i, p in enumerate(PROMPTS)]
        first, second = client.replicas
        may_start = asyncio.Event()
        spawn = first._launcher.spawn

        async def spawn_later() -> object:
            await may_start.wait()
            return await spawn()

        monkeypatch.setattr(first._launcher, "spawn", spawn_later)
        begun: set[str] = set()
        with held(client):
            task = asyncio.create_task(together(client, begun))
            await until(lambda: len(first.requests) == len(second.requests) == 3)
        await until(lambda: len(begun) == 6)
        assert first.pid not in (None, second.pid)
        os.kill(first.pid or 0, signal.SIGKILL)
        await until(lambda: not first.is_alive)
        # The requests do not wait for the next engine, which does not start yet.
        assert await task == expected
        assert not len(first.requests)
        assert client.is_alive
        assert client.restart_reason is None
        assert first.status.state == "restarting"
        assert await tokens_of(client, "meanwhile", PROMPTS[0]) == expected[0]
        may_start.set()
        await until(lambda: first.is_alive)
        assert restarts_of(client) == [{"killed": 1}, {}]

    run(scenario)


def test_a_request_that_kills_its_engine_kills_no_other(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: EngineClient) -> None:
        expected = await together(client)
        before = restarts_of(client)
        poisoned: list[int] = []

        def poison(number: int) -> None:
            """Kill the replica's engine whenever the request `poison` is to be sent to it."""
            replica = client.replicas[number]
            send = replica._send

            async def send_or_die(message: ClientMessage) -> None:
                if isinstance(message, AddRequest) and "poison" in message.request.request_id:
                    poisoned.append(number)
                    replica.requests.mark_running([message.request.request_id])
                    os.kill(replica.pid or 0, signal.SIGSEGV)
                else:
                    await send(message)

            monkeypatch.setattr(replica, "_send", send_or_die)

        poison(0)
        poison(1)
        begun: set[str] = set()
        task = asyncio.create_task(together(client, begun))
        await until(lambda: len(begun) == 6)
        output = await anext(client.generate("poison", [9, 9, 9], LONG))
        assert "request poison was running when the engine died 2 times" in (output.error or "")
        assert await task == expected
        assert poisoned in ([0, 0], [1, 1])
        hit = poisoned[0]
        after = restarts_of(client)
        assert after[1 - hit] == before[1 - hit]
        assert after[hit] == {**before[hit], "crash": 2}

    run(scenario)


def test_a_drained_engine_gets_no_requests_and_gives_its_own_away(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(client: EngineClient) -> None:
        expected = await together(client)
        first, second = client.replicas
        with held(client):
            task = asyncio.create_task(together(client))
            await until(lambda: len(first.requests) == 3)
            assert await client.drain_engine(0, timeout_s=0) == 3
            assert (len(first.requests), first.status.state) == (0, "drained")
        assert await task == expected
        # The engine's own count: the last one that it has sent may be 50 ms old.
        before = await client.inspect(timeout_s=PATIENCE_S, engine=0)
        assert await together(client) == expected
        after = await client.inspect(timeout_s=PATIENCE_S, engine=0)
        assert after.stats.num_output_tokens == before.stats.num_output_tokens
        with pytest.raises(InvalidRequestError, match="no other engine takes requests"):
            await client.drain_engine(1, timeout_s=0)
        with pytest.raises(InvalidRequestError, match="engines 0 to 1"):
            client.resume_engine(2)
        client.resume_engine(0)
        with held(client):
            task = asyncio.create_task(together(client))
            await until(lambda: len(first.requests) == len(second.requests) == 3)
            drain = asyncio.create_task(client.drain_engine(0, timeout_s=200))
            await until(lambda: first.is_drained)
        assert await drain == 0
        client.resume_engine(0)
        assert await task == expected

    run(scenario)


def test_requests_come_back_to_an_engine_that_has_not_read_their_aborts(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(client: EngineClient) -> None:
        expected = await together(client)
        first, second = client.replicas
        with held(client):
            task = asyncio.create_task(together(client))
            await until(lambda: len(first.requests) == len(second.requests) == 3)
            assert await client.drain_engine(0, timeout_s=0) == 3
            client.resume_engine(0)
            assert await client.drain_engine(1, timeout_s=0) == 6
            client.resume_engine(1)
            assert first.requests.num_held == 3
        assert await task == expected

    run(scenario)


def test_weights_are_reloaded_in_one_engine_after_the_other(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(client: EngineClient) -> None:
        expected = await together(client)
        pids, before = [one.pid for one in client.replicas], client.restarts
        done = asyncio.Event()

        async def keep_asking() -> int:
            count = 0
            while not done.is_set():
                assert await together(client) == expected
                count += 1
                await asyncio.sleep(0.2)  # the engines that start need the cores
            return count

        asking = asyncio.create_task(keep_asking())
        reload = asyncio.create_task(client.reload_weights(timeout_s=0))
        await until(lambda: not client.replicas[0].is_alive)
        with pytest.raises(InvalidRequestError, match="are being reloaded"):
            await client.reload_weights(timeout_s=0)
        while not reload.done():
            assert client.is_alive
            await asyncio.sleep(0.01)
        await reload
        done.set()
        assert await asking > 0
        assert set(pids).isdisjoint(one.pid for one in client.replicas)
        assert client.restarts == {**before, "reload": 2}

    run(scenario)


def test_the_engine_that_can_not_start_is_named() -> None:
    async def scenario() -> None:
        config = tiny_config(
            "parallel.data=2", "model.load_format=auto", model__path="/nowhere/at/all"
        )
        client = EngineClient(config)
        try:
            with pytest.raises(StartupError, match=r"^engine [01] of 2: .*/nowhere/at/all"):
                await client.start()
        finally:
            await client.close()

    asyncio.run(scenario())


counts = st.integers(0, 1000)
some_stats = st.builds(
    EngineStats,
    num_running=counts,
    num_steps=counts,
    steps_by_kind=st.dictionaries(st.sampled_from(["captured", "eager"]), counts),
    iteration_tokens=st.lists(counts, min_size=3, max_size=3),
    predicted_ttft_seconds=st.floats(0, 9),
)


@settings(max_examples=50)
@given(st.lists(some_stats, min_size=1, max_size=4))
def test_stats_of_replicas_add_up(stats: list[EngineStats]) -> None:
    total = sum_stats(stats)
    assert total.num_running == sum(one.num_running for one in stats)
    assert sum(total.steps_by_kind.values()) == sum(
        sum(one.steps_by_kind.values()) for one in stats
    )
    assert sum(total.iteration_tokens) == sum(sum(one.iteration_tokens) for one in stats)
    assert total.predicted_ttft_seconds == min(one.predicted_ttft_seconds for one in stats)


def test_counters_go_on_over_a_restart_and_gauges_do_not() -> None:
    before = EngineStats(
        num_running=3, num_blocks=9, num_output_tokens=70, predicted_step_seconds=2
    )
    now = EngineStats(num_running=1, num_blocks=8, num_output_tokens=5, predicted_step_seconds=1)
    joined = continued(before, now)
    assert (joined.num_running, joined.num_blocks, joined.num_output_tokens) == (1, 8, 75)
    assert joined.predicted_step_seconds == 1
    assert continued(None, now) is now
