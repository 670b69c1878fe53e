"""The OpenAI endpoints: chat and text completions, and tokenisation."""

from __future__ import annotations

from litestar import Response
from litestar.response import Stream

from ostinato.api.base.errors import ErrorBody
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
from ostinato.api.openai.preparation import (
    prepare_chat_completion,
    prepare_completion,
    prepare_detokenization,
    prepare_tokenization,
)
from ostinato.api.openai.reply import ChatReply, CompletionReply
from ostinato.api.schemas.chat_completions import ChatChunk, ChatCompletionRequest, ChatResponse
from ostinato.api.schemas.text_completions import Completion, CompletionRequest
from ostinato.api.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

__all__ = ("HANDLERS", "chat_completions", "plain_completions")


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
    prepared = await prepare(request, service, prepare_chat_completion, context)
    choose_model(request, service, prepared.model, context)
    ready = prepared.ready
    await admit(request, service, ready.constraint_field, [ready.generation], context)
    reply = ChatReply(service, prepared, context)
    return await respond(request, reply, stream=prepared.stream)


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
    prepared = await prepare(request, service, prepare_completion, context)
    choose_model(request, service, prepared.model, context)
    generations = prepared.generations
    await admit(request, service, prepared.constraint_field, generations, context)
    reply = CompletionReply(service, prepared, generations, context)
    return await respond(request, reply, stream=prepared.stream)


@post_endpoint("/tokenize", body=TokenizeRequest, answer=TokenizeResponse)
async def tokenize(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """Token ids of a text or of a conversation."""
    return json_bytes(await prepare(request, service, prepare_tokenization))


@post_endpoint("/detokenize", body=DetokenizeRequest, answer=DetokenizeResponse)
async def detokenize(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """The text of token ids."""
    return json_bytes(await prepare(request, service, prepare_detokenization))


HANDLERS = [chat_completions, plain_completions, tokenize, detokenize]
