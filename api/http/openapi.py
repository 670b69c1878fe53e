"""The OpenAPI document: handlers decode their bodies and encode their answers themselves, so it is
told of them.

The types within a body or an answer stay beside it, under `$defs`: the framework rewrites the
components.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import msgspec
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody, Schema

from ostinato.api.base.errors import ErrorBody

__all__ = ("answer_of", "body_of")

_JSON = "application/json"
_ERRORS = {
    400: "The request can not be served as asked; the error names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is larger than server.max_body_mib.",
    415: "The body is not declared as JSON.",
    429: "Too much is waiting; Retry-After says when to try again.",
    500: "The engine gave the request up.",
    503: "The engine does not run, or the server is shutting down; Retry-After says when to try.",
    504: "The request's deadline passed.",
}


def body_of(
    schema: type[msgspec.Struct],
    path: str,
    answer: object = None,
    *,
    events: bool = False,
    error: type[msgspec.Struct] = ErrorBody,
) -> type[Operation]:
    """An `operation_class` for the POST handler of `path` whose JSON body is `schema`.

    Args:
        schema: of the body.
        path: of the handler; the first of several.
        answer: type of the whole answer; None = some JSON object.
        events: whether it can be a stream of server-sent events too.
        error: type of the body of every error.
    """
    base = f"#/paths/{_escaped(path)}/post"
    place = f"{base}/requestBody/content/{_escaped(_JSON)}/schema"
    content = {_JSON: OpenAPIMediaType(schema=_described(schema, place))}
    body = RequestBody(content=content, required=True)
    responses = _responses(base, answer, dict.fromkeys(_ERRORS, error))
    if events:
        stream = OpenAPIMediaType(schema=cast("Schema", {"type": "string"}))
        whole = responses["200"].content
        assert whole is not None, "every answer has a content"
        responses["200"].content = {**whole, "text/event-stream": stream}
    return _operation(body, responses)


def answer_of(
    answer: object,
    path: str,
    *,
    method: str = "get",
    errors: Mapping[int, type[msgspec.Struct]] | None = None,
    media_type: str = _JSON,
) -> type[Operation]:
    """An `operation_class` for a handler of `path` without a body.

    Args:
        answer: type of the answer; None = some JSON object.
        path: of the handler.
        method: in lower case.
        errors: status -> type of its body; beside 401 and 500.
        media_type: of the answer.
    """
    base = f"#/paths/{_escaped(path)}/{method}"
    responses = _responses(base, answer, {401: ErrorBody, 500: ErrorBody, **(errors or {})})
    if media_type != _JSON:
        text = OpenAPIMediaType(schema=cast("Schema", {"type": "string"}))
        responses["200"].content = {media_type: text}
    return _operation(None, responses)


def _operation(body: RequestBody | None, answers: dict[str, OpenAPIResponse]) -> type[Operation]:
    @dataclass
    class DescribedOperation(Operation):
        def __post_init__(self) -> None:
            self.request_body = body
            self.responses = dict(answers)

    return DescribedOperation


def _responses(
    base: str, answer: object, errors: Mapping[int, type[msgspec.Struct]]
) -> dict[str, OpenAPIResponse]:
    def response(status: int, kind: object, description: str) -> OpenAPIResponse:
        place = f"{base}/responses/{status}/content/{_escaped(_JSON)}/schema"
        content = {_JSON: OpenAPIMediaType(schema=_described(kind, place))}
        return OpenAPIResponse(description=description, content=content)

    found = {"200": response(200, answer, "The answer.")}
    for status, kind in errors.items():
        found[str(status)] = response(status, kind, _ERRORS.get(status, "Not possible now."))
    return found


def _described(kind: object, place: str) -> Schema:
    if kind is None:
        return cast("Schema", {"type": "object"})
    template = place.replace("{", "{{").replace("}", "}}") + "/$defs/{name}"
    (described,), types = msgspec.json.schema_components([kind], ref_template=template)
    reference = described.get("$ref", "")
    if reference:
        described = dict(types.pop(reference.rpartition("/")[2]))
    if types:
        described = {**described, "$defs": types}
    return cast("Schema", described)


def _escaped(part: str) -> str:
    """A name within a JSON pointer."""
    return part.replace("~", "~0").replace("/", "~1")
