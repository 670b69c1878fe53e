"""Translates constraints into llguidance's grammar language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import grammar_from

from ostinato.runtime.grammar.structural_tags import behind, tags_to_lark
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("grammar_text",)

# What well kept JSON has: a space, or the next line and its indentation. More is valid, but a model
# that is not sure writes white space for ever.
_WHITE_SPACE = r" |\n[ \t]{0,40}"


def grammar_text(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """The grammar.

    Args:
        special_tokens: text -> id, of tokens that are no plain text to the grammar.

    Raises:
        ValueError: it can not be a grammar; the text says why.
    """
    text = _text(params, special_tokens)
    return text if params.preamble is None else behind(params.preamble, text, special_tokens)


def _text(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    value: Any = getattr(params, params.kind)
    if params.kind == "json":
        return _schema_text(_parsed(value, "json"), params)
    if params.kind == "json_object":
        return _schema_text({"type": "object"}, params)
    if params.kind == "structural_tag":
        options = _schema_options(params)
        return tags_to_lark(_parsed(value, "structural_tag"), special_tokens, options)
    if params.kind == "choice":
        value = json.dumps(value)
    return grammar_from(params.kind, value)  # pyright: ignore[reportArgumentType] - "regex", ...


def _parsed(value: object, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error


def _schema_text(schema: object, params: StructuredOutputsParams) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object or a boolean, got {schema!r:.40}")  # noqa: TRY004
    closed: dict[str, Any] = _closed(schema) if params.disable_additional_properties else schema
    closed = {**closed, "x-guidance": _schema_options(params)}
    return json.dumps({"grammars": [{"json_schema": closed}]})


def _schema_options(params: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or _WHITE_SPACE
    if not params.strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return options


def _closed(schema: Any) -> Any:
    """The schema, whose objects have no other properties than those that it lists."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: value if key in ("enum", "const", "default", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and not isinstance(schema.get("type"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
