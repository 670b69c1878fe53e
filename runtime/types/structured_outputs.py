"""The constraint of a structured output as data, and constraints for tool calls.

Exactly one kind a request, in vLLM's spelling. The constraint becomes a grammar in
`runtime/grammar/process.py`; here is nothing that needs a grammar library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = (
    "KINDS",
    "MAX_CHOICES",
    "Preamble",
    "StructuredOutputsParams",
    "ToolCallFormat",
    "constrain_tool_calls",
)

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 100_000


class Preamble(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reasoning: free text between two markers, before the constrained part."""

    begin: str
    end: str
    is_open: bool = False  # the prompt ends with `begin`, so the answer begins within the text


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Exactly one constraint.

    Raises:
        ValueError: there is none, or more than one; an option does not fit the kind.
    """

    json: dict[str, Any] | str | bool | None = None  # a JSON schema, as it is or as text
    regex: str | None = None  # the whole answer matches it; no look-around, no back-references
    choice: tuple[str, ...] | None = None  # the answer is one of them
    grammar: str | None = None  # Lark or GBNF (EBNF), recognised by its form
    json_object: bool | None = None  # any JSON object
    # Free text with parts that are constrained once a trigger occurs, or xgrammar's `format`.
    structural_tag: dict[str, Any] | str | None = None

    disable_any_whitespace: bool = False  # JSON without optional white space
    disable_additional_properties: bool = False  # objects have the properties that are listed
    whitespace_pattern: str | None = None  # a regex: the optional white space of JSON
    # False: keywords of a JSON schema that can not be enforced are left to the model.
    strict: bool = True
    preamble: Preamble | None = None  # of a model that reasons; chat sets it

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1 and self.json is not False:
            raise ValueError(
                f"structured_outputs must be one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none of them'}"
            )
        if self.choice is not None and not (
            1 <= len(self.choice) <= MAX_CHOICES and all(self.choice)
        ):
            raise ValueError(
                f"structured_outputs.choice must be 1 to {MAX_CHOICES} texts that are not empty, "
                f"got {len(self.choice)}"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) and self.kind not in ("json", "json_object"):
                raise ValueError(f"structured_outputs.{name} must be false with {self.kind}")
        if self.whitespace_pattern is not None:
            if self.kind not in ("json", "json_object"):
                raise ValueError(
                    f"structured_outputs.whitespace_pattern must be null with {self.kind}"
                )
            if self.disable_any_whitespace:
                raise ValueError(
                    "structured_outputs.whitespace_pattern must be null with disable_any_whitespace"
                )

    @property
    def kind(self) -> str:
        """Which constraint it is, one of KINDS."""
        return next((kind for kind in KINDS if getattr(self, kind) not in (None, False)), "json")


class ToolCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes a call of a tool: `begin` NAME `middle` ARGUMENTS `end`.

    The arguments are JSON. Special tokens are written as their text. docs/structured-output.md has
    the form of Hermes and Qwen3.
    """

    begin: str
    middle: str
    end: str
    trigger: str  # `begin` starts with it; in free text, it begins a call
    separator: str = "\n"  # between calls that follow each other without text


def constrain_tool_calls(
    tools: Sequence[tuple[str, dict[str, Any] | bool]],
    form: ToolCallFormat,
    *,
    at_least_one: bool,
    only_calls: bool = False,
    parallel: bool = True,
) -> StructuredOutputsParams:
    """The constraint under which an answer's calls are valid.

    Args:
        tools: each tool's name and the JSON schema of its arguments; True = any JSON.
        form: how the model writes calls.
        at_least_one: `tool_choice` is `required` or names a tool (then `tools` is that one): the
            answer may not end before a call.
        only_calls: no text before, between and after calls.
        parallel: more than one call.

    Raises:
        ValueError: there is no tool, or `begin` does not start with the trigger.
    """
    if not tools:
        raise ValueError("tools must be at least one tool, got none")
    if not form.begin.startswith(form.trigger) or not form.trigger:
        raise ValueError(f"begin must be a text that starts with {form.trigger!r}")
    tags = [
        {
            "type": "tag",
            "begin": f"{form.begin}{name}{form.middle}",
            "content": {"type": "json_schema", "json_schema": schema},
            "end": form.end,
        }
        for name, schema in tools
    ]
    if only_calls:
        content: dict[str, Any] = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator,
            "at_least_one": at_least_one,
            "stop_after_first": not parallel,
        }
    else:
        content = {
            "type": "triggered_tags",
            "triggers": [form.trigger],
            "tags": tags,
            "at_least_one": at_least_one,
            "stop_after_first": not parallel,
        }
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": content})
