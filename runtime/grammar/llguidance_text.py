"""Translates constraints into llguidance's grammar language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ostinato.runtime.grammar.json_schemas import JsonForm, prepare
from ostinato.runtime.grammar.structural_tags import behind, tags_to_lark, to_grammar
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("grammar_text",)


def grammar_text(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """The grammar of a constraint, as Lark or as llguidance's JSON.

    Args:
        special_tokens: text -> id. Plain text in a grammar does not match special tokens.

    Raises:
        ValueError: the constraint cannot be written as a grammar; the text says why.
    """
    text = _text(params, special_tokens)
    return text if params.preamble is None else behind(params.preamble, text, special_tokens)


def _text(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    value: Any = getattr(params, params.kind)
    form = _json_form(params)
    if params.kind == "json":
        return _json(_parsed(value, "json"), form)
    if params.kind == "json_object":
        return _json({"type": "object"}, form)
    if params.kind == "structural_tag":
        return tags_to_lark(_parsed(value, "structural_tag"), special_tokens, form)
    if params.kind == "choice":
        # All choices are one terminal, because the lexer makes one automaton of a terminal.
        # Alternatives of a rule would be tried one by one.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value)) + "\n"
    return to_grammar("regex" if params.kind == "regex" else "grammar", value)


def _parsed(value: object, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error


def _json_form(params: StructuredOutputsParams) -> JsonForm:
    form = JsonForm(strict=params.strict, closed=params.disable_additional_properties)
    if params.disable_any_whitespace:
        return form._replace(white_space=None)
    if params.whitespace_pattern:
        return form._replace(white_space=params.whitespace_pattern)
    return form


def _json(schema: object, form: JsonForm) -> str:
    return json.dumps({"grammars": [{"json_schema": prepare(schema, form)}]}, ensure_ascii=False)
