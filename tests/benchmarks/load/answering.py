"""Small HTTP servers for the load client: each answers every connection in one way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self

__all__ = ("Answering", "answer", "break_off", "no_http", "stall", "status")

Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Answering:
    """A server, used as `with Answering(handler) as server:`.

    It listens at a free port, and runs in a thread with an event loop of its own.

    Attributes:
        url: the address that the server listens at.
        bodies: the request bodies received, in order.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.bodies: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)))
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _main(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(
            (int(line.split(":")[1]) for line in head.splitlines() if "content-length" in line), 0
        )
        body = json.loads(await reader.readexactly(length) or "{}")
        if length:
            self.bodies.append(body)
        try:
            await self._handler(body, writer)
            await writer.drain()
        except ConnectionError:
            pass
        writer.close()


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def answer(pause_s: float = 0.0) -> Handler:
    """Answers with `max_tokens` pieces "x", then the usage."""

    async def handle(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(pause_s)
        writer.write(_HEAD)
        count = body["max_tokens"]
        for index in range(count):
            end = "length" if index == count - 1 else None
            choice: dict[str, Any] = {"text": "x", "finish_reason": end}
            if body.get("return_token_ids"):
                choice["token_ids"] = [index]
            if "messages" in body:
                choice = {"delta": {"content": "x"}, "finish_reason": end}
            writer.write(_event({"choices": [choice]}))
            await writer.drain()
        usage = {"prompt_tokens": 3, "completion_tokens": count}
        writer.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")

    return handle


def status(code: int, headers: str = "", body: bytes = b"no") -> Handler:
    async def handle(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {code} X\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n"
        writer.write(head.encode() + b"\r\n" + body)

    return handle


async def stall(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Sends one piece, and then nothing for 600 s."""
    writer.write(_HEAD + _event({"choices": [{"text": "x"}]}))
    await writer.drain()
    with contextlib.suppress(asyncio.CancelledError):  # when the test is over
        await asyncio.sleep(600)


async def break_off(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Sends one piece, and then closes the connection."""
    writer.write(_HEAD + _event({"choices": [{"text": "x"}]}))


async def no_http(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answers with bytes that are not HTTP."""
    writer.write(b"SSH-2.0-none\r\n")
