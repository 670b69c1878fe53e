"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from litestar import Response, post
from litestar.response import Stream

from ostinato.api.anthropic.convert import FIELD_NAMES, to_chat
from ostinato.api.anthropic.reply import MessagesReply
from ostinato.api.anthropic.schemas import UNSUPPORTED, CountTokensRequest, MessagesRequest
from ostinato.api.base.errors import TypedErrorBody, renamed
from ostinato.api.base.timeline import context_of
from ostinato.api.http.handlers import (
    HttpRequest,
    SharedService,
    event_stream,
    json_response,
    read_body,
)
from ostinato.api.http.openapi import body_of
from ostinato.api.http.sse import NAMED_EVENTS, until_disconnect
from ostinato.api.openai.chat_prompt import prepare

__all__ = ("HANDLERS",)


@post(
    "/v1/messages",
    status_code=200,
    operation_class=body_of(MessagesRequest, "/v1/messages", events=True, error=TypedErrorBody),
)
async def messages(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """Answer a conversation in the Anthropic dialect."""
    context = context_of("/v1/messages", request.headers)
    body = await read_body(request, MessagesRequest, service, unsupported=UNSUPPORTED)
    with renamed(FIELD_NAMES):
        chat = to_chat(body)
        reply = MessagesReply(service, chat, await prepare(service, chat), context)
        await reply.prepare()
    if body.stream:
        return event_stream(reply.events(), NAMED_EVENTS)
    return json_response(await until_disconnect(request.receive, reply.whole()))


@post(
    "/v1/messages/count_tokens",
    status_code=200,
    operation_class=body_of(CountTokensRequest, "/v1/messages/count_tokens", error=TypedErrorBody),
)
async def count_tokens(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """How many tokens the prompt of such a request has."""
    body = await read_body(request, CountTokensRequest, service, unsupported=UNSUPPORTED)
    with renamed(FIELD_NAMES):
        prompt = await prepare(service, to_chat(body))
    return json_response({"input_tokens": len(prompt.token_ids)})


HANDLERS = [messages, count_tokens]
