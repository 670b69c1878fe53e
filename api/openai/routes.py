"""The OpenAI endpoints: chat and text completions, and tokenisation."""

from __future__ import annotations

from litestar import Response
from litestar.response import Stream

from ostinato.api.base.errors import ErrorBody
from ostinato.api.base.request_context import context_of
from ostinato.api.chat.chat_prompt import render
from ostinato.api.http.endpoints import post_endpoint
from ostinato.api.http.handlers import (
    HttpRequest,
    SharedService,
    json_response,
    read_body,
    respond,
)
from ostinato.api.openai import tokenization
from ostinato.api.openai.reply import prepare_chat_reply, prepare_completion_reply
from ostinato.api.schemas.chat_completions import ChatChunk, ChatCompletionRequest, ChatResponse
from ostinato.api.schemas.text_completions import Completion, CompletionRequest
from ostinato.api.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

__all__ = ("HANDLERS",)


@post_endpoint(
    "/v1/chat/completions",
    body=ChatCompletionRequest,
    answer=ChatResponse,
    events=(ChatChunk, ErrorBody),
)
async def chat_completions(
    request: HttpRequest, service: SharedService
) -> Response[bytes] | Stream:
    """Answer a conversation."""
    context = context_of("/v1/chat/completions", request)
    body = await read_body(request, ChatCompletionRequest, service)
    reply = await prepare_chat_reply(service, body, context)
    return await respond(request, reply, stream=body.stream)


@post_endpoint(
    "/v1/completions",
    body=CompletionRequest,
    answer=Completion,
    events=(Completion, ErrorBody),
)
async def plain_completions(
    request: HttpRequest, service: SharedService
) -> Response[bytes] | Stream:
    """Continue one or several prompts."""
    context = context_of("/v1/completions", request)
    body = await read_body(request, CompletionRequest, service)
    reply = await prepare_completion_reply(service, body, context)
    return await respond(request, reply, stream=body.stream)


@post_endpoint("/tokenize", body=TokenizeRequest, answer=TokenizeResponse)
async def tokenize(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """Token ids of a text or of a conversation."""
    body = await read_body(request, TokenizeRequest, service)
    tokenizer = service.encoder.tokenizer("prompt")
    tokenization.check(body)
    text, add_special_tokens = body.prompt or "", body.add_special_tokens is not False
    if body.messages is not None:
        text = await render(service, body, body.messages)
        add_special_tokens = body.add_special_tokens is True
    (token_ids,) = await service.encoder.encode(
        [text], param="prompt", add_special_tokens=add_special_tokens
    )
    return json_response(
        tokenization.to_token_response(body, token_ids, tokenizer, service.client.model)
    )


@post_endpoint("/detokenize", body=DetokenizeRequest, answer=DetokenizeResponse)
async def detokenize(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest, service)
    text = tokenization.to_text(body, service.encoder.tokenizer("tokens"), service.client.model)
    return json_response(DetokenizeResponse(text))


HANDLERS = [chat_completions, plain_completions, tokenize, detokenize]
