"""Constraints on an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

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
    """Any text."""


class JsonObjectFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # the caller's label
    schema: dict[str, Any] | bool = msgspec.field(default_factory=lambda: {"type": "object"})
    strict: bool | None = None  # false = keywords that can not be enforced are ignored
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
    """The two fields that constrain an answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None


def constraint_of(fields: ConstraintFields) -> StructuredOutputsParams | None:
    """The constraint of a request, None without one.

    Raises:
        InvalidRequestError: both fields have one.
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
    """The request's constraint with reasoning allowed before it.

    None where there is no constraint, the model does not reason, or the constraint allows it
    already.

    Raises:
        InvalidRequestError: as `constraint_of`.
    """
    wanted, markers = constraint_of(fields), form.reasoning
    if wanted is None or markers is None or wanted.preamble is not None:
        return None
    preamble = Preamble(begin=markers.begin, end=markers.end, is_open=form.reasoning_is_open)
    return msgspec.structs.replace(wanted, preamble=preamble)


async def refusing_by_field(fields: ConstraintFields, work: Awaitable[None]) -> None:
    """Await `work`; its errors name `response_format` where the request used that field."""
    try:
        await work
    except InvalidRequestError as error:
        if error.param != "structured_outputs" or fields.structured_outputs is not None:
            raise
        text = str(error).replace("structured_outputs", "response_format")
        raise InvalidRequestError(text, param="response_format", code=error.code) from error
