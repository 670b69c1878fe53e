"""A real server that finds the KV blocks of an engine that was killed, and of a server that ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import repeat_if_late, wait_until

PROMPT = (
    "The scheduler decides which tokens each step computes, and the block pool keeps them. " * 10
)
LOADED = 'ostinato_kv_tier_loaded_blocks_total{tier="disk"}'
STORED = 'ostinato_kv_tier_stored_blocks_total{tier="disk"}'


def complete(server: ServerProcess, prompt: str = PROMPT) -> tuple[str, int]:
    """The text of an answer, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = HTTP.post(f"{server.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    content = reply.json()
    return content["choices"][0]["text"], content["usage"]["prompt_tokens_details"]["cached_tokens"]


def start(folder: Path) -> ServerProcess:
    return ServerProcess(
        f"cache.disk_dir={folder}",
        "graphs.cost_table_budget_s=0",  # blocks are loaded even if computing them is faster
        "server.restart_backoff_s=0.01",
        "server.drain_timeout_s=200",
    )


def test_blocks_survive_a_killed_engine_and_the_end_of_the_server(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        text, cached = complete(server)
        assert cached == 0
        wait_until(lambda: server.metrics().get(STORED, 0) > 6, "no block was stored")
        tokens = stream_through_a_kill(server)
        # The prompt of the stream and the first prompt are those of the killed engine.
        wait_until(lambda: server.metrics()[LOADED] > 0, "no block was loaded")
        assert complete(server) == (text, complete(server)[1])
        assert complete(server)[1] > 96
        assert tokens == stream(server)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with start(tmp_path) as server:
        again, cached = complete(server)
        assert again == text
        assert cached > 96
        wait_until(lambda: server.metrics()[LOADED] > 0, "no block was loaded")
        assert HTTP.post(f"{server.url}/reset_prefix_cache").status_code == 200
        assert complete(server)[1] == 0


def test_a_server_starts_without_a_directory_that_it_can_use(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a directory")
    with start(taken) as server:
        server.wait_for_line("no copies on disk")
        assert complete(server)[1] == 0
        assert STORED not in server.metrics()


def stream(server: ServerProcess, on_event: Callable[[int], None] = lambda _: None) -> list[int]:
    """The tokens of a stream; `on_event` is called with the number of each event."""
    body: dict[str, Any] = {
        "prompt": PROMPT + "Now",
        "max_tokens": 120,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for number, line in enumerate(reply.iter_lines()):
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
            on_event(number)
    assert len(tokens) == 120
    return tokens


def stream_through_a_kill(server: ServerProcess) -> list[int]:
    """The tokens of a stream whose engine was killed in its middle."""

    def attempt() -> list[int] | None:
        was_killed = False

        def on_event(number: int) -> None:
            nonlocal was_killed
            if number == 20:
                was_killed = server.kill_busy_engine()

        tokens = stream(server, on_event)
        return tokens if was_killed else None

    tokens = repeat_if_late(attempt)
    wait_until(lambda: server.num_restarts() == 1)
    return tokens
