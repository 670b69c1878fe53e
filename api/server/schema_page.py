"""`/schema`: the OpenAPI document, as a page and as JSON.

The page has no script and loads no other file. Its Content-Security-Policy enforces that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
import msgspec
from litestar import Litestar, Request, Response, Router
from litestar.enums import MediaType, OpenAPIMediaType

__all__ = ("schema_router",)

_PATH = "/schema"

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'">
<link rel="icon" href="data:,">
<title>{{ info.title }} {{ info.version }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, .verb { font-family: ui-monospace, monospace; font-size: .9em }
.verb { display: inline-block; min-width: 4.5em; font-weight: 600 }
details { border-top: 1px solid #8884; padding: .3rem 0 }
details details { margin-left: 1rem }
summary { cursor: pointer }
table { border-collapse: collapse; width: 100%; margin: .3rem 0 .8rem }
td { border-top: 1px solid #8883; padding: .15rem .6rem .15rem 0; vertical-align: top }
h1 { font-size: 1.4rem } h2 { font-size: 1rem; margin: .6rem 0 0 }
.note { opacity: .75 }
</style>
</head>
<body>
<h1>{{ info.title }} {{ info.version }}</h1>
<p>The endpoints of this server; programs read
<a href="/schema/openapi.json">openapi.json</a>.</p>
{% macro fields(schema) %}
<table>
{% for name, kind, required, text in rows(schema) %}
<tr><td><code>{{ name }}</code>{{ " *" if required }}</td>
<td><code>{{ kind }}</code></td><td>{{ text }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
{% macro described(schema) %}
{{ fields(schema) }}
{% for name, type in schema.get("$defs", {}).items() %}
<details><summary><code>{{ name }}</code>
<span class="note">{{ type.get("description", "") }}</span></summary>{{ fields(type) }}</details>
{% endfor %}
{% endmacro %}
{% for path, method, operation in operations %}
<details>
<summary><span class="verb">{{ method }}</span> <code>{{ path }}</code>
<span class="note">{{ operation.get("description", "") }}</span></summary>
{% for kind, content in operation.get("requestBody", {}).get("content", {}).items() %}
<h2>Body, <code>{{ kind }}</code> <span class="note">(* = required)</span></h2>
{{ described(content.schema) }}
{% endfor %}
{% for kind, content in operation.responses["200"].content.items() %}
<h2>Answer, <code>{{ kind }}</code></h2>
{{ described(content.schema) }}
{% endfor %}
<h2>Errors</h2>
<table>
{% for status, response in operation.responses.items() if status != "200" %}
<tr><td>{{ status }}</td><td>{{ response.description }}</td></tr>
{% endfor %}
</table>
</details>
{% endfor %}
</body>
</html>
"""


class _Documents:
    """The page and the JSON. They are made at the first request for one of them.

    That takes about half a second, so a thread does it. Other requests wait for the same thread.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._answers: dict[str, tuple[bytes, str]] = {}  # path -> body, media type

    async def answer(self, request: Request[Any, Any, Any]) -> Response[bytes] | None:
        """The response to a request below `/schema`; None = another handler answers it."""
        async with self._lock:
            if not self._answers:
                self._answers = await asyncio.to_thread(_make, request.app)
        found = self._answers.get(request.scope["path_template"])
        return None if found is None else Response(found[0], media_type=found[1])


def schema_router() -> Router:
    """The router of `/schema`. It answers in place of the handlers that Litestar adds to it.

    Litestar's handlers would make the document on the event loop. They remain for unknown paths.
    """
    return Router(
        _PATH, route_handlers=[], include_in_schema=False, before_request=_Documents().answer
    )


def _make(app: Litestar) -> dict[str, tuple[bytes, str]]:
    document = app.openapi_schema.to_schema()
    return {
        _PATH: (_page(document), MediaType.HTML),
        f"{_PATH}/openapi.json": (msgspec.json.encode(document), OpenAPIMediaType.OPENAPI_JSON),
    }


def _page(document: Mapping[str, Any]) -> bytes:
    """The page as UTF-8."""
    operations = [
        (path, method.upper(), operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["rows"] = _rows
    template = environment.from_string(_TEMPLATE)
    return template.render(info=document["info"], operations=operations).encode()


def _rows(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, bool, str]]:
    """(name, type, is required, description) of each field.

    A schema without properties is one row without a name.
    """
    if "properties" not in schema:
        yield "", _type(schema), False, schema.get("description", "")
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield name, _type(field), name in required, field.get("description", "")


def _type(schema: Mapping[str, Any]) -> str:
    """A type as text: `string`, `integer 0..20`, `Message[]`, `'auto' | 'none'`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(repr(one) if isinstance(one, str) else str(one) for one in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        inner = _type(schema.get("items", {}))
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        return f"{kind} {'' if low is None else low}..{'' if high is None else high}"
    return str(kind)
