"""A server with `parallel.tensor=2`: what it shows of its ranks, and its log when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.machines import lives
from tests.e2e.rank_servers import ranks_of, text_of
from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--tensor-parallel-size", "2", "server.restart_backoff_s=0.01") as process:
        yield process


def test_version_and_page_show_each_rank(server: ServerProcess) -> None:
    ranks = HTTP.get(f"{server.url}/version").json()["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1]
    assert ranks[0]["pid"] == server.engine.pid
    assert psutil.Process(ranks[1]["pid"]).ppid() == server.engine.pid
    shown = HTTP.get(f"{server.url}/debug/state").json()["ranks"]
    assert [one["plan"] for one in shown] == ranks
    assert all(one["resident_bytes"] > 1 << 20 for one in shown)
    memory = {name for name in server.metrics() if "resident" in name}
    assert 'ostinato_process_resident_memory_bytes{process="engine rank 1"}' in memory


@pytest.mark.parametrize(
    ("number", "words", "traces"),
    [
        (signal.SIGSTOP, "it has been stopped for", ["rank_main.py", "engine_main.py"]),
        pytest.param(
            signal.SIGSEGV,
            "died of SIGSEGV",
            ["Fatal Python error: Segmentation", "rank_main.py"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_stream_goes_on_and_the_log_says_where_the_rank_was(
    server: ServerProcess, number: int, words: str, traces: list[str]
) -> None:
    expected = text_of(server)
    before = ranks_of(server)
    num_lines = len(server.output)
    assert text_of(server, lambda: os.kill(before[1]["pid"], number)) == expected
    # A stopped rank is noticed in a step. The stream may have had its last step before the stop.
    assert text_of(server) == expected
    wait_until(lambda: any("serves again" in line for line in server.output[num_lines:]))
    log = "".join(server.output[num_lines:])
    assert "rank 1: it" in log
    assert words in log
    assert all(trace in log for trace in traces), log
    wait_until(lambda: not any(lives(one["pid"]) for one in before))


@pytest.mark.slow
def test_no_rank_outlives_a_server_that_is_killed() -> None:
    with ServerProcess("parallel.tensor=2") as own:
        pids = [one["pid"] for one in ranks_of(own)]
        has_begun = threading.Event()
        streams = [threading.Thread(target=attempt, args=(own, has_begun)) for _ in range(2)]
        for stream in streams:
            stream.start()
        assert has_begun.wait(PATIENCE_S)
        own.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(lives, pids)))
        for stream in streams:
            stream.join()


def attempt(server: ServerProcess, has_begun: threading.Event) -> None:
    """Read a stream whose server is killed."""
    with contextlib.suppress(OSError, httpx.HTTPError):
        text_of(server, has_begun.set)
