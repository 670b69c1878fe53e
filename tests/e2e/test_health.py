"""The server tells a busy engine from a frozen one.

The busy engine is in a step that takes longer than `server.health_timeout_s`; on a machine that is
too quick for this, the test is skipped. The frozen engine is suspended.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import wait_until

HEALTH_S, HANG_S = 4.0, 6.0  # other tests on the machine may delay the engine by two seconds
PATHS = ("/live", "/ready", "/health")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # With the reference kernel, a step of three long prompts takes seconds. The watchdog allows five
    # times the predicted time, which is too short by half for so large a step.
    with ServerProcess(
        "model.max_model_len=2048",
        "scheduler.max_num_seqs=6",
        "scheduler.max_num_batched_tokens=12288",
        "graphs.attention=reference",
        "device.threads=1",
        f"server.health_timeout_s={HEALTH_S}",
        f"server.hang_timeout_s={HANG_S}",
    ) as process:
        yield process


@pytest.fixture(scope="module")
def patient() -> Iterator[ServerProcess]:
    """A server that never kills its engine."""
    with ServerProcess("server.health_timeout_s=0.5", "server.hang_timeout_s=null") as process:
        yield process


def skip_without_processor(server: ServerProcess, began: float, used_s: float) -> None:
    """Skip the test if other processes took most of the engine's time since `began`.

    The watchdog allows five times the predicted time. The engine computes on one thread, so on an
    idle machine it has the processor all the time.
    """
    times = server.engine.cpu_times()
    share = (times.user + times.system - used_s) / (time.monotonic() - began)
    if share < 0.6:
        pytest.skip(f"the machine is too busy: the engine had {share:.0%} of a processor")


def test_a_busy_engine_is_well(server: ServerProcess) -> None:
    prompts = [[first + i % 200 for i in range(2040)] for first in range(5, 8)]
    body = {"prompt": prompts, "max_tokens": 2, "ignore_eos": True}
    num_answers = 0
    began, used = time.monotonic(), server.engine.cpu_times()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(HTTP.post, f"{server.url}/v1/completions", json=body)
        while not reply.done():
            for path in PATHS:
                response = HTTP.get(f"{server.url}{path}")
                if response.status_code != 200:
                    skip_without_processor(server, began, used.user + used.system)
                assert response.status_code == 200, response.text
                num_answers += not reply.done()
            time.sleep(0.02)
    assert reply.result().status_code == 200, reply.result().text
    assert not any(" ended: " in line for line in server.output)
    if time.monotonic() - began < HEALTH_S + 1.0:
        pytest.skip("this machine is too quick: the step was no longer than the limit")
    assert num_answers > len(PATHS)  # the answers do not wait for the step


def test_a_frozen_engine_is_noticed(patient: ServerProcess) -> None:
    def statuses() -> list[str]:
        answers = [HTTP.get(f"{patient.url}{path}") for path in PATHS]
        return [one.json()["status"] for one in answers if one.status_code == 503]

    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with patient.held_engine(), patient.sent("/v1/completions", body, "held") as connection:
        wait_until(lambda: statuses() == ["stuck", "engine_silent", "unhealthy"])
        patient.engine.resume()
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    wait_until(lambda: statuses() == [])


def test_a_frozen_engine_is_replaced(server: ServerProcess) -> None:
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.engine.suspend()
        *_, last, done = [line for line in (first, *lines) if line]
    assert done == "data: [DONE]"
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
    server.wait_for_line("because of server.hang_timeout_s=6")
    assert server.metrics()['ostinato_engine_restarts_total{reason="hang"}'] >= 1
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
