"""Prepares requests of `/v1/embeddings`, `/v1/score` and `/v1/rerank`.

The functions keep no state between requests. They run on the event loop or in a fork
(`api/preparation/preparer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ostinato.api.pooling.schemas import (
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from ostinato.api.preparation.preparation import Arrival, Preparation
from ostinato.api.schemas.prompt_inputs import read_inputs
from ostinato.api.service.reply_state import new_id
from ostinato.runtime.client.pooling import (
    check_pooling,
    check_score_head,
    make_pairs,
    pair_token_ids,
    require_task,
)
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.params import PoolingKind, PoolingParams

__all__ = (
    "FUNCTIONS",
    "PreparedEmbedding",
    "PreparedPooling",
    "PreparedRanking",
    "PreparedScores",
    "prepare_embedding",
    "prepare_ranking",
    "prepare_scores",
)

_MAX_INPUTS = 2048
_MAX_PAIRS = 10_000


class PreparedPooling(msgspec.Struct, frozen=True, kw_only=True):
    """Texts for the engine, and the fields of the body that all three endpoints need."""

    id: str
    model: str | None
    batch: list[list[int]]
    params: PoolingParams
    param: str  # the field that an error about a text names
    priority: int
    cache_salt: str


class PreparedEmbedding(PreparedPooling, frozen=True, kw_only=True):
    encoding_format: Literal["float", "base64"]


class PreparedScores(PreparedPooling, frozen=True, kw_only=True):
    # The two texts of each pair, as indices into the batch. None = each entry of the batch is a
    # pair, which a classification head reads.
    pairs: list[tuple[int, int]] | None


class PreparedRanking(PreparedScores, frozen=True, kw_only=True):
    documents: list[str] | None  # documents for the reply; None = not requested
    top_n: int | None


def prepare_embedding(preparation: Preparation, data: bytes, arrival: Arrival) -> PreparedEmbedding:
    """Prepare a request of `/v1/embeddings`.

    Raises:
        InvalidRequestError: the body is not valid, the model makes no embeddings, a value is out of
            range, there are too many inputs, or an input does not fit.
    """
    body = preparation.decode(data, arrival, EmbeddingRequest)
    model = preparation.model
    require_task(model, ServedTask.embed)
    params = PoolingParams(
        kind=model.pooling if body.pooling is None else PoolingKind(body.pooling),
        normalize=model.normalize if body.normalize is None else body.normalize,
        dimensions=body.dimensions,
    )
    batch = _encode_inputs(preparation, body)
    _check(batch, params, model, "input")
    return PreparedEmbedding(
        id=new_id("embd", body.request_id, arrival.request_id),
        model=body.model,
        batch=batch,
        params=params,
        param="input",
        priority=body.priority,
        cache_salt=body.cache_salt,
        encoding_format=body.encoding_format,
    )


def prepare_scores(preparation: Preparation, data: bytes, arrival: Arrival) -> PreparedScores:
    """Prepare a request of `/v1/score`.

    Raises:
        InvalidRequestError: the body is not valid, the model makes neither scores nor embeddings,
            the texts do not form pairs, there are too many pairs, or a text is too long.
    """
    body = preparation.decode(data, arrival, ScoreRequest)
    first_name, second_name = _names(body)
    pairs = make_pairs(_texts(body, first_name), _texts(body, second_name))
    reply_id = new_id("score", body.request_id, arrival.request_id)
    return _scores(preparation, body, pairs, reply_id, second_name)


def prepare_ranking(preparation: Preparation, data: bytes, arrival: Arrival) -> PreparedRanking:
    """Prepare a request of `/v1/rerank`.

    Raises:
        InvalidRequestError: the body is not valid, the model makes neither scores nor embeddings,
            there are too many documents, or a document does not fit.
    """
    body = preparation.decode(data, arrival, RerankRequest)
    pairs = [(body.query, document) for document in body.documents]
    reply_id = new_id("rerank", body.request_id, arrival.request_id)
    scores = _scores(preparation, body, pairs, reply_id, "documents")
    return PreparedRanking(
        **{name: getattr(scores, name) for name in PreparedScores.__struct_fields__},
        documents=body.documents if body.return_documents else None,
        top_n=body.top_n,
    )


FUNCTIONS = (prepare_embedding, prepare_scores, prepare_ranking)


def _scores(
    preparation: Preparation,
    body: PoolingFields,
    pairs: list[tuple[str, str]],
    reply_id: str,
    param: str,
) -> PreparedScores:
    """Prepare the pairs as inputs of the model.

    If the model has a classification head, each pair is one input. Otherwise each text is an input
    by itself, and the score of a pair is the cosine of the two texts' vectors.
    """
    model = preparation.model
    if len(pairs) > _MAX_PAIRS:
        raise InvalidRequestError(
            f"{param} makes {len(pairs)} pairs, and a request may have at most {_MAX_PAIRS}:"
            " send several requests",
            param=param,
            code="invalid_value",
        )
    indices = None
    if ServedTask.classify in model.tasks:
        check_score_head(model)
        batch = _encode_pairs(preparation, body, pairs, param)
        params = PoolingParams(kind=model.pooling, classify=True)
    else:
        require_task(model, ServedTask.embed)
        places = {
            text: place
            for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))
        }
        indices = [(places[one], places[other]) for one, other in pairs]
        batch = _encode_texts(preparation, body, list(places), param, add_special_tokens=True)
        params = PoolingParams(kind=model.pooling, normalize=True)
    _check(batch, params, model, param, has_segments=indices is None)
    return PreparedScores(
        id=reply_id,
        model=body.model,
        batch=batch,
        params=params,
        param=param,
        priority=body.priority,
        cache_salt=body.cache_salt,
        pairs=indices,
    )


def _check(
    batch: Sequence[list[int]],
    params: PoolingParams,
    model: ServedModel,
    param: str,
    *,
    has_segments: bool = False,
) -> None:
    """Refuse texts that the model cannot take. An error about a text names the field `param`."""
    try:
        for token_ids in batch:
            check_pooling(token_ids, params, model, has_segments=has_segments)
    except InvalidRequestError as error:
        if error.param != "input":
            raise
        text = param + str(error).removeprefix("input")
        raise InvalidRequestError(text, param=param, code=error.code) from error


def _encode_inputs(preparation: Preparation, body: EmbeddingRequest) -> list[list[int]]:
    inputs = read_inputs(body.input, "input")
    if len(inputs) > _MAX_INPUTS:
        raise InvalidRequestError(
            f"input has {len(inputs)} inputs, and a request may have at most {_MAX_INPUTS}:"
            " send several requests",
            param="input",
            code="invalid_value",
        )
    if isinstance(inputs[0], str):
        texts = [text for text in inputs if isinstance(text, str)]
        special = body.add_special_tokens
        return _encode_texts(preparation, body, texts, "input", add_special_tokens=special)
    batch = [token_ids for token_ids in inputs if isinstance(token_ids, list)]
    limit = _limit(body, preparation.model)
    if limit is None:
        return batch
    keeps_start = body.truncation_side == "right"
    return [ids[:limit] if keeps_start else ids[-limit:] for ids in batch]


def _encode_texts(
    preparation: Preparation,
    body: PoolingFields,
    texts: Sequence[str],
    param: str,
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    limit = _limit(body, preparation.model)
    encoder = preparation.encoder
    tokenizer = encoder.tokenizer(param)
    preparation.begin_prompt(param)
    if limit is None:
        return [
            encoder.encode(text, body, param=param, add_special_tokens=add_special_tokens)
            for text in texts
        ]
    return [
        tokenizer.encode_at_most(
            text, limit, side=body.truncation_side, add_special_tokens=add_special_tokens
        )
        for text in texts
    ]


def _encode_pairs(
    preparation: Preparation, body: PoolingFields, pairs: list[tuple[str, str]], param: str
) -> list[list[int]]:
    encoder, model = preparation.encoder, preparation.model
    tokenizer = encoder.tokenizer(param)
    limit = _limit(body, model)
    preparation.begin_prompt(param)
    if limit is None:
        for pair in pairs:
            encoder.check_length("".join(pair), param)
    return [
        pair_token_ids(*tokenizer.encode_pair(a, b, limit=limit, side=body.truncation_side), model)
        for a, b in pairs
    ]


def _limit(body: PoolingFields, model: ServedModel) -> int | None:
    """The number of tokens of an input to keep; None = all."""
    limit = body.truncate_prompt_tokens
    if limit == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be null, -1 (as many as fit) or in [1, 2147483647], got 0",
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
