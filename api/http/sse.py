"""Encodes chunks as server-sent events, and cancels work when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import msgspec
from litestar.types import Receive

from ostinato.api.base.errors import ClientGoneError, error_body, status_of, typed_error_body
from ostinato.api.http.json_parts import json_parts, json_pieces

__all__ = (
    "DATA_EVENTS",
    "MANY_TOKENS",
    "NAMED_EVENTS",
    "OPENAI_EVENTS",
    "EventForm",
    "InParts",
    "sse",
    "until_disconnect",
)

T = TypeVar("T")
_LOG = logging.getLogger("ostinato.api")
MANY_TOKENS = 256  # a chunk with the log-probabilities of more tokens is sent `InParts`


_encode = msgspec.json.Encoder().encode
_DATA, _END = b"data: ", b"\n\n"


class InParts(NamedTuple):
    """A chunk that is encoded in parts, because it can have many log-probabilities."""

    chunk: Any


class EventForm(msgspec.Struct, frozen=True, kw_only=True):
    """How an API encodes its events."""

    of_error: Callable[[Exception], bytes]
    end: bytes = b""  # the last event of a stream; empty = none
    is_named: bool = False  # each event has a name in addition to its data

    def of_chunk(self, chunk: Any) -> bytes:
        return self._begin(chunk) + _encode(chunk) + _END

    def parts(self, large: InParts) -> Iterator[bytes]:
        """The parts of `of_chunk`."""
        yield self._begin(large.chunk)
        yield from json_parts(large.chunk)
        yield _END

    def _begin(self, chunk: Any) -> bytes:
        if not self.is_named:
            return _DATA
        return f"event: {chunk.__struct_config__.tag}\n".encode() + _DATA


def _data(value: object) -> bytes:
    return _DATA + _encode(value) + _END


OPENAI_EVENTS = EventForm(of_error=lambda error: _data(error_body(error)), end=b"data: [DONE]\n\n")
# OpenAI's stream of a transcript ends with the event `transcript.text.done`.
DATA_EVENTS = EventForm(of_error=lambda error: _data(error_body(error)))
# The name of an event is the tag of its struct, which is its `type`. The type of the last event
# says that the stream has ended.
NAMED_EVENTS = EventForm(
    of_error=lambda error: b"event: error\n" + _data(typed_error_body(error)),
    is_named=True,
)


async def sse(
    chunks: AsyncGenerator[Any, None], form: EventForm = OPENAI_EVENTS
) -> AsyncGenerator[bytes, None]:
    """Encode each chunk as one event, then the end marker. An exception becomes an error event.

    Other tasks run between the parts of a chunk that is `InParts`.
    `chunks` is always closed, which aborts the request if it still runs.
    """
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                if isinstance(chunk, InParts):
                    async for piece in json_pieces(form.parts(chunk)):
                        yield piece
                else:
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
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        # An error of the work refers to this frame. If the frame referred to the task, which has
        # the error, the request's body would stay in memory until a garbage collection.
        del task, gone


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
