"""The formats in which models write tool calls: one row for each.

Sources: the chat templates and the documentation of the models' publishers.
"""

from __future__ import annotations

from collections.abc import Mapping

from ostinato.api.parsing.bodies.body_reader import BodyReader, ParameterTypes
from ostinato.api.parsing.bodies.escaped_bodies import EscapedBody, EscapedLayout
from ostinato.api.parsing.bodies.json_bodies import Header, JsonBody, ListOrNamedBody, NamedBody
from ostinato.api.parsing.bodies.python_bodies import PythonBody, PythonLayout
from ostinato.api.parsing.bodies.tag_layouts import (
    DSML,
    FUNCTION_TAGS,
    GLM,
    MINIMAX,
    SEED,
    STEP,
)
from ostinato.api.parsing.bodies.tagged_bodies import TaggedBody, TagLayout
from ostinato.api.parsing.call_format import CallFormat, MakeReader
from ostinato.api.parsing.call_shapes import json_shape, list_shape, tag_shape
from ostinato.runtime.types.structured_outputs import ToolCallFormat

__all__ = ("FORMATS",)


def _json(opening: str, types: ParameterTypes) -> BodyReader:
    return JsonBody()


def _named(header: Header) -> MakeReader:
    return lambda opening, types: NamedBody(header)


def _tags(layout: TagLayout) -> MakeReader:
    return lambda opening, types: TaggedBody(layout, opening, types, streams=False)


_MISTRAL = Header(id_marker="[CALL_ID]", after=("[ARGS]",))
_DEEPSEEK_BLOCK = {
    "opening": "<｜tool▁calls▁begin｜>",
    "closing": "<｜tool▁calls▁end｜>",
    "trigger": "<｜tool▁calls▁begin｜>",
}
_OLMO = PythonLayout(begin="", separator="", end="</function_calls>")
_PYTHON_LIST = ToolCallFormat(
    opening="[", begin="", middle="(", end=")", separator=", ", closing="]", trigger=""
)


def _dsml(name: str, block: str, *marks: str, architectures: tuple[str, ...] = ()) -> CallFormat:
    """A row for DeepSeek's markup. All calls stand within one tag, `block`."""
    opening, closing = f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"
    return CallFormat(
        name=name,
        marks=marks,
        architectures=architectures,
        openings=(opening,),
        next_openings=(DSML.function_begin,),
        closings=(closing,),
        reader=_tags(DSML),
        style=DSML,
        shape=tag_shape(
            DSML,
            "",
            "\n",
            opening=f"{opening}\n",
            closing=closing,
            separator="",
            trigger=opening,
        ),
    )


# If a template has the marks of two rows, the first row counts.
_ROWS = (
    CallFormat(
        # gpt-oss: a message to a function; `channels.py` has rewritten its header to this form
        name="openai",
        architectures=("GptOssForCausalLM",),
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
        architectures=("MiniMaxM2ForCausalLM",),
        marks=("<minimax:tool_call>",),
        openings=("<minimax:tool_call>",),
        next_openings=(MINIMAX.function_begin,),
        closings=("</minimax:tool_call>",),
        reader=_tags(MINIMAX),
        style=MINIMAX,
        shape=tag_shape(
            MINIMAX,
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
        architectures=("SeedOssForCausalLM",),
        marks=("<seed:tool_call>",),
        openings=("<seed:tool_call>",),
        closings=("</seed:tool_call>",),
        reader=_tags(SEED),
        style=SEED,
        shape=tag_shape(
            SEED, "<seed:tool_call>\n", "\n</seed:tool_call>", trigger="<seed:tool_call>"
        ),
    ),
    CallFormat(
        name="step3",
        marks=("<steptml:",),
        openings=("<｜tool_calls_begin｜>",),
        next_openings=("<｜tool_call_begin｜>",),
        closings=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        reader=_tags(STEP),
        style=STEP,
        inner=("<｜tool_sep｜>",),
        shape=tag_shape(
            STEP,
            "<｜tool_call_begin｜>function<｜tool_sep｜>",
            "<｜tool_call_end｜>",
            opening="<｜tool_calls_begin｜>",
            closing="<｜tool_calls_end｜>",
            trigger="<｜tool_calls_begin｜>",
        ),
    ),
    _dsml(
        "deepseek_v4",
        "tool_calls",
        "<｜DSML｜tool_calls>",
        architectures=("DeepseekV4ForCausalLM",),
    ),
    _dsml(
        "deepseek_v32",
        "function_calls",
        "<｜DSML｜function_calls>",
        "<｜DSML｜invoke",
        architectures=("DeepseekV32ForCausalLM",),
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
        name="functiongemma",
        marks=("<start_function_call>",),
        openings=("<start_function_call>",),
        closings=("<end_function_call>",),
        reader=lambda opening, types: EscapedBody(streams=False),
        style=EscapedLayout(),
        inner=("<escape>",),
        shape=ToolCallFormat(
            begin="<start_function_call>call:",
            middle="{",
            end="}<end_function_call>",
            separator="",
            trigger="<start_function_call>",
        ),
    ),
    CallFormat(
        name="lfm2",
        marks=("<|tool_list_start|>", "<|tool_call_start|>"),
        architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        openings=("<|tool_call_start|>",),
        closings=("<|tool_call_end|>",),
        reader=lambda opening, types: PythonBody(PythonLayout()),
        style=PythonLayout(),
        shape=ToolCallFormat(
            opening="<|tool_call_start|>[",
            begin="",
            middle="(",
            end=")",
            separator=", ",
            closing="]<|tool_call_end|>",
            trigger="<|tool_call_start|>",
        ),
    ),
    CallFormat(
        name="longcat",
        architectures=("LongcatFlashForCausalLM",),
        marks=("<longcat_tool_call>",),
        openings=("<longcat_tool_call>",),
        closings=("</longcat_tool_call>",),
        reader=_json,
        shape=json_shape(
            begin='<longcat_tool_call>\n{"name": "',
            end="}\n</longcat_tool_call>",
            trigger="<longcat_tool_call>",
        ),
    ),
    CallFormat(
        name="qwen3_coder",
        architectures=("Step3p5ForCausalLM",),
        marks=("<function=",),
        also="<tool_call>",
        openings=("<tool_call>", FUNCTION_TAGS.function_begin),
        closings=("</tool_call>",),
        reader=_tags(FUNCTION_TAGS),
        style=FUNCTION_TAGS,
        shape=tag_shape(FUNCTION_TAGS, "<tool_call>\n", "\n</tool_call>", trigger="<tool_call>"),
    ),
    CallFormat(
        name="glm45",
        architectures=("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
        marks=("<arg_key>",),
        openings=("<tool_call>",),
        reader=_tags(GLM),
        style=GLM,
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        shape=tag_shape(GLM, "<tool_call>", ""),
    ),
    CallFormat(
        name="hermes",
        marks=("<tool_call>",),
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        reader=_json,
        shape=json_shape(
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
        shape=json_shape(
            opening="<tool_calls>\n", closing="\n</tool_calls>", trigger="<tool_calls>"
        ),
    ),
    CallFormat(
        name="jamba",
        architectures=("HunYuanMoEV1ForCausalLM", "JambaForCausalLM"),
        marks=("<tool_calls>",),
        openings=("<tool_calls>",),
        closings=("</tool_calls>",),
        reader=_json,
        shape=list_shape("<tool_calls>", "</tool_calls>"),
    ),
    CallFormat(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
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
        architectures=("Llama4ForCausalLM",),
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
        shape=list_shape("<|tool_call|>", "<|/tool_call|>"),
    ),
    CallFormat(
        name="granite",
        architectures=("GraniteForCausalLM", "GraniteMoeForCausalLM"),
        marks=("<|tool_call|>",),
        openings=("<|tool_call|>", "<tool_call>"),
        reader=_json,
        shape=list_shape("<|tool_call|>"),
    ),
    CallFormat(
        name="granite_20b_fc",
        marks=("<function_call>",),
        openings=("<function_call>",),
        reader=_json,
        shape=json_shape(begin='<function_call> {"name": "', trigger="<function_call>"),
    ),
    CallFormat(
        name="mistral_args",  # used since version 11 of Mistral's tokenizer
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
        shape=list_shape("[TOOL_CALLS]"),
        short_ids=True,
    ),
    CallFormat(
        name="internlm2",
        architectures=("InternLM2ForCausalLM",),
        marks=("<|plugin|>",),
        openings=("<|action_start|><|plugin|>",),
        closings=("<|action_end|>",),
        reader=_json,
        inner=("<|action_start|>", "<|plugin|>"),
        shape=json_shape(
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
        shape=list_shape(""),
    ),
    CallFormat(
        name="llama3_json",
        marks=("<|python_tag|>", '"parameters": dict'),  # the second mark: since Llama 3.2
        openings=("<|python_tag|>",),
        brackets="{",
        closings=(";",),
        reader=_json,
        shape=json_shape("parameters", trigger='{"name": "', separator="; "),
    ),
    CallFormat(
        name="json",
        openings=("```json",),
        brackets="{[",
        closings=("```",),
        reader=_json,
        shape=json_shape(trigger='{"name": "'),
    ),
)
FORMATS: Mapping[str, CallFormat] = {row.name: row for row in _ROWS}
