"""`run serve parallel.pipeline=2`: a stream has the same text if a stage is killed or stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.machines import lives
from tests.e2e.rank_servers import ranks_of, text_of
from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--pipeline-parallel-size", "2", "server.restart_backoff_s=0.01") as process:
        yield process


@pytest.mark.parametrize(
    ("rank", "number", "words"),
    [
        (1, signal.SIGKILL, "rank 1: its process"),
        (1, signal.SIGSTOP, "it has been stopped for"),
        (0, signal.SIGKILL, "killed"),
        (0, signal.SIGSTOP, "it has been stopped for"),
    ],
)
def test_a_stream_goes_on_when_a_stage_ends(
    server: ServerProcess, rank: int, number: int, words: str
) -> None:
    expected = text_of(server)
    before = ranks_of(server)
    assert before[0]["first_layer"] == before[1]["num_layers"]
    num_lines = len(server.output)
    assert text_of(server, lambda: os.kill(before[rank]["pid"], number)) == expected
    # A stopped stage is noticed in a step. The stream may have had its last step before the stop.
    assert text_of(server) == expected
    wait_until(lambda: any("serves again" in line for line in server.output[num_lines:]))
    assert words in "".join(server.output[num_lines:])
    wait_until(lambda: not any(lives(one["pid"]) for one in before))


def test_the_text_is_that_of_one_process(server: ServerProcess) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.8, "seed": 5}
    reply = HTTP.post(f"{server.url}/v1/completions", json=body).json()
    with ServerProcess() as alone:
        same = HTTP.post(f"{alone.url}/v1/completions", json=body).json()
    assert reply["choices"] == same["choices"]
