"""The bodies of `/v1/embeddings`, `/v1/score` and `/v1/rerank`: as in OpenAI, vLLM and Jina."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ostinato.api.base.timeline import Timeline
from ostinato.api.schemas.generation_fields import Int32, RequestId
from ostinato.api.schemas.usage import PromptTokensDetails

__all__ = (
    "EmbeddingData",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "PoolingFields",
    "PoolingUsage",
    "RerankDocument",
    "RerankRequest",
    "RerankResponse",
    "RerankResult",
    "ScoreData",
    "ScoreRequest",
    "ScoreResponse",
)

Texts = Annotated[list[str], msgspec.Meta(min_length=1)]
TokenLimit = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]


class PoolingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that the three endpoints share."""

    model: str | None = None  # absent = the served model
    truncate_prompt_tokens: TokenLimit | None = None  # tokens to keep; -1 = all that fit
    truncation_side: Literal["right", "left"] = "right"  # where tokens are cut off
    priority: Int32 = 0  # lower runs first under scheduler.policy=priority
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""  # equal salts share cached blocks
    request_id: RequestId | None = None  # names the reply and its log line
    user: str | None = None  # the caller's label of an end user; has no effect


class EmbeddingRequest(PoolingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]  # text, token ids, or a list of either
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None  # entries to keep, from the first on; absent = all
    pooling: Literal["mean", "last", "cls"] | None = None  # absent = the model's setting
    normalize: bool | None = None  # scale to length 1; absent = the model's setting
    add_special_tokens: bool = True  # add special tokens such as bos around texts


class ScoreRequest(PoolingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/score`: `text_1` and `text_2`, or `queries` and `documents`, their other names."""

    text_1: str | Texts | None = None  # one text for all of text_2, or one text for each
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None


class RerankRequest(PoolingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/rerank`."""

    query: str
    documents: Texts
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None  # absent or 0 = all
    return_documents: bool = True


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64 of little-endian float32


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET  # with the header x-trace: 1


class ScoreData(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: PoolingUsage
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET


class RerankDocument(msgspec.Struct, frozen=True):
    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    index: int  # index among the documents of the request
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]  # best first
    usage: PoolingUsage
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET
