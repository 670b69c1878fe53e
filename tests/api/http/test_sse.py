"""Server-sent events: exact bytes, failures and closed connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import msgspec
import pytest

from ostinato.api.base.errors import ClientGoneError, UnavailableError
from ostinato.api.http.sse import NAMED_EVENTS, OPENAI_EVENTS, InParts, sse, until_disconnect
from ostinato.runtime.errors import EngineDeadError


class Chunk(msgspec.Struct):
    text: str


class Source:
    """Yields the chunks of a list. It raises an exception of the list, and waits at `None`."""

    def __init__(self, *items: Chunk | Exception | None) -> None:
        self.items = items
        self.is_closed = False

    async def chunks(self):
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    await asyncio.Event().wait()
                yield item
        finally:
            self.is_closed = True


async def read(source: Source) -> list[bytes]:
    return [data async for data in sse(source.chunks())]


def test_chunks_then_done():
    source = Source(Chunk("a"), Chunk("é\n"))
    assert asyncio.run(read(source)) == [
        b'data: {"text":"a"}\n\n',
        'data: {"text":"é\\n"}\n\n'.encode(),
        b"data: [DONE]\n\n",
    ]
    assert source.is_closed


class Large(msgspec.Struct, tag_field="type", tag="large"):
    entries: list[str]


@pytest.mark.parametrize("form", [OPENAI_EVENTS, NAMED_EVENTS])
def test_other_tasks_run_between_the_parts_of_a_large_chunk(form):
    large = Large(["x" * 1000] * 10_000)

    async def scenario() -> tuple[list[bytes], int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        source = Source(InParts(large), Large(["y"]))
        pieces = [piece async for piece in sse(source.chunks(), form)]
        beside.cancel()
        return pieces, turns

    pieces, turns = asyncio.run(scenario())
    whole = form.of_chunk(large) + form.of_chunk(Large(["y"])) + form.end
    assert b"".join(pieces) == whole
    assert max(map(len, pieces)) < 400_000
    assert turns > len(whole) // 400_000


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (
            EngineDeadError("the engine ended: killed"),
            b'data: {"error":{"message":"the engine ended: killed","type":"server_error",'
            b'"param":null,"code":"engine_dead"}}\n\n',
        ),
        (
            UnavailableError("the server is shutting down", code="shutting_down"),
            b'data: {"error":{"message":"the server is shutting down","type":"server_error",'
            b'"param":null,"code":"shutting_down"}}\n\n',
        ),
        (
            KeyError("secret"),
            b'data: {"error":{"message":"an unexpected error; the server\'s log has the details",'
            b'"type":"server_error","param":null,"code":"internal_error"}}\n\n',
        ),
    ],
)
def test_a_failure_is_the_last_event(error, event):
    source = Source(Chunk("a"), error)
    assert asyncio.run(read(source)) == [b'data: {"text":"a"}\n\n', event]
    assert source.is_closed


def test_closing_the_stream_closes_its_source_at_once():
    async def scenario() -> tuple[bytes, bool]:
        source = Source(Chunk("a"), None)
        events = sse(source.chunks())
        first = await anext(events)
        await events.aclose()
        return first, source.is_closed

    assert asyncio.run(scenario()) == (b'data: {"text":"a"}\n\n', True)


def test_cancelling_the_reader_closes_the_source():
    async def scenario() -> bool:
        source = Source(None)
        task = asyncio.create_task(read(source))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return source.is_closed

    assert asyncio.run(scenario())


class TestUntilDisconnect:
    def test_the_result(self):
        async def work() -> int:
            return 3

        async def receive():
            await asyncio.Event().wait()

        assert asyncio.run(until_disconnect(receive, work())) == 3

    def test_an_error_of_the_work(self):
        async def work() -> int:
            raise ValueError("mine")

        async def receive():
            await asyncio.Event().wait()

        with pytest.raises(ValueError, match="mine"):
            asyncio.run(until_disconnect(receive, work()))

    def test_a_disconnect_cancels_the_work(self):
        cancelled = []

        async def work() -> int:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return 3

        messages = [{"type": "http.request"}, {"type": "http.disconnect"}]

        async def receive():
            return messages.pop(0)

        with pytest.raises(ClientGoneError):
            asyncio.run(until_disconnect(receive, work()))
        assert cancelled == [True]

    def test_an_error_is_freed_without_a_garbage_collection(self):
        """The frames of an error refer to the request's body."""

        class Body:
            pass

        bodies = []

        async def work() -> int:
            body = Body()
            bodies.append(weakref.ref(body))
            raise ValueError("mine")

        async def receive():
            await asyncio.Event().wait()

        async def scenario() -> Body | None:
            with contextlib.suppress(ValueError):
                await until_disconnect(receive, work())
            await asyncio.sleep(0)  # the loop drops the ended task
            return bodies[0]()

        gc.disable()
        try:
            assert asyncio.run(scenario()) is None
        finally:
            gc.enable()
