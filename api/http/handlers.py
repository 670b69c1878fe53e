"""What all endpoint handlers share: read a JSON body, answer with JSON or a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.exceptions import InternalServerException
from litestar.response import Stream

from ostinato.api.base.errors import ClientGoneError
from ostinato.api.base.unsupported_fields import UNSUPPORTED, Unsupported
from ostinato.api.http.sse import OPENAI_EVENTS, EventForm, sse, until_disconnect
from ostinato.api.schemas.body_decoding import decode
from ostinato.api.schemas.generation_fields import GenerationFields
from ostinato.api.service.generation import check_model
from ostinato.api.service.service import Service
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedTask

__all__ = (
    "HttpRequest",
    "Reply",
    "SharedService",
    "Status",
    "body_bytes",
    "event_stream",
    "json_response",
    "read_body",
    "respond",
    "respond_whole",
    "status_response",
)

T = TypeVar("T", bound=msgspec.Struct)
HttpRequest = Request[Any, Any, Any]
SharedService = NamedDependency[Service]


class Reply(Protocol):
    """The reply to one request that can be streamed; one of the two is called, once.

    Implemented by the `reply` module of each dialect.
    """

    def stream(self) -> AsyncGenerator[Any, None]:
        """Chunks or events, each of which becomes one server-sent event."""
        ...

    def whole(self) -> Coroutine[Any, Any, msgspec.Struct]:
        """The body of the answer."""
        ...


class Status(msgspec.Struct, frozen=True):
    """State of the server, with the reason where it is not well."""

    status: str
    reason: str | msgspec.UnsetType = msgspec.UNSET


async def read_body(
    request: HttpRequest,
    schema: type[T],
    service: Service,
    *,
    unsupported: Mapping[str, Unsupported] = UNSUPPORTED,
) -> T:
    """The decoded body of a request that is admitted and names the served model.

    Args:
        unsupported: the fields that the dialect knows and this server does not honour.

    Raises:
        InvalidRequestError: the body is not JSON of this schema, or names another model.
        UnavailableError: the server takes no requests now.
        OverloadedError: the queue is full.
        ClientGoneError: the connection closed before the end of the body.
    """
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"Content-Type is {content_type[:100]!r}, it must be application/json"
            " (curl: -H 'Content-Type: application/json')",
            code="unsupported_media_type",
            status=415,
        )
    data = await body_bytes(request)
    service.admission.check()
    body = decode(data, schema, unsupported)
    model = service.client.model
    check_model(getattr(body, "model", None), model)
    if isinstance(body, GenerationFields):
        require_task(model, ServedTask.generate)
    return body


async def body_bytes(request: HttpRequest) -> bytes:
    """The body as it came; raises ClientGoneError when the connection closes before its end."""
    try:
        return await request.body()
    except InternalServerException as error:  # raised by Litestar for a body that breaks off
        raise ClientGoneError from error


async def respond(
    request: HttpRequest, reply: Reply, *, stream: bool | None, form: EventForm = OPENAI_EVENTS
) -> Response[bytes] | Stream:
    """Send a reply as server-sent events, or as one JSON body."""
    if not stream:
        return await respond_whole(request, reply.whole())
    return event_stream(sse(reply.stream(), form))


def event_stream(events: AsyncGenerator[bytes, None]) -> Stream:
    """Send server-sent events that are encoded already."""
    # The headers keep proxies from buffering the events.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Stream(events, media_type="text/event-stream", headers=headers)


async def respond_whole(
    request: HttpRequest, work: Coroutine[Any, Any, msgspec.Struct]
) -> Response[bytes]:
    """Send the result of `work` as JSON; a client that disconnects cancels the work."""
    try:
        return json_response(await until_disconnect(request.receive, work))
    finally:
        work.close()  # does nothing unless the work never began


def json_response(value: object) -> Response[bytes]:
    """200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def status_response(status: str, reason: str | None) -> Response[bytes]:
    """200 with a status; 503 where there is a reason why the server is not well."""
    body = Status(status, msgspec.UNSET if reason is None else reason)
    code = 200 if reason is None else 503
    return Response(msgspec.json.encode(body), media_type="application/json", status_code=code)
