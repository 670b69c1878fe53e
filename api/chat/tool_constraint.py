"""Makes the constraint for tool calls that are required or must match a schema.

If a request has tools and `response_format`, an answer has either calls or that format.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ostinato.api.chat.tools import ToolUse
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.call_format import CallFormat
from ostinato.api.schemas.conversation import FunctionTool
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.structured_outputs import (
    StructuredOutputsParams,
    arrange_calls,
)

__all__ = ("tool_constraint",)


def tool_constraint(
    use: ToolUse, form: AnswerForm, wanted: StructuredOutputsParams | None
) -> StructuredOutputsParams | None:
    """The constraint for the answer; None if no constraint is needed.

    Args:
        use: the tools.
        form: the parts that the answer can have.
        wanted: the request's own constraint.

    Raises:
        InvalidRequestError: `wanted` cannot be combined with calls, or a function's schema cannot
            be enforced in the model's format.
    """
    if form.calls is None or not (use.must_call or use.needs_grammar or wanted is not None):
        return None
    calls = _calls(use, form, form.calls, only_calls=use.must_call or wanted is not None)
    if wanted is not None:
        if use.must_call:
            raise InvalidRequestError(
                "tool_choice requires a tool call, but response_format or structured_outputs"
                " asks for another answer; leave one of them out",
                param="tool_choice",
                code="invalid_value",
            )
        calls = {"type": "or", "elements": [calls, _answer(form, _part(wanted))]}
    return StructuredOutputsParams(
        structural_tag={"type": "structural_tag", "format": _behind_reasoning(calls, form)},
        strict=use.is_strict or (wanted is not None and wanted.strict),
    )


def _calls(
    use: ToolUse, form: AnswerForm, calls: CallFormat, *, only_calls: bool
) -> dict[str, Any]:
    # With channels (gpt-oss) every message has a header, so there is no free text around calls.
    has_channels = form.reasoning is not None and form.reasoning.has_channels
    part = arrange_calls(
        [_tag(use, calls, one) for one in use.callable_tools],
        calls.shape,
        at_least_one=only_calls or has_channels,
        only_calls=only_calls or has_channels,
        parallel=use.parallel and not calls.is_single,
    )
    if only_calls or not has_channels:
        return part
    return {"type": "or", "elements": [part, _answer(form, {"type": "any_text"})]}


def _tag(use: ToolUse, calls: CallFormat, tool: FunctionTool) -> dict[str, Any]:
    """The tag of one function. The input of a custom tool with a Lark grammar is verbatim."""
    grammar = use.lark_grammars.get(tool.name)
    if grammar is not None:
        begin, end = calls.style.raw_ends("input")
        tag = calls.shape.tag(tool.name, {"type": "grammar", "grammar": grammar})
        return {**tag, "begin": tag["begin"] + begin, "end": end + tag["end"]}
    part = calls.style.part(tool.name, tool.parameters, strict=tool.strict is True)
    return calls.shape.tag(tool.name, part)


def _answer(form: AnswerForm, part: dict[str, Any]) -> dict[str, Any]:
    """The format of an answer without calls. With channels, it begins with a message's header."""
    if form.reasoning is None or not form.reasoning.has_channels:
        return part
    header = {"type": "const_string", "value": form.reasoning.answer}
    return {"type": "sequence", "elements": [header, part]}


def _part(wanted: StructuredOutputsParams) -> dict[str, Any]:
    """The request's constraint as a format within a structural tag."""
    has_options = (
        wanted.disable_any_whitespace
        or wanted.disable_additional_properties
        or wanted.whitespace_pattern is not None
    )
    if wanted.kind == "json_object" and not has_options:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if wanted.kind == "json" and not has_options:
        return {"type": "json_schema", "json_schema": _schema(wanted.json)}
    if wanted.kind == "regex" and wanted.regex is not None:
        return {"type": "regex", "pattern": wanted.regex}
    if wanted.kind == "choice" and wanted.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in wanted.choice]
        return {"type": "or", "elements": texts}
    raise InvalidRequestError(
        f"tools cannot be combined with this structured_outputs.{wanted.kind}. They can be combined"
        " with regex, choice, json and json_object; json and json_object then take no options for"
        " white space or additional properties",
        param="tools",
        code="invalid_value",
    )


def _schema(given: object) -> Any:
    """The JSON schema of `structured_outputs.json`, which is an object or its text."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(
            f"structured_outputs cannot be used: json is not valid JSON: {error}",
            param="structured_outputs",
            code="invalid_value",
        ) from error


def _behind_reasoning(part: dict[str, Any], form: AnswerForm) -> dict[str, Any]:
    """The format with reasoning allowed before it."""
    markers = form.reasoning
    if markers is None or (part["type"] == "triggered_tags" and not markers.is_special):
        return part
    thoughts: dict[str, Any] = {
        "type": "tag",
        "begin": "" if form.reasoning_is_open else markers.begin,
        "content": {"type": "any_text"},
        "end": markers.end,
    }
    behind = [thoughts, {"type": "regex", "pattern": r"\n{0,2}"}, part]
    with_thoughts = {"type": "sequence", "elements": behind}
    if form.reasoning_is_open:
        return with_thoughts
    return {"type": "or", "elements": [with_thoughts, part]}
