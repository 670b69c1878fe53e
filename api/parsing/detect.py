"""Chooses a model's formats of tool calls and reasoning.

The choice depends on the chat template, the architecture and the configuration.
"""

from __future__ import annotations

import re

import msgspec

from ostinato.api.parsing.call_format import CallFormat
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.parsing.reasoning import REASONING, ReasoningMarkers
from ostinato.conf.sections.server_schema import ReasoningParserName, ToolParserName

__all__ = ("TemplateTraits", "traits")

_TOOLS = re.compile(r"\btools\b")
# The keys by which templates read the reasoning of an earlier answer. gpt-oss has the last one.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_REASONING_KEY = re.compile(r"\bmessage(?:\.|\[['\"])(\w+)")


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a chat template and the model's answers.

    `knows_tools` is true if the template shows tools to the model. If it is false, the system
    message describes the tools and the format of calls. `reasoning_key` is the key of a message
    from which the template reads the reasoning of an earlier answer.
    """

    knows_tools: bool
    calls: CallFormat | None
    reasoning: ReasoningMarkers | None
    has_reasoning_effort: bool
    has_enable_thinking: bool
    has_verbosity: bool
    knows_documents: bool
    reasoning_key: str


def traits(
    source: str,
    tool_parser: ToolParserName,
    reasoning_parser: ReasoningParserName,
    architecture: str = "",
) -> TemplateTraits:
    """The traits of the template `source`, under the configured choice of parsers.

    Args:
        source: the template.
        tool_parser: the configured format of calls.
        reasoning_parser: the configured markers of reasoning.
        architecture: the model's architecture. It chooses the format of calls if the template has
            the marks of no format. Empty = not known.
    """
    knows_tools = _TOOLS.search(source) is not None
    return TemplateTraits(
        knows_tools=knows_tools,
        calls=_calls(source, knows_tools, tool_parser, architecture),
        reasoning=_reasoning(source, reasoning_parser),
        has_reasoning_effort="reasoning_effort" in source,
        has_enable_thinking="enable_thinking" in source,
        has_verbosity="verbosity" in source,
        knows_documents="documents" in source,
        reasoning_key=_reasoning_key(source),
    )


def _reasoning_key(source: str) -> str:
    read = set(_REASONING_KEY.findall(source))
    return next((key for key in _REASONING_KEYS if key in read), _REASONING_KEYS[0])


def _calls(
    source: str, knows_tools: bool, chosen: ToolParserName, architecture: str
) -> CallFormat | None:
    if chosen is ToolParserName.mistral and _has(FORMATS["mistral_args"], source):
        chosen = ToolParserName.mistral_args  # reads both layouts, writes [ARGS]
    if chosen is not ToolParserName.auto:
        return FORMATS.get(chosen.value)
    if not knows_tools:
        return FORMATS["json"]
    rows = FORMATS.values()
    found = next((row for row in rows if _has(row, source)), None)
    return found or next((row for row in rows if architecture in row.architectures), None)


def _has(row: CallFormat, source: str) -> bool:
    return any(mark in source for mark in row.marks) and row.also in source


def _reasoning(source: str, chosen: ReasoningParserName) -> ReasoningMarkers | None:
    if chosen is not ReasoningParserName.auto:
        return REASONING.get(chosen.value)
    rows = REASONING.values()
    return next((row for row in rows if all(mark in source for mark in row.marks)), None)
