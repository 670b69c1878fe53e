"""The OpenAPI document: handlers decode their bodies themselves, so it is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.spec import Components, OpenAPIMediaType, Operation, Reference, RequestBody

from ostinato import __version__

__all__ = ("body_of", "openapi_config")

_REFERENCE = "#/components/schemas/{name}"


def body_of(schema: type[msgspec.Struct]) -> type[Operation]:
    """An `operation_class` for a handler whose JSON body is `schema`."""

    @dataclass
    class OperationWithBody(Operation):
        def __post_init__(self) -> None:
            reference = Reference(ref=_REFERENCE.format(name=schema.__name__))
            self.request_body = RequestBody(
                content={"application/json": OpenAPIMediaType(schema=reference)}, required=True
            )

    return OperationWithBody


def openapi_config(schemas: list[type[msgspec.Struct]]) -> OpenAPIConfig:
    """The document's frame, with the bodies' schemas as components."""
    _, components = msgspec.json.schema_components(schemas, ref_template=_REFERENCE)
    typed: dict[str, Any] = dict(components)
    return OpenAPIConfig(
        title="Ostinato", version=__version__, components=Components(schemas=typed)
    )
