"""Server-sent events, and what happens when the reader goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from litestar.types import Receive

from ostinato.api.errors import ClientGoneError, error_body, status_of

__all__ = ("sse", "until_disconnect")

T = TypeVar("T")
_LOG = logging.getLogger("ostinato.api")


async def sse(chunks: AsyncGenerator[msgspec.Struct, None]) -> AsyncGenerator[bytes, None]:
    """Each chunk as one event, then `[DONE]`; a failure is an event with the error object.

    A disconnect, a failure and the end all leave through `aclosing`, which aborts what still runs.
    """
    encode = msgspec.json.Encoder().encode
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield b"data: " + encode(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"
        except Exception as error:  # the status line is out, so the error travels as an event
            if status_of(error) == 500:
                _LOG.error("a stream failed", exc_info=error)
            yield b"data: " + encode(error_body(error)) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Args:
        receive: the ASGI channel; the body must have been read.

    Raises:
        ClientGoneError: the client closed its connection first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
