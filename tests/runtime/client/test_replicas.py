"""A client of two engine processes: requests are spread, and each replica recovers alone."""

from __future__ import annotations

import asyncio
import os
import signal

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import SamplingParams
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.types.engine_info import EngineStats, sum_stats
from tests.runtime.client.test_client import until
from tests.runtime.tiny import tiny_config

LONG = SamplingParams(temperature=1.3, seed=7, max_tokens=80, ignore_eos=True)


async def tokens_of(client: EngineClient, name: str, prompt: list[int]) -> list[int]:
    return [
        token
        async for output in client.generate(name, prompt, LONG)
        for token in output.new_token_ids
    ]


async def scenario(client: EngineClient) -> None:
    prompts = [[5 + index, 6, 7, 8] * (1 + index) for index in range(6)]
    expected = [await tokens_of(client, f"alone-{i}", p) for i, p in enumerate(prompts)]
    tasks = [
        asyncio.create_task(tokens_of(client, f"together-{i}", p)) for i, p in enumerate(prompts)
    ]
    await until(lambda: all(len(replica.requests) == 3 for replica in client.replicas))
    assert client.num_unfinished == 6
    assert client.stats.num_running == sum(one.stats.num_running for one in client.replicas)
    first, second = client.replicas
    assert first.pid is not None
    assert first.pid != second.pid
    pid = second.pid
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: not first.is_alive, 60)
    # The other replica serves, so the client does, and new requests go there.
    assert client.is_alive
    assert client.restart_reason is None
    assert await tokens_of(client, "meanwhile", prompts[0]) == expected[0]
    assert await asyncio.gather(*tasks) == expected
    assert (dict(client.restarts), second.pid) == ({"killed": 1}, pid)
    await until(lambda: client.is_alive and client.stats.num_running == 0)
    await client.reset_prefix_cache()


def test_two_replicas_share_the_requests_and_one_outlives_the_other() -> None:
    async def run() -> None:
        client = EngineClient(tiny_config(), num_replicas=2)
        await client.start()
        try:
            await asyncio.wait_for(scenario(client), 200)
        finally:
            await client.close()
        assert client.death_reason == "it was closed"

    asyncio.run(run())


counts = st.integers(0, 1000)
some_stats = st.builds(
    EngineStats,
    num_running=counts,
    num_steps=counts,
    steps_by_kind=st.dictionaries(st.sampled_from(["captured", "eager"]), counts),
    iteration_tokens=st.lists(counts, min_size=3, max_size=3),
    predicted_ttft_seconds=st.floats(0, 9),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(some_stats, min_size=1, max_size=4))
def test_stats_of_replicas_add_up(stats: list[EngineStats]) -> None:
    total = sum_stats(stats)
    assert total.num_running == sum(one.num_running for one in stats)
    assert sum(total.steps_by_kind.values()) == sum(
        sum(one.steps_by_kind.values()) for one in stats
    )
    assert sum(total.iteration_tokens) == sum(sum(one.iteration_tokens) for one in stats)
    assert total.predicted_ttft_seconds == min(one.predicted_ttft_seconds for one in stats)
