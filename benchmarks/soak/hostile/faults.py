"""Acts of a hostile connection of the soak test: broken HTTP, slow bytes, early disconnects.

Each function of `STAGES` gets a connection of its own. It returns the answer, or None if it reads
no answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

__all__ = ("STAGES", "Answer", "Stage", "drip", "post", "read_answer")

_SLOW_READ_S = 0.2
_SLOW_READS = 40
_DRIP_S = 2.0
_LONG_BODY_MIB = 9  # more than server.max_body_mib
_ANSWER_S = 120.0  # the longest wait for an answer


class Answer(NamedTuple):
    """The beginning of an answer."""

    status: int
    text: str  # the head, and for a 5xx the body

    @property
    def is_fault(self) -> bool:
        """Whether it is a 5xx other than a 503 with Retry-After, or of `/health` during a restart.

        Such an answer of `/health` has no Retry-After, and its body has the status "unhealthy".
        """
        text = self.text.lower()
        is_announced = "\r\nretry-after:" in text or '"status":"unhealthy"' in text
        return self.status >= 500 and not (self.status == 503 and is_announced)


Stage = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[Answer | None]]


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    """A request with a body. Its Content-Length is `length`, if given."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


async def read_answer(reader: asyncio.StreamReader) -> Answer | None:
    """The beginning of the next answer; None when the connection ends without one.

    Raises:
        RuntimeError: the answer is not HTTP/1.1.
        TimeoutError: the answer does not begin within two minutes.
    """
    async with asyncio.timeout(_ANSWER_S):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        found = re.match(r"HTTP/1\.1 (\d{3}) ", head)
        if found is None:
            raise RuntimeError(f"an answer began with {head[:100]!r}")
        answer = Answer(int(found[1]), head)
        if answer.status < 500:
            return answer
        return answer._replace(text=head + (await reader.read(2000)).decode("latin-1"))


async def drip(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float, *, in_body: bool
) -> Answer | None:
    """Send a request byte by byte and leave it unfinished.

    Args:
        seconds: how long bytes are sent. If the server answers earlier, its answer is returned.
        in_body: whether the headers are complete and the body drips.
    """
    writer.write(
        post("/v1/completions", b'{"prompt": "', length=4096)
        if in_body
        else b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "
    )
    answer = asyncio.create_task(read_answer(reader))
    try:
        for _ in range(max(1, round(seconds / _DRIP_S))):
            await asyncio.wait([answer], timeout=min(_DRIP_S, seconds))
            if answer.done():
                return answer.result()
            writer.write(b"a")
    finally:
        answer.cancel()
    return None


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
) -> Answer | None:
    writer.write(request)
    answer = await read_answer(reader)
    await reader.readuntil(b"data: ")
    return answer


async def _no_http(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    writer.write(b"\x16\x03\x01\x02\x00" + bytes(range(256)) + b"\r\n\r\n")
    return await read_answer(reader)


async def _no_json(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    writer.write(post("/v1/completions", b'{"prompt": [1, 2'))
    return await _expect(reader, 400)


async def _too_large(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    writer.write(post("/v1/completions", b"[", length=_LONG_BODY_MIB << 20))
    return await _expect(reader, 413)


async def _long_header(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"f" * (1 << 20))
    return await _expect(reader, 431)


async def _pipeline(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(get * 50 + request)
    return await read_answer(reader)


async def _bad_chunk(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"fffffffffffffffffff\r\nabc\r\n")
    return await _expect(reader, 400)


async def _slow_reader(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    writer.write(request)
    answer = await read_answer(reader)
    for _ in range(_SLOW_READS):
        if not await reader.read(64):
            break
        await asyncio.sleep(_SLOW_READ_S)
    return answer


async def _two_lengths(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer | None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    writer.write(
        post("/v1/completions", body).replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n")
    )
    return await _expect(reader, 400)


async def _expect(reader: asyncio.StreamReader, status: int) -> Answer | None:
    answer = await read_answer(reader)
    if answer is not None and answer.status not in (status, 503):
        raise RuntimeError(f"a request that is to be answered with {status} got {answer.text!r}")
    return answer


STAGES: Mapping[str, Stage] = {
    "connects only": _connect_only,
    "leaves in the head": _leave_in_head,
    "leaves in the body": _leave_in_body,
    "leaves before the answer": _leave_before_answer,
    "leaves in the stream": _leave_in_stream,
    "is no HTTP": _no_http,
    "is no JSON": _no_json,
    "is too large": _too_large,
    "has a header of 1 MiB": _long_header,
    "has two Content-Length headers": _two_lengths,
    "sends 51 requests at once": _pipeline,
    "has a chunk of 2^76 bytes": _bad_chunk,
    "reads slowly": _slow_reader,
}
