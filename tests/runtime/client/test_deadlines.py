"""A real engine: deadlines that pass while a request runs, or before its first token."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from ostinato import SamplingParams
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import DeadlineError
from ostinato.runtime.types.outputs import RequestOutput
from tests.runtime.client.engine_clients import engine_pid, run_with_own_client
from tests.waiting import until

ENDLESS = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True, n=2)


def test_a_deadline_ends_what_runs_and_refuses_what_has_not_begun() -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.generate("late", [5, 6, 7], ENDLESS, deadline=time.monotonic() + 1e6)
        async for _ in stream:
            # The engine's process is stopped, so that the next request gets no token.
            os.kill(engine_pid(client), signal.SIGSTOP)
            await stream.aclose()
            break
        deadline = time.monotonic() + 0.5
        with pytest.raises(DeadlineError, match="before its first token"):
            async for _ in client.generate("never", [5, 6], ENDLESS, deadline=deadline):
                pass
        assert time.monotonic() >= deadline
        os.kill(engine_pid(client), signal.SIGCONT)

        async def cut(seconds: float) -> list[RequestOutput]:
            """The outputs of a request. The engine is stopped when both completions have some."""
            outputs: list[RequestOutput] = []
            deadline = time.monotonic() + seconds
            with suppress(DeadlineError):
                async for output in client.generate(
                    f"cut after {seconds}", [8, 6, 7], ENDLESS, deadline=deadline
                ):
                    outputs.append(output)
                    if {one.index for one in outputs} == {0, 1}:
                        # At the deadline the client must return the tokens that it already has.
                        os.kill(engine_pid(client), signal.SIGSTOP)
            os.kill(engine_pid(client), signal.SIGCONT)
            return outputs

        for seconds in (1.0, 10.0, 100.0):  # a busy machine may need longer for the first tokens
            outputs = await cut(seconds)
            if {one.index for one in outputs if one.new_token_ids} == {0, 1}:
                break
        ends = [output for output in outputs if output.finish_reason is not None]
        assert sorted(one.index for one in ends) == [0, 1]
        assert {(one.finish_reason, one.stop_reason) for one in ends} == {
            ("length", "deadline_exceeded")
        }
        for end in ends:
            given = [t for one in outputs if one.index == end.index for t in one.new_token_ids]
            assert 1 <= len(given) == end.num_output_tokens < 8000
        assert client.num_unfinished == 0
        await until(lambda: client.stats.num_running == 0 and client.stats.num_waiting == 0)
        assert client.stats.num_free_blocks == client.stats.num_blocks

    run_with_own_client(scenario)
