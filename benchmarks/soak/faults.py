"""Misbehaving clients for the soak test: broken connections, invalid HTTP, very slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

import psutil

__all__ = ("kill_engines", "misbehave")

_SLOW_READ_S = 0.2
_SLOW_READS = 40
_LONG_BODY_MIB = 9  # more than server.max_body_mib
_Stage = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


async def misbehave(
    url: str, token_ids: Sequence[int], *, seed: str, until: float, counts: Counter[str]
) -> None:
    """Run one bad client after the other.

    Args:
        url: URL of the server.
        token_ids: the token ids for prompts.
        seed: seed of the choices.
        until: the end, in seconds of time.monotonic().
        counts: gets the number of bad clients by name.
    """
    address = urlsplit(url)
    numbers = random.Random(seed)
    while time.monotonic() < until:
        name = numbers.choice(sorted(_STAGES))
        prompt = [numbers.choice(token_ids) for _ in range(numbers.randint(1, 60))]
        body = json.dumps({"prompt": prompt, "max_tokens": 60, "stream": True, "ignore_eos": True})
        request = _request(body.encode())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                await _STAGES[name](reader, writer, request)
            finally:
                writer.transport.abort()  # without closing the connection properly
        counts[name] += 1
        await asyncio.sleep(numbers.uniform(0, 0.2))


async def kill_engines(server: psutil.Process, every_s: float, counts: Counter[str]) -> None:
    """Kill the server's engine process every `every_s` seconds, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        for child in server.children():
            with contextlib.suppress(psutil.Error):
                if "ostinato.runtime.process.engine_main" in child.cmdline():
                    child.kill()
                    counts["engine killed"] += 1


def _request(body: bytes, length: int | None = None) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


async def _connect_only(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    await asyncio.sleep(0.05)


async def _leave_in_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request[:40])
    await writer.drain()


async def _leave_in_body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request[:-10])
    await writer.drain()
    await asyncio.sleep(0.02)


async def _leave_before_answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request)
    await writer.drain()


async def _leave_in_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request)
    await reader.readuntil(b"data: ")


async def _no_http(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(b"\x16\x03\x01\x02\x00" + bytes(range(256)) + b"\r\n\r\n")
    await reader.read(1000)


async def _no_json(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(_request(b'{"prompt": [1, 2'))
    await _expect(reader, b" 400 ")


async def _too_large(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(_request(b"[", length=_LONG_BODY_MIB << 20))
    await _expect(reader, b" 413 ")


async def _slow_reader(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request)
    for _ in range(_SLOW_READS):
        if not await reader.read(64):
            return
        await asyncio.sleep(_SLOW_READ_S)


async def _expect(reader: asyncio.StreamReader, status: bytes) -> None:
    line = await reader.readline()
    if line and status not in line:
        raise RuntimeError(f"a bad request was answered with {line!r}, not{status.decode()}")


_STAGES: dict[str, _Stage] = {
    "connects only": _connect_only,
    "leaves in the head": _leave_in_head,
    "leaves in the body": _leave_in_body,
    "leaves before the answer": _leave_before_answer,
    "leaves in the stream": _leave_in_stream,
    "is no HTTP": _no_http,
    "is no JSON": _no_json,
    "is too large": _too_large,
    "reads slowly": _slow_reader,
}
