"""The Anthropic endpoints: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import secrets

import msgspec
from litestar import Response
from litestar.response import Stream

from ostinato.api.anthropic.convert import FIELD_NAMES, to_chat
from ostinato.api.anthropic.message_events import MessageEvent
from ostinato.api.anthropic.reply import MessagesReply
from ostinato.api.anthropic.schemas import (
    UNSUPPORTED,
    CountTokensRequest,
    MessagesRequest,
    Reply,
    TokenCount,
)
from ostinato.api.base.errors import TypedErrorBody, renamed
from ostinato.api.base.request_context import context_of
from ostinato.api.chat.chat_generation import plan_chat, prepare_chat
from ostinato.api.chat.chat_prompt import reasons
from ostinato.api.http.endpoints import post_endpoint
from ostinato.api.http.handlers import (
    HttpRequest,
    SharedService,
    json_response,
    read_body,
    respond,
)
from ostinato.api.http.sse import NAMED_EVENTS
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.service.generation import check_fields
from ostinato.api.service.prompt_report import prompt_report
from ostinato.api.service.service import Service

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
    """Answer a conversation in the Anthropic dialect."""
    context = context_of("/v1/messages", request)
    body = await read_body(request, MessagesRequest, service, unsupported=UNSUPPORTED)
    message_id = f"msg_{secrets.token_hex(12)}"
    with renamed(FIELD_NAMES):
        chat = _to_chat(service, body)
        ready = await prepare_chat(service, chat, request_id=message_id, context=context)
    report = await prompt_report(
        service.encoder, chat, ready.prompt_text, ready.generation, add_special_tokens=False
    )
    reply = MessagesReply(service, body, ready, report, context)
    return await respond(request, reply, stream=body.stream, form=NAMED_EVENTS)


@post_endpoint(
    "/v1/messages/count_tokens", body=CountTokensRequest, answer=TokenCount, error=TypedErrorBody
)
async def count_tokens(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """How many tokens the prompt of such a request has."""
    body = await read_body(request, CountTokensRequest, service, unsupported=UNSUPPORTED)
    with renamed(FIELD_NAMES):
        prompt, _ = await plan_chat(service, _to_chat(service, body))
    return json_response(TokenCount(len(prompt.token_ids)))


HANDLERS = [messages, count_tokens]


def _to_chat(service: Service, body: CountTokensRequest) -> ChatCompletionRequest:
    """The equivalent chat request for the served model."""
    chat = to_chat(body)
    check_fields(chat)
    if chat.thinking_token_budget is None or reasons(service, chat):
        return chat
    # A model that does not reason keeps every budget.
    return msgspec.structs.replace(chat, thinking_token_budget=None)
