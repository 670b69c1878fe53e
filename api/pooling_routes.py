"""The endpoints that answer with vectors, and with what follows from them."""

from __future__ import annotations

from litestar import Response, post

from ostinato.api import pooling_replies
from ostinato.api.http import HttpRequest, SharedService, json_response, read_body
from ostinato.api.openapi import body_of
from ostinato.api.pooling_schemas import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from ostinato.api.stream import until_disconnect

__all__ = ("POOLING_HANDLERS",)


@post(
    "/v1/embeddings",
    status_code=200,
    operation_class=body_of(EmbeddingRequest, "/v1/embeddings", EmbeddingResponse),
)
async def embeddings(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """A vector for each text."""
    body = await read_body(request, EmbeddingRequest, service)
    reply = pooling_replies.embed(service, body)
    return json_response(await until_disconnect(request.receive, reply))


@post(
    ["/v1/score", "/score"],
    status_code=200,
    operation_class=body_of(ScoreRequest, "/v1/score", ScoreResponse),
)
async def score(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """How well pairs of texts fit."""
    body = await read_body(request, ScoreRequest, service)
    reply = pooling_replies.score(service, body)
    return json_response(await until_disconnect(request.receive, reply))


@post(
    ["/v1/rerank", "/rerank", "/v2/rerank"],
    status_code=200,
    operation_class=body_of(RerankRequest, "/v1/rerank", RerankResponse),
)
async def rerank(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """Documents by how well they answer a query."""
    body = await read_body(request, RerankRequest, service)
    reply = pooling_replies.rerank(service, body)
    return json_response(await until_disconnect(request.receive, reply))


POOLING_HANDLERS = [embeddings, score, rerank]
