"""The server tells a busy engine from a frozen one.

One engine is in a step longer than every limit; the other one is stopped.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.server_process import HTTP, ServerProcess

HEALTH_S, HANG_S = 4.0, 6.0  # other tests on the machine may delay the engine by two seconds
PATHS = ("/live", "/ready", "/health")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # The reference kernel over six long prompts: a step takes seconds. It has one thread: other
    # tests then make it at most three times slower, not ten times. Predictions allow for five.
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


def test_a_busy_engine_is_well_and_the_answers_are_quick(server: ServerProcess) -> None:
    done = threading.Event()
    began = time.monotonic()
    reply: list[httpx.Response] = []

    def ask() -> None:
        prompts = [[first + i % 200 for i in range(2040)] for first in range(5, 11)]
        body = {"prompt": prompts, "max_tokens": 2, "ignore_eos": True}
        reply.append(HTTP.post(f"{server.url}/v1/completions", json=body, timeout=250))
        done.set()

    asking = threading.Thread(target=ask)
    asking.start()
    seconds = []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while not done.is_set():
            for path in PATHS:
                begin = time.monotonic()
                response = client.get(path)
                seconds.append(time.monotonic() - begin)
                assert response.status_code == 200, response.text
            time.sleep(0.02)
    asking.join()
    assert reply[0].status_code == 200, reply[0].text
    assert time.monotonic() - began > HEALTH_S + 1.0, "the step was no longer than the limit"
    assert sorted(seconds)[len(seconds) // 2] < 1.0  # milliseconds on an idle machine
    assert not any(" ended: " in line for line in server.output)


def test_a_frozen_engine_is_noticed_then_replaced(server: ServerProcess) -> None:
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=250) as response:
        lines = response.iter_lines()
        next(lines)
        frozen = server.engine
        frozen.suspend()
        seen: dict[str, str] = {}
        deadline = time.monotonic() + 200
        while frozen.is_running() and frozen.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the frozen engine lives on"
            for path in PATHS:
                answer = HTTP.get(f"{server.url}{path}", timeout=60)
                if answer.status_code == 503:
                    seen.setdefault(path, answer.json()["status"])
        events = [line for line in lines if line]
    # A restarted engine is also correct: the last poll may come after the restart.
    assert seen["/live"] == "stuck"
    assert seen["/ready"] in ("engine_silent", "restarting")
    assert seen["/health"] == "unhealthy"
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
    server.wait_for_line("by server.hang_timeout_s=6")
    assert server.metrics()['ostinato_engine_restarts_total{reason="hang"}'] == 1
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
