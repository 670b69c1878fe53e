"""The endpoints that answer with vectors, and with what follows from them."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from litestar import Response, post

from ostinato.api.base.timeline import context_of
from ostinato.api.http.handlers import HttpRequest, SharedService, json_response, read_body
from ostinato.api.http.openapi import body_of
from ostinato.api.http.sse import until_disconnect
from ostinato.api.pooling import replies as pooling_replies
from ostinato.api.schemas.pooling import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)

__all__ = ("POOLING_HANDLERS",)


@post(
    "/v1/embeddings",
    status_code=200,
    operation_class=body_of(EmbeddingRequest, "/v1/embeddings", EmbeddingResponse),
)
async def embeddings(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """A vector for each text."""
    context = context_of("/v1/embeddings", request.headers)
    body = await read_body(request, EmbeddingRequest, service)
    reply = pooling_replies.embed(service, body, context)
    return await _answer(request, reply)


@post(
    ["/v1/score", "/score"],
    status_code=200,
    operation_class=body_of(ScoreRequest, "/v1/score", ScoreResponse),
)
async def score(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """How well pairs of texts fit."""
    context = context_of("/v1/score", request.headers)
    body = await read_body(request, ScoreRequest, service)
    reply = pooling_replies.score(service, body, context)
    return await _answer(request, reply)


@post(
    ["/v1/rerank", "/rerank", "/v2/rerank"],
    status_code=200,
    operation_class=body_of(RerankRequest, "/v1/rerank", RerankResponse),
)
async def rerank(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """Documents by how well they answer a query."""
    context = context_of("/v1/rerank", request.headers)
    body = await read_body(request, RerankRequest, service)
    reply = pooling_replies.rerank(service, body, context)
    return await _answer(request, reply)


POOLING_HANDLERS = [embeddings, score, rerank]


async def _answer(request: HttpRequest, reply: Coroutine[Any, Any, Any]) -> Response[bytes]:
    try:
        return json_response(await until_disconnect(request.receive, reply))
    finally:
        reply.close()  # no-op unless it never began
