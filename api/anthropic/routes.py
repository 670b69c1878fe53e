"""The Anthropic endpoints: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from litestar import Response
from litestar.response import Stream

from ostinato.api.anthropic.convert import FIELD_NAMES
from ostinato.api.anthropic.message_events import MessageEvent
from ostinato.api.anthropic.preparation import prepare_messages, prepare_token_count
from ostinato.api.anthropic.reply import MessagesReply
from ostinato.api.anthropic.schemas import (
    CountTokensRequest,
    MessagesRequest,
    Reply,
    TokenCount,
)
from ostinato.api.base.errors import TypedErrorBody
from ostinato.api.base.request_context import context_of
from ostinato.api.http.endpoints import post_endpoint
from ostinato.api.http.handlers import (
    HttpRequest,
    SharedService,
    admit,
    choose_model,
    json_bytes,
    prepare,
    respond,
)
from ostinato.api.http.sse import NAMED_EVENTS
from ostinato.api.preparation.preparation import renamed

__all__ = ("HANDLERS",)


@post_endpoint(
    "/v1/messages",
    body=MessagesRequest,
    answer=Reply,
    events=(MessageEvent, TypedErrorBody),
    form=NAMED_EVENTS,
    error=TypedErrorBody,
)
async def messages(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """Answer a conversation, in the format of the Anthropic API."""
    context = context_of("/v1/messages", request)
    prepared = await prepare(request, service, prepare_messages, context)
    choose_model(request, service, prepared.model, context)
    ready = prepared.ready
    with renamed(FIELD_NAMES):
        await admit(request, service, ready.constraint_field, [ready.generation], context)
    reply = MessagesReply(service, prepared, context)
    return await respond(request, reply, stream=prepared.stream, form=NAMED_EVENTS)


@post_endpoint(
    "/v1/messages/count_tokens", body=CountTokensRequest, answer=TokenCount, error=TypedErrorBody
)
async def count_tokens(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """The number of tokens of a prompt."""
    return json_bytes(await prepare(request, service, prepare_token_count))


HANDLERS = [messages, count_tokens]
