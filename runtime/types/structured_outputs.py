"""The constraints of structured outputs, with vLLM's names, and the constraint of tool calls.

A request has at most one constraint. `runtime/grammar/process.py` turns it into a grammar. This
module needs no grammar library.
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
    "arrange_calls",
    "constrain_tool_calls",
)

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 100_000


class Preamble(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reasoning: free text between two markers, before the constrained part."""

    begin: str
    end: str
    is_open: bool = False  # the prompt ends with `begin`, so the answer begins with reasoning


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Exactly one constraint, and its options.

    Raises:
        ValueError: there is no constraint or more than one, or an option does not fit its kind.
    """

    json: dict[str, Any] | str | bool | None = None  # a JSON schema, as an object or as text
    regex: str | None = None  # matches the whole answer; no look-around, no back-references
    choice: tuple[str, ...] | None = None  # the answer is one of these texts
    grammar: str | None = None  # Lark or GBNF (EBNF), detected by the syntax
    json_object: bool | None = None  # any JSON object
    # Free text in which a trigger begins a constrained part, or xgrammar's `format`.
    structural_tag: dict[str, Any] | str | None = None

    disable_any_whitespace: bool = False  # JSON without optional white space
    disable_additional_properties: bool = False  # objects have only the listed properties
    whitespace_pattern: str | None = None  # a regex for the optional white space of JSON
    # False = keywords of a JSON schema that cannot be enforced are ignored.
    strict: bool = True
    preamble: Preamble | None = None  # set for chats with a model that reasons

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1 and self.json is not False:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none of them'}"
            )
        if self.choice is not None and not (
            1 <= len(self.choice) <= MAX_CHOICES and all(self.choice)
        ):
            raise ValueError(
                f"structured_outputs.choice must be 1 to {MAX_CHOICES} texts that are not empty, "
                f"got {len(self.choice)}, {self.choice.count('')} of them empty"
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
        """The kind of constraint, one of KINDS."""
        return next((kind for kind in KINDS if getattr(self, kind) not in (None, False)), "json")


class ToolCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes tool calls: `opening`, calls with `separator` between them, `closing`.

    A call is `begin` NAME `middle` ARGUMENTS `end`. Special tokens are written as their text.
    docs/grammars.md shows the format of Hermes and Qwen3.
    """

    begin: str
    middle: str
    end: str
    # The text with which calls start. In free text it begins the constrained part. Empty = the
    # trigger is the whole beginning of a call: `opening`, `begin`, the name and `middle`.
    trigger: str
    separator: str = "\n"  # between calls that follow each other without text
    opening: str = ""  # once before the calls
    closing: str = ""  # once after them

    def heads(self, marker: str) -> tuple[str, ...]:
        """The texts between `marker` and a function's name, in the first call and in later calls.

        A text is left out if it does not start with `marker`.
        """
        heads = dict.fromkeys((self.opening + self.begin, self.begin))
        return tuple(one.removeprefix(marker) for one in heads if one.startswith(marker))

    def tag(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        """The part of a structural tag for calls of one function.

        Args:
            name: the function's name.
            content: the format of the arguments.
        """
        begin = f"{self.begin}{name}{self.middle}"
        return {"type": "tag", "begin": begin, "content": content, "end": self.end}


def constrain_tool_calls(
    tools: Sequence[tuple[str, dict[str, Any] | bool]],
    form: ToolCallFormat,
    *,
    at_least_one: bool,
    only_calls: bool = False,
    parallel: bool = True,
) -> StructuredOutputsParams:
    """A constraint that makes all tool calls of an answer valid.

    Args:
        tools: each tool's name and the JSON schema of its arguments; True = any JSON. If
            `tool_choice` names a tool, only that tool.
        form: how the model writes calls.
        at_least_one: the answer has a call, because `tool_choice` is `required` or names a tool.
        only_calls: the answer has no text before, between and after calls.
        parallel: the answer may have more than one call.

    Raises:
        ValueError: there is no tool, or the calls do not start with the trigger.
    """
    tags = [
        form.tag(name, {"type": "json_schema", "json_schema": schema}) for name, schema in tools
    ]
    content = arrange_calls(
        tags, form, at_least_one=at_least_one, only_calls=only_calls, parallel=parallel
    )
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": content})


def arrange_calls(
    tags: Sequence[dict[str, Any]],
    form: ToolCallFormat,
    *,
    at_least_one: bool,
    only_calls: bool,
    parallel: bool,
) -> dict[str, Any]:
    """The xgrammar format of an answer with calls. For other arguments see `constrain_tool_calls`.

    Args:
        tags: the tag of each tool, from `ToolCallFormat.tag`.

    Raises:
        ValueError: `tags` is empty, or the calls do not start with the trigger.
    """
    if not tags:
        raise ValueError("tools must have at least one tool, got none")
    if not (form.opening + form.begin).startswith(form.trigger):
        raise ValueError(
            f"opening and begin, joined, must start with the trigger {form.trigger!r}, got "
            f"{form.opening + form.begin!r}"
        )
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": form.separator,
        "at_least_one": at_least_one or not only_calls,
        "stop_after_first": not parallel,
    }
    if only_calls:
        if not form.opening and not form.closing:
            return calls
        ends = [{"type": "const_string", "value": text} for text in (form.opening, form.closing)]
        block = {
            "type": "sequence",
            "elements": [ends[0], {**calls, "at_least_one": True}, ends[1]],
        }
        nothing = {"type": "const_string", "value": ""}
        return block if at_least_one else {"type": "or", "elements": [block, nothing]}
    if not form.opening and not form.closing:
        blocks = list(tags)
    elif form.trigger and form.opening.startswith(form.trigger):
        blocks = [
            {"type": "tag", "begin": form.opening, "content": calls, "end": form.closing},
        ]
    else:
        blocks = [
            {**tag, "begin": form.opening + tag["begin"], "end": tag["end"] + form.closing}
            for tag in tags
        ]
    return {
        "type": "triggered_tags",
        "triggers": [form.trigger] if form.trigger else [block["begin"] for block in blocks],
        "tags": blocks,
        "at_least_one": at_least_one,
        "stop_after_first": not parallel,
    }
