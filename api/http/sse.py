"""Encodes chunks as server-sent events, and cancels work when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from litestar.types import Receive

from ostinato.api.base.errors import ClientGoneError, error_body, status_of, typed_error_body

__all__ = ("DATA_EVENTS", "NAMED_EVENTS", "OPENAI_EVENTS", "EventForm", "sse", "until_disconnect")

T = TypeVar("T")
_LOG = logging.getLogger("ostinato.api")


_encode = msgspec.json.Encoder().encode


class EventForm(msgspec.Struct, frozen=True, kw_only=True):
    """How an API encodes its events."""

    of_chunk: Callable[[Any], bytes]
    of_error: Callable[[Exception], bytes]
    end: bytes = b""  # the last event of a stream; empty = none
    is_named: bool = False  # each event has a name in addition to its data


def _data(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _named(value: msgspec.Struct) -> bytes:
    return f"event: {value.__struct_config__.tag}\n".encode() + _data(value)


OPENAI_EVENTS = EventForm(
    of_chunk=_data, of_error=lambda error: _data(error_body(error)), end=b"data: [DONE]\n\n"
)
# OpenAI's stream of a transcript ends with the event `transcript.text.done`.
DATA_EVENTS = EventForm(of_chunk=_data, of_error=lambda error: _data(error_body(error)))
# The name of an event is the tag of its struct, which is its `type`. The type of the last event
# says that the stream has ended.
NAMED_EVENTS = EventForm(
    of_chunk=_named,
    of_error=lambda error: b"event: error\n" + _data(typed_error_body(error)),
    is_named=True,
)


async def sse(
    chunks: AsyncGenerator[Any, None], form: EventForm = OPENAI_EVENTS
) -> AsyncGenerator[bytes, None]:
    """Encode each chunk as one event, then the end marker. An exception becomes an error event.

    `chunks` is always closed, which aborts the request if it still runs.
    """
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield form.of_chunk(chunk)
            if form.end:
                yield form.end
        except Exception as error:  # the status line has been sent, so the error becomes an event
            if status_of(error) == 500:
                _LOG.error("a stream failed", exc_info=error)
            yield form.of_error(error)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. A disconnect of the client cancels the work.

    Args:
        receive: the ASGI channel of the request, whose body must have been read.
        work: the work.

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
