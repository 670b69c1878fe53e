"""The endpoints: each handler reads, asks and answers in a few lines; the work is elsewhere."""

from __future__ import annotations

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath
from litestar.response import Stream

from ostinato import __version__
from ostinato.api.base.errors import ErrorBody
from ostinato.api.base.timeline import context_of
from ostinato.api.http.handlers import (
    HttpRequest,
    SharedService,
    event_stream,
    json_response,
    read_body,
    status_response,
)
from ostinato.api.http.openapi import answer_of, body_of
from ostinato.api.http.sse import until_disconnect
from ostinato.api.observability.metrics import CONTENT_TYPE
from ostinato.api.openai import chat, completions, replies, tokenization
from ostinato.api.openai.chat_prompt import prepare, render
from ostinato.api.pooling.routes import POOLING_HANDLERS
from ostinato.api.schemas.openai import (
    ChatCompletionRequest,
    ChatResponse,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    Status,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from ostinato.api.server.admin_routes import ADMIN_HANDLERS
from ostinato.api.service.generation import check_model
from ostinato.api.service.service import Service

__all__ = ("HANDLERS",)

_STARTING: dict[int, type[msgspec.Struct]] = {503: ErrorBody}


@post(
    "/v1/chat/completions",
    status_code=200,
    operation_class=body_of(
        ChatCompletionRequest, "/v1/chat/completions", ChatResponse, events=True
    ),
)
async def chat_completions(
    request: HttpRequest, service: SharedService
) -> Response[bytes] | Stream:
    """Answer a conversation."""
    context = context_of("/v1/chat/completions", request.headers)
    body = await read_body(request, ChatCompletionRequest, service)
    chat.check(body)
    prompt = await prepare(service, body)
    reply = replies.ChatReply(service, body, prompt, context)
    await reply.prepare()
    if body.stream:
        return event_stream(reply.chunks())
    return json_response(await until_disconnect(request.receive, reply.response()))


@post(
    "/v1/completions",
    status_code=200,
    operation_class=body_of(CompletionRequest, "/v1/completions", Completion, events=True),
)
async def plain_completions(
    request: HttpRequest, service: SharedService
) -> Response[bytes] | Stream:
    """Continue one or several prompts."""
    context = context_of("/v1/completions", request.headers)
    body = await read_body(request, CompletionRequest, service)
    completions.check(body)
    prompts = completions.prompts(body)
    token_ids = await _encode_prompts(service, body, prompts)
    reply = replies.CompletionReply(service, body, prompts, token_ids, context)
    await reply.prepare()
    if body.stream:
        return event_stream(reply.chunks())
    return json_response(await until_disconnect(request.receive, reply.response()))


@get("/v1/models", operation_class=answer_of(ModelList, "/v1/models", errors=_STARTING))
async def models(service: SharedService) -> Response[bytes]:
    """The one model that is served."""
    return json_response(ModelList(data=[_card(service)]))


@get(
    "/v1/models/{name:path}",
    operation_class=answer_of(ModelCard, "/v1/models/{name}", errors={404: ErrorBody, **_STARTING}),
)
async def model(service: SharedService, name: FromPath[str]) -> Response[bytes]:
    """One model."""
    card = _card(service)
    check_model(name.removeprefix("/"), service.client.model)
    return json_response(card)


@post(
    "/tokenize",
    status_code=200,
    operation_class=body_of(TokenizeRequest, "/tokenize", TokenizeResponse),
)
async def tokenize(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """Token ids of a text or of a conversation."""
    body = await read_body(request, TokenizeRequest, service)
    tokenizer = service.tokenizer("prompt")
    tokenization.check(body)
    text, add_special_tokens = body.prompt or "", body.add_special_tokens is not False
    if body.messages is not None:
        text = await render(service, body, body.messages)
        add_special_tokens = body.add_special_tokens is True
    (token_ids,) = await service.encode(
        [text], param="prompt", add_special_tokens=add_special_tokens
    )
    return json_response(
        tokenization.to_token_response(body, token_ids, tokenizer, service.client.model)
    )


@post(
    "/detokenize",
    status_code=200,
    operation_class=body_of(DetokenizeRequest, "/detokenize", DetokenizeResponse),
)
async def detokenize(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest, service)
    text = tokenization.to_text(body, service.tokenizer("tokens"), service.client.model)
    return json_response(DetokenizeResponse(text))


@get("/health", operation_class=answer_of(Status, "/health", errors={503: Status}))
async def health(service: SharedService) -> Response[bytes]:
    """Whether the engine works: 200, or 503 with the reason."""
    problem = service.health_problem()
    status = "ok" if problem is None else "unhealthy"
    return status_response(status, problem)


@get("/live", operation_class=answer_of(Status, "/live", errors={503: Status}))
async def live(service: SharedService) -> Response[bytes]:
    """Whether this process should go on: 200, or 503 with the reason."""
    problem = service.liveness_problem()
    return status_response("ok" if problem is None else "stuck", problem)


@get("/ready", operation_class=answer_of(Status, "/ready", errors={503: Status}))
async def ready(service: SharedService) -> Response[bytes]:
    """Whether a new request would be admitted and served now: 200, or 503 with the reason."""
    refusal = service.unreadiness()
    return status_response("ready" if refusal is None else refusal.code, refusal and str(refusal))


@get("/version", operation_class=answer_of(Version, "/version"))
async def version() -> Response[bytes]:
    """The server's version."""
    return json_response(Version(__version__))


@get("/metrics", operation_class=answer_of(None, "/metrics", media_type="text/plain"))
async def metrics(service: SharedService) -> Response[bytes]:
    """Figures for Prometheus."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


HANDLERS = [
    chat_completions,
    plain_completions,
    models,
    model,
    tokenize,
    detokenize,
    health,
    live,
    ready,
    version,
    metrics,
    *POOLING_HANDLERS,
    *ADMIN_HANDLERS,
]


async def _encode_prompts(
    service: Service, body: CompletionRequest, prompts: list[str] | list[list[int]]
) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if body.bad_words:
        service.tokenizer("bad_words")
    if not texts:
        return [prompt for prompt in prompts if isinstance(prompt, list)]
    return await service.encode(texts, param="prompt", add_special_tokens=body.add_special_tokens)


def _card(service: Service) -> ModelCard:
    service.check_started()
    model = service.client.model
    return ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)
