"""The endpoints of models that give vectors or scores: embeddings, scores and rankings."""

from __future__ import annotations

from litestar import Response
from litestar.response import Stream

from ostinato.api.base.request_context import context_of
from ostinato.api.http.endpoints import post_endpoint
from ostinato.api.http.handlers import (
    HttpRequest,
    SharedService,
    choose_model,
    prepare,
    respond_whole,
)
from ostinato.api.pooling import reply
from ostinato.api.pooling.preparation import prepare_embedding, prepare_ranking, prepare_scores
from ostinato.api.pooling.schemas import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)

__all__ = ("HANDLERS", "embeddings", "rerank", "score")


@post_endpoint("/v1/embeddings", body=EmbeddingRequest, answer=EmbeddingResponse)
async def embeddings(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """A vector for each text."""
    context = context_of("/v1/embeddings", request)
    prepared = await prepare(request, service, prepare_embedding, context)
    choose_model(request, service, prepared.model, context)
    return await respond_whole(request, reply.embed(service, prepared, context))


@post_endpoint("/v1/score", "/score", body=ScoreRequest, answer=ScoreResponse)
async def score(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """Scores of pairs of texts."""
    context = context_of("/v1/score", request)
    prepared = await prepare(request, service, prepare_scores, context)
    choose_model(request, service, prepared.model, context)
    return await respond_whole(request, reply.score(service, prepared, context))


@post_endpoint("/v1/rerank", "/rerank", "/v2/rerank", body=RerankRequest, answer=RerankResponse)
async def rerank(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """Documents sorted by their relevance to a query."""
    context = context_of("/v1/rerank", request)
    prepared = await prepare(request, service, prepare_ranking, context)
    choose_model(request, service, prepared.model, context)
    return await respond_whole(request, reply.rerank(service, prepared, context))


HANDLERS = [embeddings, score, rerank]
