"""Answers of each model family, as the publishers' documents and chat templates show them.

Each row has a piece of the family's chat template, from which the formats are recognised.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.bodies.parameter_schemas import types_of_parameters
from ostinato.api.parsing.detect import traits
from ostinato.api.parsing.events import Message, merge
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.parsing.reasoning import REASONING
from ostinato.conf.sections.server_schema import ReasoningParserName, ToolParserName

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["celsius", "fahrenheit"]},
        "hourly": {"type": "boolean"},
        "area": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"type": "array", "items": {"type": "string"}},
    },
}
TOOLS = {"get_weather": WEATHER, "search-web": {"type": "object"}}
OSLO = ("get_weather", {"city": "Oslo"})
OSLO_3 = ("get_weather", {"city": "Oslo", "days": 3})
ROME = ("get_weather", {"city": "Rome"})


class Recorded(msgspec.Struct, kw_only=True):
    template: str  # what the chat template has beside `tools`
    text: str
    calls: list[tuple[str, dict[str, Any]]] = []
    content: str = ""
    reasoning: str = ""
    call_format: str
    thinks: str = ""  # a key of REASONING; empty: no markers of reasoning
    is_open: bool = False


ANSWERS = [
    Recorded(  # Qwen3
        template="<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>} {{ '</think>' }}",
        text='<think>\nThe user asks for two cities.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Oslo"}}\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        calls=[OSLO, ROME],
        reasoning="The user asks for two cities.",
        call_format="hermes",
        thinks="think",
    ),
    Recorded(  # Llama 3.1 and later
        template='Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}',
        text='{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        calls=[OSLO],
        call_format="llama3_json",
    ),
    Recorded(  # Llama 4
        template="<|header_start|> Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
        text='<|python_start|>[get_weather(city="Oslo"), get_weather(city="Rome")]<|python_end|>',
        calls=[OSLO, ROME],
        call_format="llama4_pythonic",
    ),
    Recorded(  # Llama 3.2, Gemma 3
        template="[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        text="[get_weather(city='Oslo', days=3, hourly=True, area=None, places=['a', \"it's\"])]",
        calls=[
            ("get_weather", {"city": "Oslo", "days": 3, "hourly": True, "area": None, "places": ["a", "it's"]})
        ],
        call_format="pythonic",
    ),
    Recorded(  # OLMo 3
        template="<function_calls>\nget_weather(city='New York')\n</function_calls> {{ '</think>' }}",
        text="Two cities, so two calls.</think>\n<function_calls>\nget_weather(city='Oslo', hourly=true)\n"
        "get_weather(city='Rome', area=null)\n</function_calls>",
        calls=[("get_weather", {"city": "Oslo", "hourly": True}), ("get_weather", {"city": "Rome", "area": None})],
        reasoning="Two cities, so two calls.",
        call_format="olmo3",
        thinks="think",
        is_open=True,
    ),
    Recorded(  # Mistral 7B v0.3 and Nemo
        template="[AVAILABLE_TOOLS] [TOOL_CALLS]",
        text='[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "VvvODy9mT"}]',
        calls=[OSLO],
        call_format="mistral",
    ),
    Recorded(  # Mistral Small 3.2, Magistral 2507
        template="[TOOL_CALLS]get_weather[CALL_ID]id[ARGS]{} [THINK]x[/THINK]",
        text="[THINK]One call is enough.[/THINK][TOOL_CALLS]get_weather[ARGS]{\"city\": \"Oslo\"}"
        "[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{\"city\": \"Rome\"}",
        calls=[OSLO, ROME],
        reasoning="One call is enough.",
        call_format="mistral_args",
        thinks="mistral",
    ),
    Recorded(  # Granite 3
        template="write <|tool_call|> followed by a JSON list. Write your thoughts after 'Here is my thought process:' and "
        "write your response after 'Here is my response:'",
        text='Here\'s my thought process:\nThe tool fits.\n\nHere is my response:\n<|tool_call|>[{"name": "get_weather", '
        '"arguments": {"city": "Oslo"}}]',
        calls=[OSLO],
        reasoning="The tool fits.",
        call_format="granite",
        thinks="granite",
    ),
    Recorded(
        template="<function_call>",
        text='<function_call> {"name": "get_weather", "arguments": {"city": "Oslo"}}',
        calls=[OSLO],
        call_format="granite_20b_fc",
    ),
    Recorded(  # Phi-4-mini
        template="<|tool|>{{ tools }}<|/tool|>",
        text='functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        calls=[OSLO],
        call_format="phi4_mini_json",
    ),
    Recorded(  # InternLM 2.5
        template="<|im_start|>system name=<|plugin|>\n",
        text='I need the weather.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Oslo"}}'
        "<|action_end|>\n",
        calls=[OSLO],
        content="I need the weather.",
        call_format="internlm2",
    ),
    Recorded(  # Jamba 1.5
        template="<tool_calls>[",
        text='<tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Oslo"}},\n'
        '    {"name": "get_weather", "arguments": {"city": "Rome"}}\n]</tool_calls>',
        calls=[OSLO, ROME],
        call_format="jamba",
    ),
    Recorded(  # Hunyuan-A13B
        template='<tool_calls>[{"name": "func_name1"}]</tool_calls> <think></think><answer>',
        text='<think>\nLook it up.\n</think>\n<answer>\n<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
        "</tool_calls>\n</answer>",
        calls=[OSLO],
        reasoning="Look it up.",
        call_format="jamba",
        thinks="hunyuan_a13b",
    ),
    Recorded(  # MiniMax-M1
        template='<tool_calls>\n{"name": <tool-name>, "arguments": <args-json-object>}\n...\n</tool_calls>',
        text='<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_calls>',
        calls=[OSLO, ROME],
        call_format="minimax",
    ),
    Recorded(  # MiniMax-M2
        template="<minimax:tool_call> {{ '</think>' }}",
        text='<think>Two.</think>\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="search-web">\n<parameter name="query_list">'
        '["a", "b"]</parameter>\n</invoke>\n</minimax:tool_call>',
        calls=[OSLO_3, ("search-web", {"query_list": ["a", "b"]})],
        reasoning="Two.",
        call_format="minimax_m2",
        thinks="think",
    ),
    Recorded(  # DeepSeek V3 and R1
        template="<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json'",
        text='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Oslo"}\n```'
        '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=[OSLO, ROME],
        call_format="deepseek_v3",
    ),
    Recorded(  # DeepSeek V3.1
        template="<｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜> {{ '</think>' }}",
        text='Check both.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        calls=[OSLO, ROME],
        reasoning="Check both.",
        call_format="deepseek_v31",
        thinks="think",
        is_open=True,
    ),
    Recorded(  # DeepSeek V3.2: the tag of a parameter says whether it is a string
        template='<｜DSML｜invoke name="$FUNCTION_NAME"> {{ \'</think>\' }}',
        text='Two calls.</think>I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="search-web">\n<｜DSML｜parameter name="query" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="list" string="false">["a", {"b": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        calls=[OSLO_3, ("search-web", {"query": "5", "list": ["a", {"b": None}]})],
        content="I look.",
        reasoning="Two calls.",
        call_format="deepseek_v32",
        thinks="think",
        is_open=True,
    ),
    Recorded(  # DeepSeek V4
        template='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="$TOOL_NAME">',
        text='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        calls=[OSLO],
        call_format="deepseek_v4",
    ),
    Recorded(  # FunctionGemma: keys without quotes, strings between marks
        template="<start_function_declaration>declaration:get_weather<end_function_declaration><start_function_call>call:",
        text="<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3,hourly:true,places:[<escape>a<escape>,"
        "<escape>it's, {b}<escape>]}<end_function_call><start_function_call>call:search-web{query:{all:[],not:None,text:<escape>"
        "x: 1<escape>}}<end_function_call>",
        calls=[
            ("get_weather", {"city": "Oslo", "days": 3, "hourly": True, "places": ["a", "it's, {b}"]}),
            ("search-web", {"query": {"all": [], "not": None, "text": "x: 1"}}),
        ],
        call_format="functiongemma",
    ),
    Recorded(  # LFM2
        template="List of tools: <|tool_list_start|>[{{ tool }}]<|tool_list_end|>",
        text='<|tool_call_start|>[get_weather(city="Oslo"), get_weather(city="Rome")]<|tool_call_end|>Checking both cities.',
        calls=[OSLO, ROME],
        content="Checking both cities.",
        call_format="lfm2",
    ),
    Recorded(  # Step 3.5 Flash
        template="<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter> {{ '</think>' }}",
        text="<think>\nLook it up.\n</think>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        "Rome\n</parameter>\n</function>\n</tool_call>",
        calls=[OSLO_3, ROME],
        reasoning="Look it up.",
        call_format="qwen3_coder",
        thinks="think",
    ),
    Recorded(  # Kimi K2
        template="<|tool_calls_section_begin|>",
        text="I will look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>'
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        calls=[OSLO, ROME],
        content="I will look.",
        call_format="kimi_k2",
    ),
    Recorded(  # GLM-4.5
        template="<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> {{ '</think>' }}",
        text="\n<think>Three days.</think>\nLet me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n",
        calls=[OSLO_3],
        content="Let me see.",
        reasoning="Three days.",
        call_format="glm45",
        thinks="think",
    ),
    Recorded(  # Qwen3-Coder
        template="<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
        text="<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=places>\n["a", "b"]\n</parameter>\n<parameter=area>\n5\n</parameter>\n</function>\n</tool_call>',
        calls=[("get_weather", {"city": "Oslo", "days": 3, "places": ["a", "b"], "area": "5"})],
        call_format="qwen3_coder",
    ),
    Recorded(  # Seed-OSS
        template="<seed:think> <seed:tool_call>\n<function=example_function_name>",
        text="<seed:think>Look it up.</seed:think><seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        calls=[OSLO_3],
        reasoning="Look it up.",
        call_format="seed_oss",
        thinks="seed_oss",
    ),
    Recorded(  # Step3
        template="<steptml:invoke name=",
        text='<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Oslo</steptml:parameter><steptml:parameter name="days">3</steptml:parameter>'
        '</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Rome</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        calls=[OSLO_3, ROME],
        call_format="step3",
    ),
    Recorded(  # LongCat-Flash
        template="<longcat_tool_call>",
        text='<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</longcat_tool_call>',
        calls=[OSLO],
        call_format="longcat",
    ),
    Recorded(  # xLAM 2
        template='make calls in a single JSON array: [{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]',
        text='[{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]',
        calls=[OSLO, ROME],
        call_format="xlam",
    ),
    Recorded(  # ERNIE 4.5 Thinking
        template="<tool_call> </think> <response>",
        text="Nothing to call.\n</think>\n\n<response>\nIt is sunny.\n</response>\n",
        content="It is sunny.",
        reasoning="Nothing to call.",
        call_format="hermes",
        thinks="ernie45",
        is_open=True,
    ),
    Recorded(  # gpt-oss
        template="<|channel|>analysis <|channel|>commentary",
        text="<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        calls=[OSLO],
        reasoning="Need the weather.",
        call_format="openai",
        thinks="openai_gptoss",
    ),
    Recorded(  # gpt-oss: a preamble, then a call with the recipient before the channel
        template="<|channel|>analysis <|channel|>commentary",
        text="<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
        'json<|message|>{"city": "Oslo"}',
        calls=[OSLO],
        content="I will look.",
        call_format="openai",
        thinks="openai_gptoss",
    ),
    Recorded(  # gpt-oss
        template="<|channel|>analysis <|channel|>commentary",
        text="<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello <b>!<|return|>",
        content="Hello <b>!",
        reasoning="Greet.",
        call_format="openai",
        thinks="openai_gptoss",
    ),
]  # fmt: skip
AUTO = ToolParserName.auto, ReasoningParserName.auto


def form_of(recorded: Recorded) -> AnswerForm:
    found = traits("{{ tools }} " + recorded.template, *AUTO)
    assert found.calls is not None
    needs_types = found.calls.needs_types
    return AnswerForm(
        reasoning=found.reasoning,
        reasoning_is_open=recorded.is_open,
        call_format=found.calls.name,
        tool_names=frozenset(TOOLS),
        parameter_types={
            name: types_of_parameters(schema) for name, schema in TOOLS.items() if needs_types
        },
    )


@pytest.mark.parametrize("recorded", ANSWERS)
def test_the_formats_are_recognised(recorded):
    form = form_of(recorded)
    assert form.call_format == recorded.call_format
    assert form.reasoning == (REASONING[recorded.thinks] if recorded.thinks else None)


@pytest.mark.parametrize("recorded", ANSWERS)
def test_what_the_answer_has(recorded):
    parser, message = form_of(recorded).parser(), Message()
    message.add(parser.feed(recorded.text) + parser.finish())
    calls = [(one.name, json.loads(one.arguments)) for one in message.calls]
    assert calls == recorded.calls
    assert (message.content.strip(), message.reasoning) == (recorded.content, recorded.reasoning)


def test_every_format_has_an_answer():
    named = {recorded.call_format for recorded in ANSWERS}
    assert set(FORMATS) - named == {"json"}  # "json" is for models without a format of their own
    assert {recorded.thinks for recorded in ANSWERS} == {"", *REASONING}


@given(data=st.data(), recorded=st.sampled_from(ANSWERS), constrained=st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_pieces_of_an_answer_do_not_matter(data, recorded, constrained):
    """The answer may be complete, or cut off anywhere."""
    form = msgspec.structs.replace(form_of(recorded), is_constrained=constrained)
    text = recorded.text[: data.draw(st.integers(0, len(recorded.text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))

    def parse(*pieces: str) -> list[Any]:
        parser = form.parser()
        events = [event for piece in pieces for event in parser.feed(piece)]
        return merge(events + parser.finish())

    pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
    assert parse(*pieces) == parse(text) == parse(*text)


def test_a_template_without_marks_has_the_format_of_the_architecture():
    def found(template: str, architecture: str) -> str | None:
        calls = traits(template, *AUTO, architecture).calls
        return None if calls is None else calls.name

    assert found("{{ tools }}", "Lfm2ForCausalLM") == "lfm2"
    assert found("{{ tools }}", "DeepseekV32ForCausalLM") == "deepseek_v32"
    # The marks of a template take precedence.
    assert found("{{ tools }} <arg_key>", "Lfm2ForCausalLM") == "glm45"
    assert found("{{ tools }}", "LlamaForCausalLM") is None  # Llama models have several formats
    assert found("{{ tools }}", "") is None
    # This template shows no tools, so the server's prompt describes them, with calls in JSON.
    assert found("no functions", "Lfm2ForCausalLM") == "json"


def test_an_explicit_choice_of_mistral_writes_the_layout_of_the_template():
    chosen = ToolParserName.mistral, ReasoningParserName.none
    assert traits("{{ tools }}[TOOL_CALLS]f[ARGS]", *chosen).calls == FORMATS["mistral_args"]
    assert traits("{{ tools }}[TOOL_CALLS]", *chosen).calls == FORMATS["mistral"]
