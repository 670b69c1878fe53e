"""The grammars of tool calls: a valid call in the text of its format matches, others do not."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import ostinato
from ostinato.api.chat.tool_constraint import tool_constraint
from ostinato.api.chat.tools import ToolUse
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.bodies.parameter_schemas import parameters_of, types_of_parameters
from ostinato.api.parsing.bodies.python_bodies import PythonLayout
from ostinato.api.parsing.bodies.tagged_bodies import TagLayout
from ostinato.api.parsing.events import Message
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.parsing.reasoning import REASONING
from ostinato.api.schemas.conversation import FunctionTool
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.llguidance_text import grammar_text
from ostinato.runtime.grammar.matcher import build_matcher, load_grammar_tokenizer

DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "units": {"type": "string", "enum": ["celsius", "kelvin"]},
        "hourly": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = FunctionTool(name="get_weather", parameters=SCHEMA, strict=True)
STAY = FunctionTool(name="stay", parameters={"type": "object", "properties": {}}, strict=True)


@functools.cache
def tokenizer() -> Any:
    return load_grammar_tokenizer(str(DEMO), 3077, (2,))


def use(*tools: FunctionTool, **fields: Any) -> ToolUse:
    return ToolUse(tools=tools or (WEATHER, STAY), **fields)


def form(name: str, **fields: Any) -> AnswerForm:
    return AnswerForm(
        call_format=name,
        is_constrained=True,
        tool_names=frozenset({"get_weather", "stay", "free"}),
        parameter_types={"get_weather": types_of_parameters(SCHEMA)},
        **fields,
    )


def fits(given: ToolUse, answer: AnswerForm, text: str) -> bool:
    constraint = tool_constraint(given, answer, None)
    assert constraint is not None
    matcher = build_matcher(tokenizer(), grammar_text(constraint, {}))
    return matcher.consume_tokens(tokenizer().tokenize_str(text)) and matcher.is_accepting()


def calls_of(answer: AnswerForm, text: str) -> list[tuple[str, Any]]:
    parser, message = answer.parser(), Message()
    message.add(parser.feed(text) + parser.finish())
    assert message.content == ""
    return [(one.name, json.loads(one.arguments)) for one in message.calls]


def text_of(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    row = FORMATS[name]
    shape = row.shape
    texts = [
        f"{shape.begin}{function}{shape.middle}{row.style.written(json.dumps(arguments))}{shape.end}"
        for function, arguments in calls
    ]
    return shape.opening + shape.separator.join(texts) + shape.closing


GOOD = ("get_weather", {"city": "New York", "days": 3, "units": "kelvin", "hourly": True})
SHORT = ("get_weather", {"city": "Oslo", "days": 1})


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_required_calls_are_in_the_format_of_the_model(name):
    required = use(must_call=True)
    for calls in ([GOOD], [SHORT], [("stay", {})]):
        text = text_of(name, *calls)
        assert fits(required, form(name), text), text
        assert calls_of(form(name), text) == calls
    assert not fits(required, form(name), "It is sunny.")
    for wrong in ({"city": "Oslo"}, {"city": "Oslo", "days": 0}, SHORT[1] | {"units": "rankine"}):
        assert not fits(required, form(name), text_of(name, ("get_weather", wrong)))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_several_calls(name):
    calls = [GOOD, ("stay", {}), SHORT]
    text = text_of(name, *calls)
    is_single = FORMATS[name].is_single
    assert fits(use(must_call=True), form(name), text) is not is_single
    if not is_single:
        assert calls_of(form(name), text) == calls
    assert not fits(use(must_call=True, parallel=False), form(name), text)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_strict_calls_beside_text(name):
    """A trigger begins a call. Text without a trigger is not constrained."""
    text = text_of(name, GOOD)
    assert fits(use(), form(name), text)
    assert fits(use(), form(name), "It is sunny.")
    assert not fits(use(), form(name), text_of(name, ("get_weather", {"city": "Oslo"})))


@pytest.mark.parametrize("reasoning", sorted(REASONING))
def test_reasoning_comes_first(reasoning):
    markers = REASONING[reasoning]
    name = "openai" if markers.has_channels else "hermes"
    answer = form(name, reasoning=markers)
    call = text_of(name, SHORT)
    text = f"{markers.begin}Which one?{markers.end}{call}"
    assert fits(use(must_call=True), answer, text)
    parser, message = answer.parser(), Message()
    message.add(parser.feed(text) + parser.finish())
    assert (message.reasoning, message.content, len(message.calls)) == ("Which one?", "", 1)
    assert fits(use(must_call=True), answer, call)
    assert fits(use(), answer, text)
    said = f"{markers.begin}Which one?{markers.end}{markers.answer}It is sunny."
    assert fits(use(), answer, said)
    assert not fits(use(must_call=True), answer, said)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_custom_tool_with_a_grammar(name):
    tool = FunctionTool(name="stay", parameters={"type": "object"})
    given = use(tool, must_call=True, lark_grammars={"stay": 'start: "a\\"b\\n" "c"*'})
    row = FORMATS[name]
    begin, end = row.style.raw_ends("input")
    shape = row.shape
    text = f'{shape.opening}{shape.begin}stay{shape.middle}{begin}a"b\nccc{end}{shape.end}{shape.closing}'
    assert fits(given, form(name), text)
    assert not fits(given, form(name), text.replace("ccc", "ccd"))
    answer = form(name)
    answer.parameter_types["stay"] = {"input": ("string",)}
    assert calls_of(answer, text) == [("stay", {"input": 'a"b\nccc'})]


TAGGED = sorted(name for name, row in FORMATS.items() if isinstance(row.style, TagLayout))
PYTHON = sorted(name for name, row in FORMATS.items() if isinstance(row.style, PythonLayout))


@pytest.mark.parametrize("name", TAGGED + PYTHON)
def test_a_function_that_takes_any_parameters(name):
    given = use(FunctionTool(name="free", parameters={"type": "object"}), must_call=True)
    call = ("free", {"some_key": "text", "other": [1, 2]})
    assert fits(given, form(name), text_of(name, call))
    assert calls_of(form(name), text_of(name, call)) == [call]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "limits",
    [
        {"properties": {"a": {"type": "string", "pattern": "^x"}}},
        {"properties": {"a": {"$ref": "#/$defs/b", "pattern": "^x"}}, "$defs": {"b": {}}},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"pattern": "^x"}}},
        {"properties": {"a": {"$ref": "#/$defs/b"}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {}], "pattern": "^x"}}},
        {"properties": {"a": {"anyOf": [{}], "oneOf": [{"pattern": "^x"}]}}},
        {"properties": {"a": {"type": "string", "anyOf": [{"pattern": "^x"}, {"minLength": 9}]}}},
        {"properties": {"a": {"type": "string", "enum": ["x", "y"], "pattern": "^x"}}},
        {"properties": {"a": {}}, "minProperties": 1},
        {"properties": {"a": {}}, "required": ["b"]},
    ],
)
def test_what_tags_can_not_enforce(name, limits):
    schema = {"type": "object", **limits}
    tool = FunctionTool(name="free", parameters=schema, strict=True)
    with pytest.raises(InvalidRequestError, match="leave out strict"):
        tool_constraint(use(tool, must_call=True), form(name), None)
    tool = FunctionTool(name="free", parameters=schema)
    assert tool_constraint(use(tool, must_call=True), form(name), None) is not None


@pytest.mark.parametrize("name", TAGGED)
def test_a_reference_alone_limits_nothing(name):
    node = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/node"}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}}
    tool = FunctionTool(name="free", parameters={**schema, "$defs": {"node": node}}, strict=True)
    given = use(tool, must_call=True)
    assert fits(given, form(name), text_of(name, ("free", {"a": "any text"})))


def test_references_to_references_are_read_once():
    """From `a`, ten definitions in a row refer ten times each to the next one: 10^10 paths."""
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(30)}
    schema = {
        "properties": {"a": {"$ref": "#/$defs/d20"}, "b": {"$ref": "#/$defs/d30"}},
        "$defs": {**chain, "d30": {"type": "string"}},
    }
    found = parameters_of("free", schema, strict=True, limits_text=False)
    assert found is not None
    assert [(one.types, one.is_free) for one in found] == [((), True), (("string",), True)]


@pytest.mark.parametrize("name", PYTHON)
def test_what_calls_in_python_can_not_have(name):
    schema = {"type": "object", "properties": {"a b": {}}}
    given = use(FunctionTool(name="free", parameters=schema), must_call=True)
    with pytest.raises(InvalidRequestError, match="named arguments"):
        tool_constraint(given, form(name), None)
