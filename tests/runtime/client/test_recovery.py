"""Kills real engine processes: streams continue in the next engine with the same outputs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from ostinato import SamplingParams
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import EngineDeadError
from ostinato.runtime.process.ipc import AddRequest, ClientMessage
from ostinato.runtime.types.outputs import FinishReason, RequestOutput, TokenLogprobs
from ostinato.runtime.types.params import ThinkingLimit
from tests.runtime.client.engine_clients import (
    ENDLESS,
    Run,
    Scenario,
    engine_pid,
    run_with_own_client,
    started,
)
from tests.waiting import repeat_if_late, until

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.3, seed=7, max_tokens=60, ignore_eos=True)


def like(base: SamplingParams, **fields: object) -> SamplingParams:
    return SamplingParams(**{name: getattr(base, name) for name in base.__struct_fields__} | fields)


# Ways of sampling. Most of them depend on earlier output tokens or on other state of the request.
KINDS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": like(
        SEEDED, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9, top_k=50
    ),
    "filters": like(SEEDED, top_p=0.8, min_p=0.02, logit_bias={5: 3.0}),
    "allowed": like(SEEDED, allowed_token_ids=tuple(range(2, 40))),
    "minimum": like(
        SEEDED, min_tokens=40, stop_token_ids=tuple(range(2, 90)), max_tokens=60, top_k=200
    ),
    "thinking": like(
        SEEDED,
        thinking=ThinkingLimit(max_tokens=30, begin_token_id=5, end_token_id=7, is_open=True),
    ),
    "n": like(SEEDED, n=3, logprobs=2),
    "best": like(SEEDED, n=2, best_of=4),
    "scores": like(GREEDY, logprobs=3, prompt_logprobs=2),
    "beams": like(GREEDY, use_beam_search=True, n=2, best_of=3, max_tokens=12),
}


class Answer(NamedTuple):
    """The joined outputs of one completion, as far as these tests compare them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_output_tokens: int


def answers(outputs: list[RequestOutput]) -> dict[int, Answer]:
    joined: dict[int, Answer] = {}
    for output in outputs:
        before = joined.get(output.index, Answer([], [], None, None, None, 0))
        assert before.finish_reason is None, "an output after the end"
        joined[output.index] = Answer(
            before.token_ids + output.new_token_ids,
            before.logprobs + (output.logprobs or []),
            output.prompt_logprobs or before.prompt_logprobs,
            output.finish_reason,
            output.stop_reason,
            output.num_output_tokens,
        )
    for answer in joined.values():
        assert answer.num_output_tokens == len(answer.token_ids)
    return joined


async def run_all(
    client: EngineClient, counts: dict[str, int] | None = None
) -> dict[str, dict[int, Answer]]:
    counts = {} if counts is None else counts

    async def one(name: str, index: int) -> dict[int, Answer]:
        outputs = []
        prompt = [5 + index, 6, 7, 8, 9] * (2 + index)
        async for output in client.generate(name, prompt, KINDS[name]):
            outputs.append(output)
            counts[name] = counts.get(name, 0) + len(output.new_token_ids)
        return answers(outputs)

    results = await asyncio.gather(*(one(name, i) for i, name in enumerate(KINDS)))
    return dict(zip(KINDS, results, strict=True))


def num_quarantined(client: EngineClient) -> int:
    """How many requests were running when an engine died, and have not advanced since."""
    requests = client.replicas[0].requests
    kept = [requests.get(request_id) for request_id in requests.ids()]
    return sum(1 for one in kept if one is not None and one.num_crashes)


def is_running(client: EngineClient, name: str) -> bool:
    """Whether a request has been part of the running engine's steps."""
    requests = client.replicas[0].requests
    kept = [requests.get(one) for one in requests.ids() if one.startswith(name)]
    return any(one is not None and one.is_running for one in kept)


async def kill(client: EngineClient, number: int = signal.SIGKILL) -> None:
    """Kills the running engine with a signal; returns when the client has noticed its death."""
    before = sum(client.restarts.values())
    os.kill(engine_pid(client), number)
    await until(lambda: sum(client.restarts.values()) > before or not client.is_alive)


@pytest.fixture(scope="module")
def run_with_client() -> Iterator[Run]:
    """Runs scenarios with one client. A scenario may kill the client's engine.

    Before each scenario the engine is alive and has no requests.
    """

    async def run(scenario: Scenario) -> None:
        await until(lambda: client.is_alive and client.num_unfinished == 0)
        await until(lambda: client.stats.num_running == 0)
        await scenario(client)

    with asyncio.Runner() as runner:
        own = started("server.restart_backoff_s=0.001", "server.max_restarts=50")
        client = runner.run(own.__aenter__())
        yield lambda scenario: runner.run(run(scenario))
        runner.run(own.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def expected(run_with_client: Run) -> dict[str, dict[int, Answer]]:
    """The answers of an engine that is not disturbed."""
    found: dict[str, dict[int, Answer]] = {}

    async def scenario(client: EngineClient) -> None:
        found.update(await run_all(client))

    run_with_client(scenario)
    return found


def test_every_way_of_sampling_goes_on_as_if_nothing_had_happened(
    run_with_client: Run, expected: dict[str, dict[int, Answer]]
) -> None:
    async def scenario(client: EngineClient) -> None:
        counts: dict[str, int] = {}
        task = asyncio.create_task(run_all(client, counts))

        def reached(number: int) -> Callable[[], bool]:
            return lambda: client.is_alive and counts.get("greedy", 0) >= number

        await until(reached(1))
        await kill(client)
        await until(reached(20))
        # If an engine dies twice before a request has new outputs, the request gets an error.
        await until(lambda: client.is_alive and num_quarantined(client) == 0)
        pid = client.engine_pid
        await kill(client, signal.SIGSEGV)
        # The third engine is killed before it serves.
        await until(lambda: client.engine_pid not in (None, pid))
        await kill(client)
        assert await task == expected
        assert client.num_unfinished == 0
        # On a fast machine all requests may have ended before the third engine is killed.
        await until(lambda: client.is_alive and client.stats.num_running == 0)
        assert client.stats.num_free_blocks == client.stats.num_blocks

    run_with_client(scenario)


def test_a_beam_search_is_cleared_while_it_runs_and_delays_no_other_request(
    run_with_client: Run,
) -> None:
    search = like(GREEDY, use_beam_search=True, n=2, best_of=6, max_tokens=240)

    async def outputs_of(client: EngineClient) -> dict[int, Answer]:
        return answers([one async for one in client.generate("beams", [5, 6, 7], search)])

    def attempt() -> bool | None:
        is_early = True

        async def scenario(client: EngineClient) -> None:
            nonlocal is_early
            before = Counter(client.restarts)
            expected = await outputs_of(client)
            task = asyncio.create_task(outputs_of(client))
            stream = client.generate("stream", [8, 9, 7], ENDLESS)
            # A request that makes no progress between the two kills would end with an error.
            for _ in range(2):
                await until(
                    lambda: client.is_alive and (task.done() or is_running(client, "beams"))
                )
                await anext(stream)
                await kill(client, signal.SIGSEGV)
                await until(lambda: client.is_alive and num_quarantined(client) == 0)
                # Otherwise the search ended before it could be quarantined.
                is_early = is_early and not task.done()
            await stream.aclose()
            assert await task == expected
            assert Counter(client.restarts) - before == {"crash": 2}

        run_with_client(scenario)
        return is_early or None

    repeat_if_late(attempt)


def test_a_request_that_kills_its_engine_is_named_and_the_others_go_on(
    run_with_client: Run,
    expected: dict[str, dict[int, Answer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(client: EngineClient) -> None:
        before = Counter(client.restarts)
        counts: dict[str, int] = {}
        task = asyncio.create_task(run_all(client, counts))
        await until(lambda: len(counts) >= 3)
        # The engine dies whenever the request `poison` is to be sent to it.
        replica = client.replicas[0]
        send = replica._send

        async def send_or_die(message: ClientMessage) -> None:
            if isinstance(message, AddRequest) and "poison" in message.request.request_id:
                replica.requests.mark_running([message.request.request_id])
                os.kill(engine_pid(client), signal.SIGSEGV)
            else:
                await send(message)

        monkeypatch.setattr(replica, "_send", send_or_die)
        poison = asyncio.create_task(anext(client.generate("poison", [9, 9, 9], GREEDY)))
        output = await poison
        assert output.finish_reason == "error"
        assert output.error is not None
        assert "request poison was running when the engine died 2 times" in output.error
        assert "SIGSEGV" in output.error
        assert await task == expected
        assert Counter(client.restarts) - before == {"crash": 2}

    run_with_client(scenario)


def test_too_many_restarts_end_in_an_error_that_says_so() -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.generate("r", [5, 6, 7], ENDLESS)
        await anext(stream)
        await kill(client)
        await until(lambda: client.is_alive)
        os.kill(engine_pid(client), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"the limit is server\.max_restarts=1 within"):
            async for _ in stream:
                pass
        assert client.death_reason is not None
        assert not client.is_alive

    run_with_own_client(scenario, "server.max_restarts=1")


def test_requests_that_come_or_go_during_a_restart(
    run_with_client: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: EngineClient) -> None:
        may_start = asyncio.Event()
        launcher = client.replicas[0]._launcher
        spawn = launcher.spawn

        async def spawn_later() -> object:
            await may_start.wait()
            return await spawn()

        monkeypatch.setattr(launcher, "spawn", spawn_later)
        gone = client.generate("gone", [5, 6], ENDLESS)
        await anext(gone)
        aborted = client.generate("aborted", [7, 6], ENDLESS)
        await anext(aborted)
        os.kill(engine_pid(client), signal.SIGKILL)
        await until(lambda: client.restart_reason is not None)
        assert "SIGKILL" in (client.restart_reason or "")
        late = asyncio.create_task(anext(client.generate("late", [8, 8], GREEDY)))
        await gone.aclose()
        await client.abort("aborted")
        may_start.set()
        assert [output.finish_reason async for output in aborted][-1] == "abort"
        assert (await late).new_token_ids
        assert client.is_alive

    run_with_client(scenario)


def test_a_frozen_engine_is_killed_and_its_streams_go_on(
    expected: dict[str, dict[int, Answer]],
) -> None:
    async def scenario(client: EngineClient) -> None:
        counts: dict[str, int] = {}
        task = asyncio.create_task(run_all(client, counts))
        await until(lambda: counts.get("greedy", 0) > 5)
        os.kill(engine_pid(client), signal.SIGSTOP)
        # On a busy machine the engine may have sent all other tokens before it was stopped.
        late = asyncio.create_task(anext(client.generate("late", [8, 8], GREEDY)))
        assert await task == expected
        assert (await late).new_token_ids
        assert set(client.restarts) == {"hang"}

    run_with_own_client(scenario, "server.hang_timeout_s=10")
