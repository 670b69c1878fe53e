"""Detects a model's formats of tool calls and reasoning from its chat template or configuration."""

from __future__ import annotations

import re

import msgspec

from ostinato.api.parsing.formats import FORMATS, CallFormat
from ostinato.api.parsing.reasoning import MISTRAL, THINK, ReasoningMarkers
from ostinato.conf.server_schema import ReasoningParserName, ToolParserName

__all__ = ("TemplateTraits", "traits")

_TOOLS = re.compile(r"\btools\b")
# The first marker that a template contains decides.
_CALL_MARKERS = (
    ("<function=", ToolParserName.none),  # XML in the same tags as Hermes's JSON
    ("<arg_key>", ToolParserName.none),
    ("<tool_call>", ToolParserName.hermes),
    ("functools", ToolParserName.phi4_mini_json),
    ("<|tool|>", ToolParserName.phi4_mini_json),
    ("<|tool_call|>", ToolParserName.granite),
    ("[TOOL_CALLS]", ToolParserName.mistral),
    ("<|python_tag|>", ToolParserName.llama3_json),
    ('"parameters": dict', ToolParserName.llama3_json),  # Llama 3.2 and later
)
_REASONING = {ReasoningParserName.think: THINK, ReasoningParserName.mistral: MISTRAL}


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a chat template and the model's answers.

    `knows_tools` is whether the template shows tools to the model. Otherwise the system message
    describes the tools and a generic format of calls.
    """

    knows_tools: bool
    calls: CallFormat | None
    reasoning: ReasoningMarkers | None
    has_reasoning_effort: bool
    has_enable_thinking: bool
    has_verbosity: bool
    knows_documents: bool


def traits(
    source: str, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName
) -> TemplateTraits:
    """The traits of the template `source`, under the configured choice of parsers."""
    knows_tools = _TOOLS.search(source) is not None
    return TemplateTraits(
        knows_tools=knows_tools,
        calls=_calls(source, knows_tools, tool_parser),
        reasoning=_reasoning(source, reasoning_parser),
        has_reasoning_effort="reasoning_effort" in source,
        has_enable_thinking="enable_thinking" in source,
        has_verbosity="verbosity" in source,
        knows_documents="documents" in source,
    )


def _calls(source: str, knows_tools: bool, chosen: ToolParserName) -> CallFormat | None:
    if chosen is ToolParserName.auto:
        chosen = ToolParserName.json
        if knows_tools:
            found = (name for marker, name in _CALL_MARKERS if marker in source)
            chosen = next(found, ToolParserName.none)
    return FORMATS.get(chosen.value)


def _reasoning(source: str, chosen: ReasoningParserName) -> ReasoningMarkers | None:
    if chosen is not ReasoningParserName.auto:
        return _REASONING.get(chosen)
    return next((one for one in _REASONING.values() if one.end in source), None)
