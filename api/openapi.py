"""The OpenAPI document: handlers decode their bodies themselves, so it is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import msgspec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema

__all__ = ("body_of",)


def body_of(schema: type[msgspec.Struct], path: str) -> type[Operation]:
    """An `operation_class` for the POST handler of `path` whose JSON body is `schema`.

    The types within it stay beside it, under `$defs`: the framework rewrites the components.
    """
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    _, types = msgspec.json.schema_components([schema], ref_template=place + "/$defs/{name}")
    described: dict[str, Any] = types.pop(schema.__name__)
    if types:
        described["$defs"] = types

    @dataclass
    class OperationWithBody(Operation):
        def __post_init__(self) -> None:
            content = OpenAPIMediaType(schema=cast("Schema", described))
            self.request_body = RequestBody(content={"application/json": content}, required=True)

    return OperationWithBody
