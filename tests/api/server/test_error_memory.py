"""No failure of a request leaves frames, which hold its body, to the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import httpx
import pytest

from ostinato.runtime.errors import EngineError
from ostinato.runtime.types.outputs import RequestOutput
from tests.api.fake_client import FakeClient, scripted

LARGE = "Hi" * 5000  # a body above 4 KiB is prepared in a fork
MESSAGES = [{"role": "user", "content": LARGE}]


class FailingClient(FakeClient):
    async def generate(self, *args: Any, **fields: Any) -> AsyncIterator[RequestOutput]:
        yield scripted("a", [5])
        raise EngineError("the engine gave the request up")


async def frames_left(app: Any, path: str, body: dict[str, Any]) -> tuple[int, list[str]]:
    """The status, and the functions whose frames only a garbage collection would free."""
    transport = httpx.ASGITransport(app.http.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        await http.post(path, json=body)  # the first request starts the process for large bodies
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            status = (await http.post(path, json=body)).status_code
            await asyncio.sleep(0)
            gc.collect()
            frames = [one.f_code.co_name for one in gc.garbage if isinstance(one, FrameType)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    return status, frames


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": LARGE, "temperature": 9}, 400),
        ("/v1/completions", {"prompt": "Hi", "temperature": 9}, 400),
        ("/v1/completions", {"prompt": LARGE, "model": "other"}, 404),
        ("/v1/completions", {"prompt": LARGE}, 500),
        ("/v1/completions", {"prompt": [LARGE, "Hi"]}, 500),
        ("/v1/completions", {"prompt": LARGE, "stream": True}, 200),
        ("/v1/chat/completions", {"messages": MESSAGES}, 500),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, 500),
        ("/v1/responses", {"input": LARGE}, 500),
        ("/v1/responses", {"input": LARGE, "stream": True}, 200),
    ],
)
def test_failures(make_app, monkeypatch, path: str, body: dict[str, Any], status: int):
    monkeypatch.setattr("tests.api.conftest.FakeClient", FailingClient)
    app = make_app(max_model_len=100_000)
    assert asyncio.run(frames_left(app, path, body)) == (status, [])
