"""The formats in which models write tool calls: one row for each.

Sources: the chat templates and the documentation of the models' publishers.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ostinato.api.parsing.bodies.body_reader import BodyReader, ParameterTypes
from ostinato.api.parsing.bodies.json_bodies import Header, JsonBody, ListOrNamedBody, NamedBody
from ostinato.api.parsing.bodies.python_bodies import PythonBody, PythonLayout
from ostinato.api.parsing.bodies.tagged_bodies import TaggedBody, TagLayout
from ostinato.api.parsing.call_format import CallFormat, MakeReader
from ostinato.runtime.types.structured_outputs import ToolCallFormat

__all__ = ("FORMATS",)


def _json(opening: str, types: ParameterTypes) -> BodyReader:
    return JsonBody()


def _named(header: Header) -> MakeReader:
    return lambda opening, types: NamedBody(header)


def _tags(layout: TagLayout) -> MakeReader:
    return lambda opening, types: TaggedBody(layout, opening, types, streams=False)


def _json_shape(key: str = "arguments", end: str = "}", **fields: str) -> ToolCallFormat:
    """Calls as objects with the keys `name` and `key`."""
    return ToolCallFormat(
        **{"begin": '{"name": "', "middle": f'", "{key}": ', "end": end, "trigger": "", **fields}
    )


def _list_shape(opening: str, closing: str = "") -> ToolCallFormat:
    """Calls as one JSON list."""
    return _json_shape(
        opening=opening + "[",
        separator=", ",
        closing="]" + closing,
        trigger=opening or '[{"name": "',
    )


_MISTRAL = Header(id_marker="[CALL_ID]", after=("[ARGS]",))
_DEEPSEEK_BLOCK = {
    "opening": "<｜tool▁calls▁begin｜>",
    "closing": "<｜tool▁calls▁end｜>",
    "trigger": "<｜tool▁calls▁begin｜>",
}
_GLM = TagLayout(
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    function_end="</tool_call>",
)
_FUNCTION_TAGS = TagLayout(
    function_begin="<function=",
    name_end=">",
    key_begin="<parameter=",
    key_end=">",
    value_end="</parameter>",
    function_end="</function>",
    own_lines=True,
)
_SEED = msgspec.structs.replace(_FUNCTION_TAGS, own_lines=False)
_MINIMAX = TagLayout(
    function_begin='<invoke name="',
    name_end='">',
    key_begin='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    function_end="</invoke>",
)
_STEP = TagLayout(
    before=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
    function_begin='<steptml:invoke name="',
    name_end='">',
    key_begin='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>",
    function_end="</steptml:invoke>",
)
_OLMO = PythonLayout(begin="", separator="", end="</function_calls>")
_PYTHON_LIST = ToolCallFormat(
    opening="[", begin="", middle="(", end=")", separator=", ", closing="]", trigger=""
)


def _tag_shape(layout: TagLayout, before: str, after: str, **block: str) -> ToolCallFormat:
    """Calls with tags; `before` and `after` are the markers of one call."""
    return ToolCallFormat(
        begin=f"{before}{layout.function_begin}",
        middle=f"{layout.name_end}\n",
        end=f"{layout.function_end}{after}",
        **{"trigger": before, **block},
    )


# In the order of recognition: of two rows whose marks a template has, the first one counts.
_ROWS = (
    CallFormat(
        name="openai",  # gpt-oss: a message to a function, as `channels.py` passes it on
        marks=("<|channel|>commentary",),
        openings=("<|channel|>commentary to=functions.",),
        closings=("<|call|>",),
        reader=_named(Header(after=("<|constrain|>", "json", "<|message|>"))),
        inner=("<|channel|>", "<|constrain|>", "<|message|>"),
        shape=ToolCallFormat(
            begin="<|channel|>commentary to=functions.",
            middle=" <|constrain|>json<|message|>",
            end="",
            trigger="<|channel|>commentary to=functions.",
        ),
        is_single=True,
    ),
    CallFormat(
        name="kimi_k2",
        marks=("<|tool_calls_section_begin|>",),
        openings=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        closings=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        reader=_named(
            Header(
                before=("<|tool_call_begin|>",),
                after=("<|tool_call_argument_begin|>",),
                name_is_id=True,
            )
        ),
        inner=("<|tool_call_argument_begin|>",),
        shape=ToolCallFormat(
            opening="<|tool_calls_section_begin|>",
            begin="<|tool_call_begin|>functions.",
            middle=":0<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            closing="<|tool_calls_section_end|>",
            separator="",
            trigger="<|tool_calls_section_begin|>",
        ),
    ),
    CallFormat(
        name="minimax_m2",
        marks=("<minimax:tool_call>",),
        openings=("<minimax:tool_call>",),
        next_openings=(_MINIMAX.function_begin,),
        closings=("</minimax:tool_call>",),
        reader=_tags(_MINIMAX),
        style=_MINIMAX,
        shape=_tag_shape(
            _MINIMAX,
            "",
            "\n",
            opening="<minimax:tool_call>\n",
            closing="</minimax:tool_call>",
            separator="",
            trigger="<minimax:tool_call>",
        ),
    ),
    CallFormat(
        name="seed_oss",
        marks=("<seed:tool_call>",),
        openings=("<seed:tool_call>",),
        closings=("</seed:tool_call>",),
        reader=_tags(_SEED),
        style=_SEED,
        shape=_tag_shape(
            _SEED, "<seed:tool_call>\n", "\n</seed:tool_call>", trigger="<seed:tool_call>"
        ),
    ),
    CallFormat(
        name="step3",
        marks=("<steptml:",),
        openings=("<｜tool_calls_begin｜>",),
        next_openings=("<｜tool_call_begin｜>",),
        closings=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        reader=_tags(_STEP),
        style=_STEP,
        inner=("<｜tool_sep｜>",),
        shape=_tag_shape(
            _STEP,
            "<｜tool_call_begin｜>function<｜tool_sep｜>",
            "<｜tool_call_end｜>",
            opening="<｜tool_calls_begin｜>",
            closing="<｜tool_calls_end｜>",
            trigger="<｜tool_calls_begin｜>",
        ),
    ),
    CallFormat(
        name="deepseek_v3",
        marks=("<｜tool▁sep｜>",),
        also="```json",
        openings=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        closings=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        reader=_named(
            Header(before=("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>"), after=("```json",))
        ),
        inner=("<｜tool▁sep｜>",),
        shape=ToolCallFormat(
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
            **_DEEPSEEK_BLOCK,
        ),
    ),
    CallFormat(
        name="deepseek_v31",
        marks=("<｜tool▁sep｜>",),
        openings=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        closings=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        reader=_named(Header(before=("<｜tool▁call▁begin｜>",), after=("<｜tool▁sep｜>",))),
        inner=("<｜tool▁sep｜>",),
        shape=ToolCallFormat(
            begin="<｜tool▁call▁begin｜>",
            middle="<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
            separator="",
            **_DEEPSEEK_BLOCK,
        ),
    ),
    CallFormat(
        name="longcat",
        marks=("<longcat_tool_call>",),
        openings=("<longcat_tool_call>",),
        closings=("</longcat_tool_call>",),
        reader=_json,
        shape=_json_shape(
            begin='<longcat_tool_call>\n{"name": "',
            end="}\n</longcat_tool_call>",
            trigger="<longcat_tool_call>",
        ),
    ),
    CallFormat(
        name="qwen3_coder",
        marks=("<function=",),
        also="<tool_call>",
        openings=("<tool_call>", _FUNCTION_TAGS.function_begin),
        closings=("</tool_call>",),
        reader=_tags(_FUNCTION_TAGS),
        style=_FUNCTION_TAGS,
        shape=_tag_shape(_FUNCTION_TAGS, "<tool_call>\n", "\n</tool_call>", trigger="<tool_call>"),
    ),
    CallFormat(
        name="glm45",
        marks=("<arg_key>",),
        openings=("<tool_call>",),
        reader=_tags(_GLM),
        style=_GLM,
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        shape=_tag_shape(_GLM, "<tool_call>", ""),
    ),
    CallFormat(
        name="hermes",
        marks=("<tool_call>",),
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        reader=_json,
        shape=_json_shape(
            begin='<tool_call>\n{"name": "', end="}\n</tool_call>", trigger="<tool_call>"
        ),
    ),
    CallFormat(
        name="minimax",
        marks=("<tool_calls>",),
        also='{"name": <tool-name>',
        openings=("<tool_calls>",),
        next_brackets="{",
        closings=("</tool_calls>",),
        reader=_json,
        shape=_json_shape(
            opening="<tool_calls>\n", closing="\n</tool_calls>", trigger="<tool_calls>"
        ),
    ),
    CallFormat(
        name="jamba",
        marks=("<tool_calls>",),
        openings=("<tool_calls>",),
        closings=("</tool_calls>",),
        reader=_json,
        shape=_list_shape("<tool_calls>", "</tool_calls>"),
    ),
    CallFormat(
        name="olmo3",
        marks=("<function_calls>",),
        openings=("<function_calls>",),
        reader=lambda opening, types: PythonBody(_OLMO),
        style=_OLMO,
        inner=("</function_calls>",),
        shape=ToolCallFormat(
            opening="<function_calls>\n",
            begin="",
            middle="(",
            end=")",
            closing="\n</function_calls>",
            trigger="<function_calls>",
        ),
    ),
    CallFormat(
        name="llama4_pythonic",
        marks=("[func_name1(",),
        also="<|header_start|>",
        openings=("<|python_start|>",),
        brackets="[",
        closings=("<|python_end|>",),
        reader=lambda opening, types: PythonBody(PythonLayout()),
        style=PythonLayout(),
        shape=_PYTHON_LIST,
    ),
    CallFormat(
        name="pythonic",
        marks=("[func_name1(",),
        brackets="[",
        reader=lambda opening, types: PythonBody(PythonLayout()),
        style=PythonLayout(),
        shape=_PYTHON_LIST,
    ),
    CallFormat(
        name="phi4_mini_json",
        marks=("functools", "<|tool|>"),
        openings=("functools", "<|tool_call|>"),
        closings=("<|/tool_call|>",),
        reader=_json,
        shape=_list_shape("<|tool_call|>", "<|/tool_call|>"),
    ),
    CallFormat(
        name="granite",
        marks=("<|tool_call|>",),
        openings=("<|tool_call|>", "<tool_call>"),
        reader=_json,
        shape=_list_shape("<|tool_call|>"),
    ),
    CallFormat(
        name="granite_20b_fc",
        marks=("<function_call>",),
        openings=("<function_call>",),
        reader=_json,
        shape=_json_shape(begin='<function_call> {"name": "', trigger="<function_call>"),
    ),
    CallFormat(
        name="mistral_args",  # since the tokenizer of version 11
        marks=("[TOOL_CALLS]",),
        also="[ARGS]",
        openings=("[TOOL_CALLS]",),
        reader=lambda opening, types: ListOrNamedBody(_MISTRAL),
        inner=("[ARGS]", "[CALL_ID]"),
        shape=ToolCallFormat(
            begin="[TOOL_CALLS]", middle="[ARGS]", end="", separator="", trigger="[TOOL_CALLS]"
        ),
        short_ids=True,
    ),
    CallFormat(
        name="mistral",
        marks=("[TOOL_CALLS]",),
        openings=("[TOOL_CALLS]",),
        reader=lambda opening, types: ListOrNamedBody(_MISTRAL),
        inner=("[ARGS]", "[CALL_ID]"),
        shape=_list_shape("[TOOL_CALLS]"),
        short_ids=True,
    ),
    CallFormat(
        name="internlm2",
        marks=("<|plugin|>",),
        openings=("<|action_start|><|plugin|>",),
        closings=("<|action_end|>",),
        reader=_json,
        inner=("<|action_start|>", "<|plugin|>"),
        shape=_json_shape(
            "parameters",
            begin='<|action_start|><|plugin|>\n{"name": "',
            end="}<|action_end|>",
            trigger="<|action_start|><|plugin|>",
            separator="",
        ),
    ),
    CallFormat(
        name="xlam",
        marks=('[{"name": "tool_call_name"',),
        openings=("```json", "[TOOL_CALLS]", "<tool_call>"),
        brackets="[{",
        closings=("```", "</tool_call>"),
        reader=_json,
        shape=_list_shape(""),
    ),
    CallFormat(
        name="llama3_json",
        marks=("<|python_tag|>", '"parameters": dict'),  # the second one since Llama 3.2
        openings=("<|python_tag|>",),
        brackets="{",
        closings=(";",),
        reader=_json,
        shape=_json_shape("parameters", trigger='{"name": "', separator="; "),
    ),
    CallFormat(
        name="json",
        openings=("```json",),
        brackets="{[",
        closings=("```",),
        reader=_json,
        shape=_json_shape(trigger='{"name": "'),
    ),
)
FORMATS: Mapping[str, CallFormat] = {row.name: row for row in _ROWS}
