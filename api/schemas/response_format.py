"""Schemas of constrained answers: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec

from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.structured_outputs import Preamble, StructuredOutputsParams

__all__ = (
    "ConstraintFields",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "NamedSchema",
    "ResponseFormat",
    "StructuralTagFormat",
    "TextFormat",
    "behind_reasoning",
    "constraint_of",
    "refusing_by_field",
)


class TextFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """Anything."""


class JsonObjectFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # the caller's label
    schema: dict[str, Any] | bool = msgspec.field(default_factory=lambda: {"type": "object"})
    strict: bool | None = None  # false = what can not be enforced is left to the model
    description: str | None = None  # the caller's; the model sees only the messages


class JsonSchemaFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON of a schema."""

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
    """The fields of both endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None


def constraint_of(fields: ConstraintFields) -> StructuredOutputsParams | None:
    """The one constraint of a request.

    Raises:
        InvalidRequestError: there are two.
    """
    wanted = fields.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return fields.structured_outputs
    if fields.structured_outputs is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs are two constraints of one answer; give one",
            param="structured_outputs",
            code="invalid_value",
        )
    if isinstance(wanted, JsonObjectFormat):
        return StructuredOutputsParams(json_object=True)
    if isinstance(wanted, StructuralTagFormat):
        given = msgspec.to_builtins(wanted)
        tag = {name: value for name, value in given.items() if value is not None}
        return StructuredOutputsParams(structural_tag=tag)
    named = wanted.json_schema
    return StructuredOutputsParams(json=named.schema, strict=named.strict is not False)


def behind_reasoning(fields: ConstraintFields, form: AnswerForm) -> StructuredOutputsParams | None:
    """The constraint of a model that reasons before it answers; None when there is nothing to do.

    Raises:
        InvalidRequestError: as `constraint_of`.
    """
    wanted, markers = constraint_of(fields), form.reasoning
    if wanted is None or markers is None or wanted.preamble is not None:
        return None
    preamble = Preamble(begin=markers.begin, end=markers.end, is_open=form.reasoning_is_open)
    return msgspec.structs.replace(wanted, preamble=preamble)


async def refusing_by_field(fields: ConstraintFields, work: Awaitable[None]) -> None:
    """Await `work`; refusals of `structured_outputs` name the field that the request has."""
    try:
        await work
    except InvalidRequestError as error:
        if error.param != "structured_outputs" or fields.structured_outputs is not None:
            raise
        text = str(error).replace("structured_outputs", "response_format")
        raise InvalidRequestError(text, param="response_format", code=error.code) from error
