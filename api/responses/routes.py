"""The endpoints of OpenAI's Responses API: replies, their input items, and token counts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from litestar import Response
from litestar.params import FromPath, FromQuery
from litestar.response import Stream

from ostinato.api.base.errors import ErrorBody
from ostinato.api.base.request_context import context_of
from ostinato.api.http.adapter_holds import keep_held
from ostinato.api.http.auth import keep_counted
from ostinato.api.http.endpoints import delete_endpoint, get_endpoint, post_endpoint
from ostinato.api.http.handlers import (
    HttpRequest,
    SharedService,
    admit,
    choose_model,
    event_stream,
    json_bytes,
    json_response,
    prepare,
    respond,
)
from ostinato.api.http.sse import NAMED_EVENTS
from ostinato.api.preparation.preparation import Arrival, renamed
from ostinato.api.preparation.preparer import Body
from ostinato.api.responses.convert import FIELD_NAMES
from ostinato.api.responses.input_items import conversation_items, item_page
from ostinato.api.responses.preparation import prepare_input_tokens, prepare_response
from ostinato.api.responses.reply import ResponsesReply
from ostinato.api.responses.response_events import ResponseEvent
from ostinato.api.responses.response_object import Deleted, InputTokens, ItemList
from ostinato.api.responses.response_object import Response as ResponseObject
from ostinato.api.responses.schemas import InputTokensRequest, ResponsesRequest
from ostinato.api.service.background import BackgroundReply
from ostinato.api.service.service import Service
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("HANDLERS",)


@post_endpoint(
    "/v1/responses",
    body=ResponsesRequest,
    answer=ResponseObject,
    events=(ResponseEvent,),
    form=NAMED_EVENTS,
)
async def create_response(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """Answer a text or a conversation. It can continue a stored conversation."""
    context = context_of("/v1/responses", request)
    response_id = f"resp_{secrets.token_hex(16)}"
    prepared = await prepare(
        request, service, prepare_response, arrival=_arrival(service, response_id)
    )
    body, ready = prepared.body, prepared.ready
    choose_model(request, service, body.model, context)
    stores = _stores(service, body)
    with renamed(FIELD_NAMES):
        await admit(request, service, ready.constraint_field, [ready.generation], context)
    if body.background:
        service.background.check()  # after the wait, because others can have begun meanwhile
    reply = ResponsesReply(service, prepared, stores=stores, context=context)
    if body.background:
        releases = keep_counted(request.scope), keep_held(request.scope)
        return await _in_background(
            service, reply, response_id, streams=bool(body.stream), releases=releases
        )
    return await respond(request, reply, stream=body.stream, form=NAMED_EVENTS)


@post_endpoint("/v1/responses/input_tokens", body=InputTokensRequest, answer=InputTokens)
async def count_input_tokens(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """The number of tokens of a prompt."""
    arrival = _arrival(service, "")
    return json_bytes(await prepare(request, service, prepare_input_tokens, arrival=arrival))


@get_endpoint(
    "/v1/responses/{response_id:str}",
    answer=ResponseObject,
    events=(ResponseEvent,),
    form=NAMED_EVENTS,
    errors={400: ErrorBody, 404: ErrorBody},
)
async def retrieve_response(
    service: SharedService,
    response_id: FromPath[str],
    stream: FromQuery[bool] = False,
    starting_after: FromQuery[int] = -1,
) -> Response[bytes] | Stream:
    """A stored reply, or a reply in the background. With `stream=true`, its events."""
    if starting_after < -1:
        raise InvalidRequestError(
            f"starting_after={starting_after}; it must be at least -1, which means all events",
            param="starting_after",
            code="invalid_value",
        )
    reply = service.background.get(response_id)
    if reply is None:
        stored = service.stored_responses
        reply = BackgroundReply.ended(stored.response(response_id), stored.events(response_id))
    if not stream:
        body = reply.present()
        return json_bytes(body) if isinstance(body, bytes) else json_response(body)
    if not reply.has_stream:
        raise InvalidRequestError(
            "stream=true is for replies that were asked for with background=true and stream=true",
            param="stream",
            code="invalid_value",
        )
    return event_stream(reply.follow(starting_after))


@get_endpoint(
    "/v1/responses/{response_id:str}/input_items",
    answer=ItemList,
    errors={400: ErrorBody, 404: ErrorBody},
)
async def list_input_items(
    service: SharedService,
    response_id: FromPath[str],
    limit: FromQuery[int] = 20,
    order: FromQuery[Literal["asc", "desc"]] = "desc",
    after: FromQuery[str | None] = None,
) -> Response[bytes] | Stream:
    """The items that a reply was made from: its input, and the stored conversation before it."""
    items = await conversation_items(service, response_id)
    # This runs on a thread, because there can be 100,000 items, and `after` reads all their ids.
    page = await asyncio.to_thread(item_page, items, limit=limit, order=order, after=after)
    return json_response(page)


@post_endpoint(
    "/v1/responses/{response_id:str}/cancel",
    answer=ResponseObject,
    errors={400: ErrorBody, 404: ErrorBody},
)
async def cancel_response(service: SharedService, response_id: FromPath[str]) -> Response[bytes]:
    """End a reply in the background. Its output so far is kept."""
    await service.background.cancel(response_id)
    stored = service.stored_responses.response(response_id)
    if not msgspec.json.decode(stored, type=_Background).background:
        raise InvalidRequestError(
            "only a reply with background=true can be cancelled; to end another reply, close its"
            " connection",
            param="response_id",
            code="invalid_value",
        )
    return Response(stored, media_type="application/json")


@delete_endpoint("/v1/responses/{response_id:str}", answer=Deleted, errors={404: ErrorBody})
async def delete_response(
    service: SharedService, response_id: FromPath[str]
) -> Response[bytes] | Stream:
    """Delete a stored reply. A reply in the background is cancelled first."""
    await service.background.cancel(response_id)
    service.stored_responses.delete(response_id)
    return json_response(Deleted(response_id))


HANDLERS = [
    create_response,
    count_input_tokens,
    retrieve_response,
    list_input_items,
    cancel_response,
    delete_response,
]


class _Continues(msgspec.Struct):
    """The field of a body that names the conversation before it. Other fields are skipped."""

    previous_response_id: str | None = None


class _Background(msgspec.Struct):
    """The field of a stored reply that says whether it was made in the background."""

    background: bool


async def _in_background(
    service: Service,
    reply: ResponsesReply,
    response_id: str,
    *,
    streams: bool,
    releases: Sequence[Callable[[], None]],
) -> Response[bytes] | Stream:
    """Start the reply, and answer with its events or with its present state.

    Args:
        service: the state that handlers share.
        reply: the reply.
        response_id: the id of the reply.
        streams: whether the request asked for events.
        releases: called when the reply ends.
    """
    record = BackgroundReply(reply.present, has_stream=streams, input_items=reply.input_items)

    async def work() -> None:
        try:
            await reply.in_background(record, streams=streams)
        finally:
            for release in releases:
                release()

    await service.background.start(response_id, record, work())
    return event_stream(record.follow()) if streams else json_response(reply.present())


def _arrival(service: Service, response_id: str) -> Callable[[Body], Arrival]:
    """Make a function from a body to its `Arrival`: the reply's id, and the stored conversation."""

    def arrival(data: Body) -> Arrival:
        stored = None
        if b"previous_response_id" in data:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                name = msgspec.json.decode(data, type=_Continues).previous_response_id
                stored = None if name is None else service.stored_responses.messages(name)
        return Arrival(
            request_id=response_id, stored_messages=None if stored is None else msgspec.Raw(stored)
        )

    return arrival


def _stores(service: Service, body: ResponsesRequest) -> bool:
    if body.background and (body.store is False or not service.stored_responses.is_enabled):
        raise InvalidRequestError(
            "background=true needs a reply that is stored: leave out store=false, and start the"
            " server with server.response_store_mib above 0",
            param="background",
            code="invalid_value",
        )
    if body.store and not service.stored_responses.is_enabled:
        raise InvalidRequestError(
            "store=true is not possible: this server stores no replies"
            " (server.response_store_mib=0)",
            param="store",
            code="unsupported_parameter",
        )
    return service.stored_responses.is_enabled and body.store is not False
