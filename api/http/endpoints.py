"""Decorators that declare an endpoint: its path, its body, its answer, its OpenAPI entry.

Handlers decode bodies and encode answers themselves, so Litestar cannot derive the schemas. The
decorators supply them. The schema of a body or an answer refers to types in its own `$defs`. The
types are not in the document's `components`, because Litestar rewrites `components`.

The schemas are made when the document is first asked for. Making them at the start would take as
long as importing the web framework.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from litestar import delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody, Schema

from ostinato.api.base.errors import ErrorBody
from ostinato.api.http.auth import OPEN
from ostinato.api.http.sse import OPENAI_EVENTS, EventForm

__all__ = ("delete_endpoint", "get_endpoint", "post_endpoint")

Decorator = Callable[[Callable[..., Any]], HTTPRouteHandler]
Errors = Mapping[int, type[msgspec.Struct]]
_Description = tuple[RequestBody | None, dict[str, OpenAPIResponse]]

_JSON = "application/json"
_EVENTS = "text/event-stream"
_ERRORS = {
    400: "The request cannot be served as asked; the error says why.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, adapter, reply or engine.",
    413: "The body is larger than the server allows.",
    415: "The body is not declared as the media type that the endpoint takes.",
    429: "Too many requests wait or run; Retry-After says when to try again.",
    500: "The request failed in the engine or in the server.",
    503: "The request cannot be served now; Retry-After, if present, says when to try again.",
    504: "The request's deadline passed.",
}


def post_endpoint(  # noqa: PLR0913 - the parts of an endpoint
    *paths: str,
    body: type[msgspec.Struct] | Sequence[type[msgspec.Struct]] | None = None,
    answer: object = None,
    events: Sequence[object] = (),
    form: EventForm = OPENAI_EVENTS,
    error: type[msgspec.Struct] = ErrorBody,
    errors: Errors | None = None,
    media_type: str = _JSON,
    body_media_type: str = _JSON,
    is_open: bool = False,
) -> Decorator:
    """Declare a POST handler that answers 200.

    Args:
        paths: the paths of the endpoint. The OpenAPI document describes all of them. References
            in these descriptions point into the description of the first path.
        body: type of the body, or the types that it can have; None = no body.
        answer: type of the whole answer, or a tuple of types; None = any JSON object.
        events: the types that the data of a server-sent event can have; () = no stream.
        form: how the API encodes its events.
        error: type of every error response. Only used if the endpoint takes a body.
        errors: status -> type of the error response. 401 and 500 are added, and for an endpoint
            that takes a body, all statuses that the check of a request can give.
        media_type: the media type of the answer. With `answer`, there are also answers of this
            type, which are texts.
        body_media_type: the media type of the body.
        is_open: whether the endpoint needs no API key.
    """
    base = f"#/paths/{_escaped(_documented(paths[0]))}/post"

    def describe() -> _Description:
        if body is None:
            return None, _responses(base, answer, _with_common(errors), media_type)
        place = f"{base}/requestBody/content/{_escaped(body_media_type)}/schema"
        described = (
            _described_any(body, place) if isinstance(body, Sequence) else _described(body, place)
        )
        content = {body_media_type: OpenAPIMediaType(schema=described)}
        statuses = {**dict.fromkeys(_ERRORS, error), **(errors or {})}
        responses = _responses(base, answer, statuses, media_type)
        _add_events(responses, base, events, form)
        return RequestBody(content=content, required=True), responses

    return post(
        list(paths), operation_class=_operation(describe), status_code=200, opt={OPEN: is_open}
    )


def get_endpoint(
    path: str,
    *,
    answer: object = None,
    events: Sequence[object] = (),
    form: EventForm = OPENAI_EVENTS,
    errors: Errors | None = None,
    media_type: str = _JSON,
    is_open: bool = False,
) -> Decorator:
    """Declare a GET handler.

    Args:
        path: the path of the endpoint.
        answer: type of the answer; None = any JSON object.
        events: see `post_endpoint`.
        form: see `post_endpoint`.
        errors: status -> type of the error response; 401 and 500 are added.
        media_type: the media type of the answer.
        is_open: whether the endpoint needs no API key.
    """
    base = f"#/paths/{_escaped(_documented(path))}/get"

    def describe() -> _Description:
        responses = _responses(base, answer, _with_common(errors), media_type)
        _add_events(responses, base, events, form)
        return None, responses

    return get(path, operation_class=_operation(describe), opt={OPEN: is_open})


def delete_endpoint(path: str, *, answer: object, errors: Errors | None = None) -> Decorator:
    """Declare a DELETE handler that answers 200. For the arguments see `get_endpoint`."""
    base = f"#/paths/{_escaped(_documented(path))}/delete"

    def describe() -> _Description:
        return None, _responses(base, answer, _with_common(errors))

    return delete(path, status_code=200, operation_class=_operation(describe))


def _with_common(errors: Errors | None) -> Errors:
    return {401: ErrorBody, 500: ErrorBody, **(errors or {})}


def _documented(path: str) -> str:
    """The path as in the OpenAPI document: without the types of its parameters."""
    return re.sub(r":\w+}", "}", path)


def _operation(describe: Callable[[], _Description]) -> type[Operation]:
    """An operation that `describe` fills when Litestar makes the document."""

    @dataclass
    class DescribedOperation(Operation):
        def __post_init__(self) -> None:
            self.request_body, responses = describe()
            self.responses = dict(responses)

    return DescribedOperation


def _responses(
    base: str,
    answer: object,
    errors: Mapping[int, type[msgspec.Struct]],
    media_type: str = _JSON,
) -> dict[str, OpenAPIResponse]:
    def response(status: int, kind: object, description: str) -> OpenAPIResponse:
        place = f"{base}/responses/{status}/content/{_escaped(_JSON)}/schema"
        described = (
            _described_any(kind, place) if isinstance(kind, tuple) else _described(kind, place)
        )
        content = {_JSON: OpenAPIMediaType(schema=described)}
        return OpenAPIResponse(description=description, content=content)

    found = {"200": response(200, answer, "The answer.")}
    if media_type != _JSON:
        text = OpenAPIMediaType(schema=cast("Schema", {"type": "string"}))
        whole = found["200"].content if answer is not None else None
        found["200"].content = {**(whole or {}), media_type: text}
    for status, kind in errors.items():
        found[str(status)] = response(
            status, kind, _ERRORS.get(status, "Refused; the error says why.")
        )
    return found


def _add_events(
    responses: Mapping[str, OpenAPIResponse],
    base: str,
    events: Sequence[object],
    form: EventForm,
) -> None:
    """Describe the stream of events, if there is one, as another media type of the answer.

    The schema describes one event. The event's data is JSON text with a schema of its own. The last
    event of some APIs is an end mark such as `[DONE]` instead.
    """
    if not events:
        return
    place = f"{base}/responses/200/content/{_escaped(_EVENTS)}/schema"
    described = dict(cast("dict[str, Any]", _described_any(events, place)))
    types = described.pop("$defs")
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": described,
    }
    if form.end:
        data = {"anyOf": [data, {"const": form.end.decode().removeprefix("data: ").strip()}]}
    schema = {
        "description": "One event of the stream.",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["event", "data"] if form.is_named else ["data"],
        "$defs": types,
    }
    stream = OpenAPIMediaType(schema=cast("Schema", schema))
    whole = responses["200"].content
    assert whole is not None, "every answer has a content"
    responses["200"].content = {**whole, _EVENTS: stream}


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


def _described_any(kinds: Sequence[object], place: str) -> Schema:
    """The schema of a value of one of several types."""
    one_of: list[Any] = []
    types: dict[str, Any] = {}
    for kind in kinds:
        described = dict(cast("dict[str, Any]", _described(kind, place)))
        types |= described.pop("$defs", {})
        one_of += described.get("anyOf", [described])
    return cast("Schema", {"anyOf": one_of, "$defs": types})


def _escaped(part: str) -> str:
    """Escape a name for a JSON pointer."""
    return part.replace("~", "~0").replace("/", "~1")
