"""`POST /invocations`, which SageMaker calls, and `POST /ping`, which answers like `GET /ping`."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from ostinato.api.base.errors import ErrorBody
from ostinato.api.http.endpoints import post_endpoint
from ostinato.api.http.handlers import HttpRequest, SharedService, Status, body_bytes
from ostinato.api.openai.routes import chat_completions, plain_completions
from ostinato.api.pooling.routes import embeddings, rerank, score
from ostinato.api.pooling.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from ostinato.api.schemas.chat_completions import ChatChunk, ChatCompletionRequest
from ostinato.api.schemas.text_completions import Completion, CompletionRequest
from ostinato.api.server.routes import ping
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("HANDLERS",)

# The first field of this list that a body has decides the endpoint, whatever the body's order. As
# in vLLM, `input` means embeddings.
_ENDPOINTS: dict[str, HTTPRouteHandler] = {
    "messages": chat_completions,
    "prompt": plain_completions,
    "input": embeddings,
    "query": rerank,
    "text_1": score,
    "queries": score,
}


class _Fields(msgspec.Struct):
    """The fields of a body that decide the endpoint."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    queries: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


@post_endpoint(
    "/invocations",
    body=(ChatCompletionRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest),
    events=(ChatChunk, Completion, ErrorBody),
)
async def invocations(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """Answer a body of chat, completions, embeddings, rerank or score, by its fields."""
    name, is_certain = None, True
    try:
        # The values are not decoded here, and other fields are skipped. The endpoint decodes them.
        fields = msgspec.json.decode(await body_bytes(request), type=_Fields)
        given = (one for one in _ENDPOINTS if getattr(fields, one) is not msgspec.UNSET)
        name = next(given, None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        is_certain = False  # the endpoint reports what is wrong with the body
    if name is None and is_certain:
        raise InvalidRequestError(
            f"the body has none of the fields {', '.join(_ENDPOINTS)}; send one, which decides"
            " between a chat, a completion, an embedding, a ranking and a score",
            param="messages",
            code="missing_field",
        )
    handler: Any = _ENDPOINTS[name or "messages"]
    return await handler.fn(request=request, service=service)


@post_endpoint("/ping", answer=Status, errors={503: Status}, is_open=True)
async def post_ping(service: SharedService) -> Response[bytes]:
    """The same as `GET /ping`."""
    handler: Any = ping
    return await handler.fn(service=service)


HANDLERS = [invocations, post_ping]
