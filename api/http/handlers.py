"""What every handler does with HTTP: read a body, answer with JSON or with events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.exceptions import InternalServerException
from litestar.response import Stream

from ostinato.api.base.errors import ClientGoneError
from ostinato.api.base.unsupported_fields import UNSUPPORTED, Unsupported
from ostinato.api.http.sse import OPENAI_EVENTS, EventForm, sse
from ostinato.api.schemas.openai import GenerationFields, Status, decode
from ostinato.api.service.generation import check_model
from ostinato.api.service.service import Service
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedTask

__all__ = (
    "HttpRequest",
    "SharedService",
    "event_stream",
    "json_response",
    "read_body",
    "status_response",
)

T = TypeVar("T", bound=msgspec.Struct)
HttpRequest = Request[Any, Any, Any]
SharedService = NamedDependency[Service]


async def read_body(
    request: HttpRequest,
    schema: type[T],
    service: Service,
    *,
    unsupported: Mapping[str, Unsupported] = UNSUPPORTED,
) -> T:
    """The decoded body, once it is sure that requests are admitted and the model is right.

    Args:
        unsupported: the fields that the dialect knows and this server does not honour.
    """
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"Content-Type is {content_type[:100]!r}, it must be application/json"
            " (curl: -H 'Content-Type: application/json')",
            code="unsupported_media_type",
            status=415,
        )
    try:
        data = await request.body()
    except InternalServerException as error:  # the framework's word for a body that breaks off
        raise ClientGoneError from error
    service.admit()
    body = decode(data, schema, unsupported)
    model = service.client.model
    check_model(getattr(body, "model", None), model)
    if isinstance(body, GenerationFields):
        require_task(model, ServedTask.generate)
    return body


def json_response(value: object) -> Response[bytes]:
    """200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def status_response(status: str, reason: str | None) -> Response[bytes]:
    """200 with a status; 503 when there is a reason why not."""
    body = Status(status, msgspec.UNSET if reason is None else reason)
    code = 200 if reason is None else 503
    return Response(msgspec.json.encode(body), media_type="application/json", status_code=code)


def event_stream(chunks: AsyncGenerator[Any, None], form: EventForm = OPENAI_EVENTS) -> Stream:
    """The chunks as server-sent events."""
    # The headers keep proxies from collecting the events.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Stream(sse(chunks, form), media_type="text/event-stream", headers=headers)
