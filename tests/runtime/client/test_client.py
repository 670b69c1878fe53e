"""The engine as a real process behind the client: streams, aborts, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from ostinato import LLM, AsyncEngine, SamplingParams
from ostinato.ops.native.instruction_sets import runnable_levels
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import EngineDeadError, InvalidRequestError, StartupError
from ostinato.runtime.process.engine_child import LocalChild
from ostinato.runtime.process.ipc import AddRequest, client_decoder
from ostinato.runtime.types.outputs import RequestOutput
from tests.runtime.client.engine_clients import ENDLESS, Run, Scenario, engine_pid, started
from tests.runtime.tiny import tiny_config
from tests.waiting import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


async def collect(client: EngineClient, request_id: str, prompt: list[int]) -> list[RequestOutput]:
    return [output async for output in client.generate(request_id, prompt, GREEDY)]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


@pytest.fixture(scope="module")
def run_with_client() -> Iterator[Run]:
    """Runs scenarios with one client. Before and after each scenario the engine has no requests."""

    async def run(scenario: Scenario) -> None:
        assert client.num_unfinished == 0
        await scenario(client)
        await until(lambda: client.stats.num_running == 0)

    with asyncio.Runner() as runner:
        own = started()
        client = runner.run(own.__aenter__())
        yield lambda scenario: runner.run(run(scenario))
        runner.run(own.__aexit__(None, None, None))


def test_a_request_passes_three_modules_on_its_way_to_the_socket(
    run_with_client: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three modules are between the request runner and `LocalChild`, which owns the socket.

    The whole way from a route to the socket has six hops. docs/design.md names its modules.
    """
    walks: list[list[str]] = []
    send = LocalChild.send

    async def watched(child: LocalChild, parts: Sequence[bytes]) -> None:
        frame, walk = sys._getframe(1), list[str]()
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if "runtime" in file.parts and "tests" not in file.parts and file.name not in walk:
                walk.insert(0, file.name)
            frame = frame.f_back
        if isinstance(client_decoder.decode(parts[0]), AddRequest):
            walks.append(walk)
        await send(child, parts)

    async def scenario(client: EngineClient) -> None:
        monkeypatch.setattr(LocalChild, "send", watched)
        await collect(client, "one", [5, 6, 7])

    run_with_client(scenario)
    assert walks == [["client.py", "replica.py", "engine_process.py"]]


def test_concurrent_streams_get_the_tokens_of_the_in_process_engine(
    run_with_client: Run,
) -> None:
    prompts = [[5 + i, 6, 7] * (i + 1) for i in range(12)]
    llm = LLM(config=tiny_config())
    expected = [
        output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_progress=False)
    ]

    async def scenario(client: EngineClient) -> None:
        streams = [collect(client, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*streams)
        assert [tokens(outputs) for outputs in results] == expected
        for outputs in results:
            assert [output.finish_reason for output in outputs[:-1]] == [None] * 19
            assert outputs[-1].finish_reason == "length"
        await until(lambda: client.stats.num_running == 0)
        assert client.stats.num_free_blocks == client.stats.num_blocks
        assert client.num_unfinished == 0

    run_with_client(scenario)


def test_one_request_id_sent_twice_is_two_requests(
    run_with_client: Run,
) -> None:
    async def scenario(client: EngineClient) -> None:
        first, second = await asyncio.gather(
            collect(client, "same", [5, 6]), collect(client, "same", [9, 8, 7])
        )
        assert len(tokens(first)) == len(tokens(second)) == 20
        assert tokens(first) != tokens(second)

    run_with_client(scenario)


def test_the_next_process_of_an_engine_gets_the_same_instruction_set(run_with_client: Run) -> None:
    async def scenario(client: EngineClient) -> None:
        assert client.model.isa in runnable_levels()
        [replica] = client.replicas
        assert replica._launcher._config.device.isa.value == client.model.isa

    run_with_client(scenario)


def test_closing_a_stream_aborts_it_in_the_engine(
    run_with_client: Run,
) -> None:
    async def scenario(client: EngineClient) -> None:
        before = client.stats.num_output_tokens
        stream = client.generate("r", [5, 6, 7], ENDLESS)
        await anext(stream)
        await stream.aclose()
        await until(lambda: client.stats.num_running == 0)
        assert client.stats.num_output_tokens < before + (ENDLESS.max_tokens or 0)
        assert client.num_unfinished == 0

    run_with_client(scenario)


def test_abort_by_id_ends_the_stream_with_its_reason(
    run_with_client: Run,
) -> None:
    async def scenario(client: EngineClient) -> None:
        outputs = []
        async for output in client.generate("r", [5, 6, 7], ENDLESS):
            outputs.append(output)
            await client.abort("r")
        assert outputs[-1].finish_reason == "abort"
        assert client.num_unfinished == 0

    run_with_client(scenario)


def test_a_refused_request_reaches_no_engine(run_with_client: Run) -> None:
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(InvalidRequestError):
            await collect(client, "r", [])
        assert client.num_unfinished == 0
        assert len(tokens(await collect(client, "r", [5]))) == 20

    run_with_client(scenario)


def test_a_killed_engine_that_stays_down_ends_every_stream_with_an_error() -> None:
    async def main() -> None:
        async with started("server.max_restarts=0") as client:

            async def consume(index: int) -> None:
                async for _ in client.generate(f"r{index}", [5 + index], ENDLESS):
                    pass

            tasks = [asyncio.create_task(consume(i)) for i in range(3)]
            await until(lambda: client.stats.num_running == 3)
            os.kill(engine_pid(client), signal.SIGKILL)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineDeadError)
            assert not client.is_alive
            assert client.num_unfinished == 0
            with pytest.raises(EngineDeadError):
                await collect(client, "late", [5])

    asyncio.run(main())


def test_a_frozen_engine_shows_in_the_heartbeat(
    run_with_client: Run,
) -> None:
    async def scenario(client: EngineClient) -> None:
        await until(lambda: client.seconds_since_step < 0.7)
        os.kill(engine_pid(client), signal.SIGSTOP)
        await until(lambda: client.seconds_since_step > 1.5)
        os.kill(engine_pid(client), signal.SIGCONT)
        await until(lambda: client.seconds_since_step < 0.7)

    run_with_client(scenario)


def test_a_bad_model_is_a_startup_error_of_one_line() -> None:
    async def main() -> None:
        client = EngineClient(tiny_config("model.load_format=auto", model__path="/nowhere/at/all"))
        with pytest.raises(StartupError, match="/nowhere/at/all") as caught:
            await client.start()
        assert "\n" not in str(caught.value)
        await client.close()

    asyncio.run(main())


def test_close_leaves_no_process_and_no_files() -> None:
    async def main() -> tuple[int, str]:
        client = EngineClient(tiny_config())
        await client.start()
        pid = engine_pid(client)
        await client.close()
        await client.close()
        return pid, str(client._directory)

    pid, directory = asyncio.run(main())
    assert not psutil.pid_exists(pid)
    assert not os.path.exists(directory)


def test_engines_end_and_remove_their_files_when_their_client_is_killed() -> None:
    """When the client is killed, one engine serves, and another one is still starting."""
    program = f"""
import asyncio, sys, msgspec
from ostinato.conf.root import RunConfig
from ostinato.runtime.client.client import EngineClient
async def main():
    config = msgspec.json.decode({msgspec.json.encode(tiny_config())!r}, type=RunConfig)
    ready, starting = EngineClient(config), EngineClient(config)
    await ready.start()
    await starting.spawn()
    print(ready.engine_pid, starting.engine_pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    with tempfile.TemporaryDirectory(prefix="o-") as temporary:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": temporary},
        )
        assert process.stdout is not None
        engines = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(list(Path(temporary).glob("ostinato-*/engine-*"))) >= 2
        process.kill()
        process.wait()
        process.stdout.close()
        for engine in engines:
            engine.wait(timeout=240)
        assert list(Path(temporary).glob("ostinato-*")) == []


def test_async_engine_gives_the_tokens_of_the_engine_in_process() -> None:
    async def main() -> list[int]:
        async with AsyncEngine(config=tiny_config()) as engine:
            outputs = [output async for output in engine.generate([5, 6, 7], GREEDY)]
        return tokens(outputs)

    expected = LLM(config=tiny_config()).generate([[5, 6, 7]], GREEDY, use_progress=False)
    assert asyncio.run(main()) == expected[0].outputs[0].token_ids
