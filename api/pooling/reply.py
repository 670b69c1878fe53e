"""The replies of `/v1/embeddings`, `/v1/score` and `/v1/rerank`."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from ostinato.api.base.request_context import RequestContext
from ostinato.api.pooling.preparation import (
    PreparedEmbedding,
    PreparedPooling,
    PreparedRanking,
    PreparedScores,
)
from ostinato.api.pooling.schemas import (
    EmbeddingData,
    EmbeddingResponse,
    PoolingUsage,
    RerankDocument,
    RerankResponse,
    RerankResult,
    ScoreData,
    ScoreResponse,
)
from ostinato.api.schemas.usage import PromptTokensDetails
from ostinato.api.service.service import Service
from ostinato.runtime.client.pooling import cosine, numbers
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.outputs import PooledOutput

__all__ = ("embed", "rerank", "score")

_AT_ONCE = 16  # vectors that are encoded or compared between two yields to the event loop


async def embed(
    service: Service, prepared: PreparedEmbedding, context: RequestContext
) -> EmbeddingResponse:
    """The answer of `/v1/embeddings`.

    Raises:
        InvalidRequestError: an input is longer than the server allows.
        OverloadedError: the queue is full.
        DeadlineError, EngineError: see `RequestRunner.pool`.
    """
    outputs = await _pool(service, prepared, context)
    data: list[msgspec.Raw] = []
    for index, output in enumerate(outputs):
        one = EmbeddingData(index=index, embedding=_embedding(output, prepared.encoding_format))
        data.append(msgspec.Raw(msgspec.json.encode(one)))
        if index % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return EmbeddingResponse(
        id=prepared.id,
        created=int(time.time()),
        model=service.model_name(context),
        data=cast("list[EmbeddingData]", data),  # each entry is JSON text
        usage=_usage(outputs),
        trace=context.report(),
    )


async def score(
    service: Service, prepared: PreparedScores, context: RequestContext
) -> ScoreResponse:
    """The answer of `/v1/score`.

    Raises:
        InvalidRequestError: a text is longer than the server allows.
        OverloadedError: the queue is full.
        DeadlineError, EngineError: see `RequestRunner.pool`.
    """
    scores, usage = await _scores(service, prepared, context)
    return ScoreResponse(
        id=prepared.id,
        created=int(time.time()),
        model=service.model_name(context),
        data=[ScoreData(index=index, score=value) for index, value in enumerate(scores)],
        usage=usage,
        trace=context.report(),
    )


async def rerank(
    service: Service, prepared: PreparedRanking, context: RequestContext
) -> RerankResponse:
    """The answer of `/v1/rerank`: documents by descending score. Equal scores keep their order.

    Raises:
        InvalidRequestError: a document is longer than the server allows.
        OverloadedError: the queue is full.
        DeadlineError, EngineError: see `RequestRunner.pool`.
    """
    scores, usage = await _scores(service, prepared, context)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    documents = prepared.documents
    return RerankResponse(
        id=prepared.id,
        model=service.model_name(context),
        results=[
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document=(msgspec.UNSET if documents is None else RerankDocument(documents[index])),
            )
            for index in ranked[: prepared.top_n or None]
        ],
        usage=usage,
        trace=context.report(),
    )


async def _scores(
    service: Service, prepared: PreparedScores, context: RequestContext
) -> tuple[list[float], PoolingUsage]:
    """One score per pair."""
    outputs = await _pool(service, prepared, context)
    if prepared.pairs is None:
        return [numbers(output.data)[0] for output in outputs], _usage(outputs)
    scores: list[float] = []
    for number, (one, other) in enumerate(prepared.pairs):
        scores.append(cosine(outputs[one].data, outputs[other].data))
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return scores, _usage(outputs)


async def _pool(
    service: Service, prepared: PreparedPooling, context: RequestContext
) -> list[PooledOutput]:
    """The pooled outputs of all inputs. If one input is refused, nothing is computed."""
    try:
        service.admission.check_prompts(list(map(len, prepared.batch)))
    except InvalidRequestError as error:
        if error.param != "prompt":
            raise
        raise InvalidRequestError(str(error), param=prepared.param, code=error.code) from error
    return await service.runner.pool(
        prepared.id,
        prepared.batch,
        prepared.params,
        context,
        priority=prepared.priority,
        cache_salt=prepared.cache_salt,
    )


def _embedding(output: PooledOutput, encoding_format: str) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(output.data).decode()
    return numbers(output.data)


def _usage(outputs: Sequence[PooledOutput]) -> PoolingUsage:
    num_tokens = sum(output.num_prompt_tokens for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return PoolingUsage(
        prompt_tokens=num_tokens,
        total_tokens=num_tokens,
        prompt_tokens_details=PromptTokensDetails(num_cached),
    )
