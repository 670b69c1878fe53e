"""The server tells a busy engine from a frozen one.

The busy engine is in a step that computes for longer than `server.hang_timeout_s`. The frozen engine
is suspended.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import wait_until

HEALTH_S, HANG_S = 4.0, 6.0  # other tests on the machine may delay the engine by two seconds
STEP_S = 8.0  # a second in which the engine computes counts as a fifth of a second
PATHS = ("/live", "/ready", "/health")


# Python runs a module of this name when it starts. This one lengthens a step of the engine: the
# first one with work after the file SLOW_STEP was written computes SECONDS longer.
SITE = """
import importlib.util, os, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "ostinato.runtime.engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_change(module):
            run(module)
            step = module.Engine.step

            def slow_step(engine, *arguments):
                if engine.has_work and os.path.exists(os.environ["SLOW_STEP"]):
                    os.remove(os.environ["SLOW_STEP"])
                    end = time.monotonic() + float(os.environ["SECONDS"])
                    while time.monotonic() < end:
                        pass
                return step(engine, *arguments)

            module.Engine.step = slow_step

        spec.loader.exec_module = run_and_change
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def slow_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that lengthens a step."""
    return tmp_path_factory.mktemp("slow") / "step"


@pytest.fixture(scope="module")
def server(slow_step: Path) -> Iterator[ServerProcess]:
    (slow_step.parent / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(slow_step.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "SLOW_STEP": str(slow_step), "SECONDS": str(STEP_S)}
    limits = (f"server.health_timeout_s={HEALTH_S}", f"server.hang_timeout_s={HANG_S}")
    with ServerProcess(*limits, environment=environment) as process:
        yield process


@pytest.fixture(scope="module")
def patient() -> Iterator[ServerProcess]:
    """A server that never kills its engine."""
    with ServerProcess("server.health_timeout_s=0.5", "server.hang_timeout_s=null") as process:
        yield process


def test_a_busy_engine_is_well(server: ServerProcess, slow_step: Path) -> None:
    body = {"prompt": "Once", "max_tokens": 2, "ignore_eos": True}
    num_answers = 0
    slow_step.touch()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(HTTP.post, f"{server.url}/v1/completions", json=body)
        while not reply.done():
            for path in PATHS:
                response = HTTP.get(f"{server.url}{path}")
                assert response.status_code == 200, response.text
                num_answers += not reply.done()
            time.sleep(0.02)
    assert reply.result().status_code == 200, reply.result().text
    assert time.monotonic() - began >= STEP_S
    assert not any(" ended: " in line for line in server.output)
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
    hangs = 'ostinato_engine_restarts_total{reason="hang"}'
    wait_until(lambda: server.metrics()[hangs] >= 1)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
