"""A server with an engine that transcribes by a script."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.api.audio.audio_apps import AudioServer, WhisperEngine, WhisperFiles, serving


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> WhisperFiles:
    return WhisperFiles(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def shared(files: WhisperFiles) -> Iterator[AudioServer]:
    with serving(WhisperEngine(files)) as one:
        yield one


@pytest.fixture
def server(shared: AudioServer) -> AudioServer:
    engine = shared.engine
    engine.audio.clear()
    engine.order.clear()
    engine.requests.clear()
    engine.aborted.clear()
    engine.released.clear()
    engine.most, engine.waits, engine.pause_s = 0, False, 0.0
    engine.error = engine.probe_error = None
    return shared


@pytest.fixture
def client(server: AudioServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one
