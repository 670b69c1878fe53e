"""The application of Ray Serve, without Ray: its keys, its log, and what it refuses."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ostinato.api.server import ray_app
from ostinato.api.server.ray_app import LiveApp, build
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.runtime.errors import StartupError
from tests.api.fake_client import FakeClient


class StartedClient(FakeClient):
    """Counts its starts and ends."""

    made: list[StartedClient] = []

    def __init__(self, config: object) -> None:
        super().__init__([])
        self.calls: list[str] = []
        self.made.append(self)

    async def start(self) -> None:
        self.calls.append("start")

    async def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def client_of(monkeypatch):
    """The client of the application that was made last."""
    monkeypatch.setattr(StartedClient, "made", [])
    monkeypatch.setattr(ray_app, "EngineClient", StartedClient)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda: StartedClient.made[-1]
    root.handlers[:] = handlers
    root.setLevel(level)


async def live(app: LiveApp, work: Any = None) -> list[dict[str, Any]]:
    """Run an application from its start to its end, with `work` in between."""
    sent: list[dict[str, Any]] = []
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    has_started = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        has_started.set()

    inbox.put_nowait({"type": "lifespan.startup"})
    running = asyncio.create_task(app({"type": "lifespan"}, inbox.get, send))
    await has_started.wait()
    if work is not None:
        await work()
    inbox.put_nowait({"type": "lifespan.shutdown"})
    await running
    return sent


def test_the_keys_of_the_file_are_needed(client_of, tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("secret-key\n")
    app = LiveApp(load_config([f"server.api_key_file={file}", "server.log_level=warning"]))
    statuses = []

    async def work() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://ray") as http:
            for headers in ({}, {"Authorization": "Bearer secret-key"}):
                statuses.append((await http.get("/v1/models", headers=headers)).status_code)

    sent = asyncio.run(live(app, work))
    assert statuses == [401, 200]
    assert [one["type"] for one in sent][-1] == "lifespan.shutdown.complete"
    assert client_of().calls == ["start", "close"]
    assert logging.getLogger().level == logging.WARNING


def test_a_wrong_file_of_keys_ends_the_start_before_an_engine_starts(client_of, tmp_path: Path):
    app = LiveApp(load_config([f"server.api_key_file={tmp_path / 'none'}"]))
    (message,) = asyncio.run(live(app))
    assert message["type"] == "lifespan.startup.failed"
    assert "server.api_key_file" in message["message"]
    assert client_of().calls == ["close"]


def test_a_missing_package_ends_the_started_engine(client_of, monkeypatch):
    def missing() -> None:
        raise StartupError("av is not installed")

    monkeypatch.setattr(ray_app, "require_av", missing)
    monkeypatch.setattr(StartedClient, "start", start_for_audio)
    (message,) = asyncio.run(live(LiveApp(load_config([]))))
    assert message == {"type": "lifespan.startup.failed", "message": "av is not installed"}
    assert client_of().calls == ["start", "close"]


async def start_for_audio(client: StartedClient) -> None:
    client.calls.append("start")
    client.model = msgspec.structs.replace(client.model, sounds=object())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"server.port": 9000}, "server.port=9000"),
        ({"server.record_trace": "/tmp/trace"}, "server.record_trace=/tmp/trace"),
        (
            {"server.tls_certificate": "a.pem", "server.tls_key": "b.pem"},
            "server.tls_certificate=a.pem",
        ),
    ],
)
def test_what_only_run_serve_does_is_refused_by_name(settings: dict[str, object], named: str):
    with pytest.raises(ConfigError, match=f"{named} has no effect under Ray Serve"):
        build(settings)
