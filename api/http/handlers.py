"""Functions that all endpoint handlers use: read a JSON body, send JSON or server-sent events."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.exceptions import InternalServerException
from litestar.response import Stream

from ostinato.api.base.errors import ClientGoneError
from ostinato.api.base.request_context import RequestContext, request_id_of
from ostinato.api.http.adapter_holds import hold_adapter
from ostinato.api.http.admitted_requests import count_admitted
from ostinato.api.http.json_parts import json_parts, json_pieces
from ostinato.api.http.sse import OPENAI_EVENTS, EventForm, sse, until_disconnect
from ostinato.api.observability.request_log import log_request
from ostinato.api.preparation.generation import Generation, check_model
from ostinato.api.preparation.preparation import Arrival
from ostinato.api.preparation.preparer import Body, Prepare
from ostinato.api.service.service import Service
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ReplicaStatus

__all__ = (
    "HttpRequest",
    "Reply",
    "SharedService",
    "Status",
    "admit",
    "body_bytes",
    "choose_model",
    "event_stream",
    "form_body",
    "json_body",
    "json_bytes",
    "json_response",
    "prepare",
    "respond",
    "respond_whole",
    "status_response",
)

T = TypeVar("T")
_LARGE = 1 << 20  # answers of more bytes are encoded while they are sent
HttpRequest = Request[Any, Any, Any]
SharedService = NamedDependency[Service]


class Reply(Protocol):
    """The reply to a request that can be streamed. One of the two methods is called, once.

    The `reply` module of each API implements it.
    """

    def stream(self) -> AsyncGenerator[Any, None]:
        """Chunks or events. Each becomes one server-sent event."""
        ...

    def whole(self) -> Coroutine[Any, Any, msgspec.Struct]:
        """The body of the answer."""
        ...


class Status(msgspec.Struct, frozen=True):
    """State of the server."""

    status: str
    reason: str | msgspec.UnsetType = msgspec.UNSET  # why the server is not well
    engines: list[ReplicaStatus] | msgspec.UnsetType = msgspec.UNSET  # see `status_response`


async def prepare(
    request: HttpRequest,
    service: Service,
    function: Prepare[T],
    context: RequestContext | None = None,
    *,
    arrival: Callable[[Body], Arrival] | None = None,
    read: Callable[[HttpRequest], Awaitable[Body]] | None = None,
) -> T:
    """Check that the server admits a request, and return `function`'s result for its body.

    A disconnect of the client ends the work.

    Args:
        request: the request.
        service: the state that handlers share.
        function: the function that prepares this kind of request.
        context: the context of the request, which has its id; None = the preparation needs no id,
            or gets one from `arrival`.
        arrival: called with the body; returns the other inputs of the preparation.
        read: reads the body; None = `json_body`.

    Raises:
        InvalidRequestError: `read` or `function` raises it.
        UnavailableError: the server takes no requests now, or no process could prepare this one.
        OverloadedError: the queue is full.
        ClientGoneError: the client disconnected before the body was complete, or during the work.
    """
    data = await (read or json_body)(request)
    service.admission.check()
    count_admitted(request.scope, service.admission)
    known = Arrival() if arrival is None else arrival(data)
    if context is not None and not known.request_id:
        known = msgspec.structs.replace(known, request_id=context.request_id)
    if service.lora.num_slots:
        known = msgspec.structs.replace(known, adapters=service.adapter_names)
    prepared = service.preparer.run_inline(function, data, known)
    if prepared is not None:
        return prepared
    work = service.preparer.run_apart(function, data, known)
    return await _while_connected(request, work, "preparation")


def choose_model(
    request: HttpRequest, service: Service, name: str | None, context: RequestContext
) -> None:
    """Set `context.adapter` to the adapter that a request names, if it names one.

    From now until the answer has been sent, the adapter keeps its slot, even if it is unloaded or
    replaced meanwhile. Called after `prepare`, which knows only the adapters at the request's
    arrival.

    Raises:
        InvalidRequestError: the adapter has been unloaded since the arrival (404).
    """
    if service.lora.num_slots:
        check_model(name, service.client.model, service.adapter_names)
        context.adapter = hold_adapter(request.scope, service.client.adapters, name)


async def admit(
    request: HttpRequest,
    service: Service,
    constraint_field: str,
    generations: Sequence[Generation],
    context: RequestContext,
) -> None:
    """Call `RequestRunner.prepare`. If the client disconnects, the wait for the grammar ends.

    Raises:
        InvalidRequestError: see `RequestRunner.prepare`.
        HelperProcessError: no process could check the constraint.
        OverloadedError: the queue is full.
        ClientGoneError: the client disconnected before the grammar was ready.
    """
    work = service.runner.prepare(constraint_field, generations, context)
    if generations[0].sampling.structured_outputs is None:
        await work  # without a grammar, this does not wait
    else:
        await _while_connected(request, work, "grammar")


async def json_body(request: HttpRequest) -> bytes:
    """Read a body that is declared as JSON.

    Raises:
        InvalidRequestError: the body is not declared as JSON.
        ClientGoneError: the client disconnected before the body was complete.
    """
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"Content-Type is {content_type[:100]!r}; it must be application/json"
            " (curl: -H 'Content-Type: application/json')",
            code="unsupported_media_type",
            status=415,
        )
    return await body_bytes(request)


async def form_body(request: HttpRequest) -> bytearray:
    """Read a body that is declared as a form with a file.

    The body grows while it arrives. Joining all parts at the end would block the event loop.

    Raises:
        InvalidRequestError: the body is not declared as a form.
        ClientGoneError: the client disconnected before the body was complete.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise InvalidRequestError(
            f"Content-Type is {content_type[:100]!r}; it must be multipart/form-data"
            " (curl: -F file=@speech.wav)",
            code="unsupported_media_type",
            status=415,
        )
    data = bytearray()
    with _logging_disconnect(request):
        async for part in request.stream():
            data += part
    return data


async def body_bytes(request: HttpRequest) -> bytes:
    """Read the body; raises ClientGoneError if the client disconnects before it is complete."""
    with _logging_disconnect(request):
        return await request.body()


@contextmanager
def _logging_disconnect(request: HttpRequest) -> Iterator[None]:
    try:
        yield
    except InternalServerException as error:  # raised by Litestar for a body that breaks off
        _log_disconnect(request, "body")
        raise ClientGoneError from error


async def _while_connected(request: HttpRequest, work: Coroutine[Any, Any, T], phase: str) -> T:
    """The result of `work`, which runs before the request reaches the engine.

    A disconnect of the client cancels the work and is logged.
    """
    try:
        return await until_disconnect(request.receive, work)
    except ClientGoneError:
        _log_disconnect(request, phase)
        raise
    finally:
        work.close()  # has an effect only if the work never began


def _log_disconnect(request: HttpRequest, phase: str) -> None:
    """Write the log line of a request whose client disconnected before the engine received it."""
    fields = {"phase": phase, "endpoint": request.url.path}
    log_request(request_id_of(request.scope), "disconnected", fields)


async def respond(
    request: HttpRequest, reply: Reply, *, stream: bool | None, form: EventForm = OPENAI_EVENTS
) -> Response[bytes] | Stream:
    """Send a reply as server-sent events, or as one JSON body."""
    if not stream:
        return await respond_whole(request, reply.whole())
    return event_stream(sse(reply.stream(), form))


def event_stream(events: AsyncGenerator[bytes, None]) -> Stream:
    """A response that streams encoded server-sent events."""
    # The headers keep proxies from buffering the events.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Stream(events, media_type="text/event-stream", headers=headers)


async def respond_whole(
    request: HttpRequest, work: Coroutine[Any, Any, msgspec.Struct]
) -> Response[bytes] | Stream:
    """Send the result of `work` as JSON. A disconnect of the client cancels the work."""
    try:
        return json_response(await until_disconnect(request.receive, work))
    finally:
        work.close()  # has an effect only if the work never began


def json_response(value: object) -> Response[bytes] | Stream:
    """Answer 200 with `value` as JSON. Large JSON is sent in parts."""
    parts = json_parts(value)
    first: list[bytes] = []
    size = 0
    for part in parts:
        first.append(part)
        if (size := size + len(part)) > _LARGE:
            pieces = json_pieces(itertools.chain(first, parts))
            return Stream(pieces, media_type="application/json")
    return json_bytes(b"".join(first))


def json_bytes(body: bytes) -> Response[bytes]:
    """Answer 200 with a body that is already JSON."""
    return Response(body, media_type="application/json")


def status_response(
    status: str, reason: str | None, engines: Sequence[ReplicaStatus] = ()
) -> Response[bytes]:
    """Answer with a status: 503 if there is a reason why the server is not well, else 200.

    Args:
        status: the status, one word.
        reason: why the server is not well; None = it is well.
        engines: the engines. The answer lists them if there are several, or if one has ranks or
            runs on another machine.
    """
    is_plain = len(engines) < 2 and not any(one.ranks or one.node for one in engines)
    listed = msgspec.UNSET if is_plain else list(engines)
    body = Status(status, msgspec.UNSET if reason is None else reason, listed)
    code = 200 if reason is None else 503
    return Response(msgspec.json.encode(body), media_type="application/json", status_code=code)
