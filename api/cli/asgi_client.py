"""Sends requests to an ASGI application in the same process, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from litestar.types import ASGIApp

__all__ = ("Answer", "post_json")


class Answer(NamedTuple):
    status: int
    body: bytes


async def post_json(app: ASGIApp, path: str, body: bytes) -> Answer:
    """POST a JSON body. Cancelling the call acts like a disconnect of the client."""
    answered: dict[str, Any] = {"body": b""}
    is_read = False

    async def receive() -> Any:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered["status"] = message["status"]
        elif message["type"] == "http.response.body":
            answered["body"] += message.get("body", b"")

    headers = [
        (b"host", b"batch"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    scope: Any = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("batch", 80),
    }
    await app(scope, receive, send)
    return Answer(answered["status"], answered["body"])
