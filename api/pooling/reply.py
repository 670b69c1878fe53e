"""The replies of `/v1/embeddings`, `/v1/score` and `/v1/rerank`."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ostinato.api.base.request_context import RequestContext
from ostinato.api.pooling.schemas import (
    EmbeddingData,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingFields,
    PoolingUsage,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
)
from ostinato.api.schemas.prompt_inputs import read_inputs
from ostinato.api.schemas.usage import PromptTokensDetails
from ostinato.api.service.reply_state import new_id
from ostinato.api.service.service import Service
from ostinato.runtime.client.pooling import (
    check_pooling,
    check_score_head,
    cosine,
    make_pairs,
    numbers,
    pair_token_ids,
    require_task,
)
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.outputs import PooledOutput
from ostinato.runtime.types.params import PoolingKind, PoolingParams

__all__ = ("embed", "rerank", "score")


class _Reply(NamedTuple):
    """A request while it runs."""

    service: Service
    id: str
    body: PoolingFields
    context: RequestContext


async def embed(
    service: Service, body: EmbeddingRequest, context: RequestContext
) -> EmbeddingResponse:
    """The answer of `/v1/embeddings`.

    Raises:
        InvalidRequestError: a value is out of range, or an input does not fit.
    """
    model = service.client.model
    require_task(model, ServedTask.embed)
    params = PoolingParams(
        kind=model.pooling if body.pooling is None else PoolingKind(body.pooling),
        normalize=model.normalize if body.normalize is None else body.normalize,
        dimensions=body.dimensions,
    )
    batch = await _encode_inputs(service, body)
    reply_id = new_id("embd", body, context)
    reply = _Reply(service, reply_id, body, context)
    outputs = await _pool(reply, batch, params, "input")
    return EmbeddingResponse(
        id=reply_id,
        created=int(time.time()),
        model=model.name,
        data=[
            EmbeddingData(index=index, embedding=_embedding(output, body.encoding_format))
            for index, output in enumerate(outputs)
        ],
        usage=_usage(outputs),
        trace=context.report(),
    )


async def score(service: Service, body: ScoreRequest, context: RequestContext) -> ScoreResponse:
    """The answer of `/v1/score`.

    Raises:
        InvalidRequestError: the texts do not form pairs, or one is too long.
    """
    first_name, second_name = _names(body)
    pairs = make_pairs(_texts(body, first_name), _texts(body, second_name))
    reply_id = new_id("score", body, context)
    reply = _Reply(service, reply_id, body, context)
    scores, usage = await _scores(reply, pairs, second_name)
    return ScoreResponse(
        id=reply_id,
        created=int(time.time()),
        model=service.client.model.name,
        data=[ScoreData(index=index, score=value) for index, value in enumerate(scores)],
        usage=usage,
        trace=context.report(),
    )


async def rerank(service: Service, body: RerankRequest, context: RequestContext) -> RerankResponse:
    """The answer of `/v1/rerank`: documents by descending score; equal scores keep their order.

    Raises:
        InvalidRequestError: a document does not fit.
    """
    reply_id = new_id("rerank", body, context)
    pairs = [(body.query, document) for document in body.documents]
    reply = _Reply(service, reply_id, body, context)
    scores, usage = await _scores(reply, pairs, "documents")
    ranked = sorted(range(len(pairs)), key=lambda index: -scores[index])
    return RerankResponse(
        id=reply_id,
        model=service.client.model.name,
        results=[
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document=(
                    RerankDocument(body.documents[index])
                    if body.return_documents
                    else msgspec.UNSET
                ),
            )
            for index in ranked[: body.top_n or None]
        ],
        usage=usage,
        trace=context.report(),
    )


async def _scores(
    reply: _Reply, pairs: list[tuple[str, str]], param: str
) -> tuple[list[float], PoolingUsage]:
    """One score per pair: of the classification head if the model has one, else the cosine."""
    service, body = reply.service, reply.body
    model = service.client.model
    if ServedTask.classify in model.tasks:
        check_score_head(model)
        batch = await _encode_pairs(service, body, pairs, param)
        params = PoolingParams(kind=model.pooling, classify=True)
        outputs = await _pool(reply, batch, params, param)
        return [numbers(output.data)[0] for output in outputs], _usage(outputs)
    require_task(model, ServedTask.embed)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    batch = await _encode_texts(service, body, texts, param, add_special_tokens=True)
    params = PoolingParams(kind=model.pooling, normalize=True)
    outputs = await _pool(reply, batch, params, param)
    vectors = {text: output.data for text, output in zip(texts, outputs, strict=True)}
    return [cosine(vectors[a], vectors[b]) for a, b in pairs], _usage(outputs)


async def _pool(
    reply: _Reply, batch: list[list[int]], params: PoolingParams, param: str
) -> list[PooledOutput]:
    """The vectors of all inputs; none is computed if one of them is refused."""
    service, body = reply.service, reply.body
    try:
        for token_ids in batch:
            check_pooling(token_ids, params, service.client.model)
        service.admission.check_prompts(list(map(len, batch)))
    except InvalidRequestError as error:
        if error.param not in ("input", "prompt"):
            raise
        text = str(error)
        if text.startswith("input"):
            text = param + text.removeprefix("input")
        raise InvalidRequestError(text, param=param, code=error.code) from error
    return await service.runner.pool(
        reply.id,
        batch,
        params,
        reply.context,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


async def _encode_inputs(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    inputs = read_inputs(body.input, "input")
    if isinstance(inputs[0], str):
        texts = [text for text in inputs if isinstance(text, str)]
        return await _encode_texts(
            service, body, texts, "input", add_special_tokens=body.add_special_tokens
        )
    batch = [token_ids for token_ids in inputs if isinstance(token_ids, list)]
    limit = _limit(body, service.client.model)
    if limit is None:
        return batch
    keeps_start = body.truncation_side == "right"
    return [ids[:limit] if keeps_start else ids[-limit:] for ids in batch]


async def _encode_texts(
    service: Service,
    body: PoolingFields,
    texts: Sequence[str],
    param: str,
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    limit = _limit(body, service.client.model)
    if limit is None:
        return await service.encoder.encode(
            texts, param=param, add_special_tokens=add_special_tokens
        )
    tokenizer = service.encoder.tokenizer(param)
    return await asyncio.to_thread(
        lambda: [
            tokenizer.encode_at_most(
                text,
                limit,
                side=body.truncation_side,
                add_special_tokens=add_special_tokens,
            )
            for text in texts
        ]
    )


async def _encode_pairs(
    service: Service, body: PoolingFields, pairs: list[tuple[str, str]], param: str
) -> list[list[int]]:
    tokenizer, model = service.encoder.tokenizer(param), service.client.model
    limit = _limit(body, model)
    return await asyncio.to_thread(
        lambda: [
            pair_token_ids(
                *tokenizer.encode_pair(a, b, limit=limit, side=body.truncation_side), model
            )
            for a, b in pairs
        ]
    )


def _limit(body: PoolingFields, model: ServedModel) -> int | None:
    """Number of tokens to keep of an input; None = all."""
    limit = body.truncate_prompt_tokens
    if limit == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be null, -1 (as many as fit) or at least 1, got 0",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    return model.max_model_len if limit == -1 else limit


def _names(body: ScoreRequest) -> tuple[str, str]:
    """The pair of field names that the request uses."""
    for names in (("text_1", "text_2"), ("queries", "documents")):
        given = [name for name in names if getattr(body, name) is not None]
        if given:
            break
    else:
        given = []
    others = {"text_1", "text_2", "queries", "documents"}.difference(given)
    if len(given) != 2 or any(getattr(body, name) is not None for name in others):
        raise InvalidRequestError(
            "give text_1 and text_2, or queries and documents", param="text_1", code="missing_field"
        )
    return given[0], given[1]


def _texts(body: ScoreRequest, name: str) -> list[str]:
    value = getattr(body, name)
    return [value] if isinstance(value, str) else value


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
