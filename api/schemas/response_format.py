"""Constraints on an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.structured_outputs import Preamble, StructuredOutputsParams

T = TypeVar("T")

__all__ = (
    "NO_CONSTRAINT",
    "ConstraintFields",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "NamedSchema",
    "ResponseFormat",
    "StructuralTagFormat",
    "TextFormat",
    "behind_reasoning",
    "constraint_field",
    "constraint_of",
    "refusing_by_field",
)


class TextFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """Any text."""


class JsonObjectFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # the caller's label
    schema: dict[str, Any] | bool = msgspec.field(default_factory=lambda: {"type": "object"})
    strict: bool | None = None  # false = keywords that cannot be enforced are ignored
    description: str | None = None  # not shown to the model


class JsonSchemaFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that matches a schema."""

    json_schema: NamedSchema


class StructuralTagFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="structural_tag",
):
    """Free text with constrained parts: `format`, or `structures` and `triggers`."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class ConstraintFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that constrain an answer. A request has at most one constraint."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    # vLLM's older names of the fields of `structured_outputs`.
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None  # with guided_json


_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Clears the fields of `ConstraintFields`, when another constraint replaces the request's own.
NO_CONSTRAINT: dict[str, None] = dict.fromkeys(ConstraintFields.__struct_fields__)


def constraint_field(fields: ConstraintFields) -> str:
    """The field that has the request's constraint; `response_format` if there is no constraint."""
    names = ("structured_outputs", *_GUIDED)
    return next((name for name in names if getattr(fields, name) is not None), "response_format")


def constraint_of(fields: ConstraintFields) -> StructuredOutputsParams | None:
    """The constraint of a request; None if there is no constraint.

    Raises:
        InvalidRequestError: there is more than one constraint, or it is not valid.
    """
    wanted = fields.response_format
    if isinstance(wanted, TextFormat):
        wanted = None
    names = [name for name in ("structured_outputs", *_GUIDED) if getattr(fields, name) is not None]
    if wanted is not None:
        names.insert(0, "response_format")
    if len(names) > 1:
        raise InvalidRequestError(
            f"{names[0]} and {names[1]} are two constraints of one answer; give one",
            param=names[1],
            code="invalid_value",
        )
    if fields.guided_whitespace_pattern is not None and names != ["guided_json"]:
        raise InvalidRequestError(
            "guided_whitespace_pattern needs guided_json: it is the white space of that JSON",
            param="guided_whitespace_pattern",
            code="invalid_value",
        )
    if not names or fields.structured_outputs is not None:
        return fields.structured_outputs
    return _guided(fields, names[0]) if wanted is None else _of_format(wanted)


def _of_format(
    wanted: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
) -> StructuredOutputsParams:
    if isinstance(wanted, JsonObjectFormat):
        return StructuredOutputsParams(json_object=True)
    if isinstance(wanted, StructuralTagFormat):
        given = msgspec.to_builtins(wanted)
        tag = {name: value for name, value in given.items() if value is not None}
        return StructuredOutputsParams(structural_tag=tag)
    named = wanted.json_schema
    return StructuredOutputsParams(json=named.schema, strict=named.strict is not False)


def _guided(fields: ConstraintFields, name: str) -> StructuredOutputsParams:
    value = getattr(fields, name)
    given: dict[str, Any] = {_GUIDED[name]: tuple(value) if isinstance(value, list) else value}
    try:
        return StructuredOutputsParams(**given, whitespace_pattern=fields.guided_whitespace_pattern)
    except ValueError as error:
        raise InvalidRequestError(
            _with_field(str(error), name), param=name, code="invalid_value"
        ) from error


def _with_field(message: str, name: str) -> str:
    """An error message, with the name of the field that has the request's constraint."""
    kind = _GUIDED.get(name)
    if kind is not None:
        message = message.replace(f"structured_outputs.{kind}", name)
    return message.replace("structured_outputs", name)


def behind_reasoning(fields: ConstraintFields, form: AnswerForm) -> StructuredOutputsParams | None:
    """The request's constraint, changed so that reasoning is allowed before it.

    None if nothing is to be changed: there is no constraint, the model does not reason, or the
    constraint allows reasoning already.

    Raises:
        InvalidRequestError: `constraint_of` refuses the constraint.
    """
    wanted, markers = constraint_of(fields), form.reasoning
    if wanted is None or markers is None or wanted.preamble is not None:
        return None
    preamble = Preamble(
        begin=markers.begin, end=markers.end + markers.answer, is_open=form.reasoning_is_open
    )
    return msgspec.structs.replace(wanted, preamble=preamble)


async def refusing_by_field(name: str, work: Awaitable[T]) -> T:
    """The result of `work`. Errors name the field `name`, which has the request's constraint."""
    try:
        return await work
    except InvalidRequestError as error:
        if error.param != "structured_outputs" or name == "structured_outputs":
            raise
        text = _with_field(str(error), name)
        raise InvalidRequestError(text, param=name, code=error.code) from error
