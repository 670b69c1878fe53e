"""Tool calls in each format: the parser tells calls from content, however the text is cut."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.bodies import escaped_bodies
from ostinato.api.parsing.bodies.python_bodies import PythonLayout
from ostinato.api.parsing.events import CallArguments, CallBegins, Content, Event, Message, merge
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.parsing.reasoning import REASONING
from ostinato.api.parsing.tool_calls import CallParser

NAMES = frozenset({"add", "get_weather"})
THINK = REASONING["think"]
TYPES = {"add": {"b": ("string",)}}


def parse(name: str, *pieces: str, constrained: bool = False, **fields: object) -> list[Event]:
    parser = AnswerForm(
        call_format=name,
        is_constrained=constrained,
        tool_names=NAMES,
        parameter_types=TYPES if FORMATS[name].needs_types else {},
        **fields,
    ).parser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge(events + parser.finish())


def add(index: int, arguments: str, call_id: str | None = None) -> list[Event]:
    return [CallBegins(index, "add", call_id), CallArguments(index, arguments)]


ADD = '{"name": "add", "arguments": {"a": 1}}'
HERMES = [
    (f"<tool_call>\n{ADD}\n</tool_call>", add(0, '{"a": 1}')),
    (
        f"Let me see.\n\n<tool_call>{ADD}</tool_call>\n",
        [Content("Let me see."), *add(0, '{"a": 1}')],
    ),
    (
        f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        add(0, '{"a": 1}') + add(1, '{"a": 1}'),
    ),
    (f"<tool_call>{ADD}", add(0, '{"a": 1}')),  # the answer ended before the end marker
    (f"<tool_call>{ADD}</tool_call> done", [*add(0, '{"a": 1}'), Content("done")]),
    (f"<tool_call>{ADD}</tool_", [*add(0, '{"a": 1}'), Content("</tool_")]),
    ('<tool_call>{"name": "add"}</tool_call>', add(0, "{}")),
    (
        '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "add"}',
        add(0, '{"a": "</tool_call>"}'),
    ),
    ('<tool_call>{"name": "add", "parameters": {"a": "x\ny"}}', add(0, '{"a": "x\\ny"}')),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', add(0, '{"a": 1}')),
    (f"a <tool_call>{{oops <tool_call>{ADD}", [Content("a <tool_call>{oops"), *add(0, '{"a": 1}')]),
]
MALFORMED_HERMES = [
    "<tool_call>{broken}</tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}, "parameters": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    "<tool_call>[]</tool_call>",
    "<tool_call>",
    "<tool_call>\n",
    "x <tool_c",
    "plain, with {braces} and [brackets] \n",
]
LLAMA = [
    ('{"name": "add", "parameters": {"a": 1}}', add(0, '{"a": 1}')),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', add(0, '{"a": 1}')),
    (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
        add(0, '{"a": 1}') + add(1, '{"a": 2}'),
    ),
    ('{"answer": 1}', [Content('{"answer": 1}')]),
    (
        'Here: {"name": "add", "parameters": {}}',
        [Content('Here: {"name": "add", "parameters": {}}')],
    ),
    ('{"name": "Ada"}', [Content('{"name": "Ada"}')]),
]
MISTRAL = [
    (
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        add(0, '{"a": 1}', "abcdefghi"),
    ),
    (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add"}]',
        add(0, '{"a": 1}') + add(1, "{}"),
    ),
    ('[TOOL_CALLS]add[ARGS]{"a": 1}', add(0, '{"a": 1}')),
    ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 2}', add(0, '{"a": 1}') + add(1, '{"a": 2}')),
    ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', add(0, '{"a": 1}', "abcdefghi")),
    ("[TOOL_CALLS]I think so.", [Content("[TOOL_CALLS]I think so.")]),
    (
        '[TOOL_CALLS][{"name": "add"}, {"name": "other"}]',
        [Content('[TOOL_CALLS][{"name": "add"}, {"name": "other"}]')],
    ),
    ("[TOOL_CALLS]add[ARGS][1]", [Content("[TOOL_CALLS]add[ARGS][1]")]),
]
GRANITE = [
    (f"<|tool_call|>[{ADD}]", add(0, '{"a": 1}')),
    (f"<tool_call>[{ADD}, {ADD}]", add(0, '{"a": 1}') + add(1, '{"a": 1}')),
    (f"<|tool_call|> [{ADD}] done", [*add(0, '{"a": 1}'), Content("done")]),
    ("<|tool_call|>[1]", [Content("<|tool_call|>[1]")]),
    ("<|tool_call|>", [Content("<|tool_call|>")]),
]
PHI = [
    (f"functools[{ADD}]", add(0, '{"a": 1}')),
    (
        f"I will add.\n<|tool_call|>[{ADD}]<|/tool_call|>",
        [Content("I will add."), *add(0, '{"a": 1}')],
    ),
    (f"functools[{ADD}, {ADD}]", add(0, '{"a": 1}') + add(1, '{"a": 1}')),
    ("functools is a module.", [Content("functools is a module.")]),
    ("functools[1, 2]", [Content("functools[1, 2]")]),
]
JSON = [
    (ADD, add(0, '{"a": 1}')),
    (f"[{ADD}, {ADD}]", add(0, '{"a": 1}') + add(1, '{"a": 1}')),
    (f"```json\n{ADD}\n```", add(0, '{"a": 1}')),
    ("[1, 2]", [Content("[1, 2]")]),
    ('```json\n{"x": 1}\n```', [Content('```json\n{"x": 1}\n```')]),
]
CASES = [
    *(("hermes", *case) for case in HERMES),
    *(("hermes", text, [Content(text)]) for text in MALFORMED_HERMES),
    *(("llama3_json", *case) for case in LLAMA),
    *(("mistral", *case) for case in MISTRAL),
    *(("granite", *case) for case in GRANITE),
    *(("phi4_mini_json", *case) for case in PHI),
    *(("json", *case) for case in JSON),
]


@pytest.mark.parametrize(("name", "text", "events"), CASES)
def test_whole_answers(name, text, events):
    assert parse(name, text) == events
    assert parse(name, *text) == events


def test_one_call_where_parallel_ones_are_not_wanted():
    text = f"ok <tool_call>{ADD}</tool_call><tool_call>{ADD}</tool_call> more"
    assert parse("hermes", text, max_calls=1) == [Content("ok"), *add(0, '{"a": 1}')]
    assert parse("json", f"[{ADD}, {ADD}]", max_calls=1) == add(0, '{"a": 1}')


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("constrained", [False, True])
def test_what_a_grammar_makes_is_read(name, constrained):
    form, shape = FORMATS[name], FORMATS[name].shape
    first, second = '{"a": [1, {"b": "}"}], "b": "x y"}', "{}"
    events = add(0, first)
    one = f"{shape.begin}add{shape.middle}{form.style.written(first)}{shape.end}"
    other = f"{shape.begin}get_weather{shape.middle}{form.style.written(second)}{shape.end}"
    text = f"{shape.opening}{one}"
    if not form.is_single:
        text += f"{shape.separator}{other}"
        events += [CallBegins(1, "get_weather"), CallArguments(1, second)]
    text += shape.closing

    def anonymous(*pieces: str) -> list[Event]:
        parsed = parse(name, *pieces, constrained=constrained)
        return [
            CallBegins(event.index, event.name) if isinstance(event, CallBegins) else event
            for event in parsed
        ]

    assert anonymous(text) == events
    assert anonymous(*text) == events


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_constrained_arguments_come_as_they_are_written(name):
    form = FORMATS[name]
    parser = AnswerForm(
        call_format=name,
        is_constrained=True,
        tool_names=NAMES,
        parameter_types=TYPES if form.needs_types else {},
    ).parser()
    text = form.written("add", '{"b": "later", "c": 1}')
    cut = text.index("later") + (len("later") + 3 if isinstance(form.style, PythonLayout) else 2)
    events = merge(parser.feed(text[:cut]))
    known = events[-1].text
    assert known == ('{"b": "later"' if isinstance(form.style, PythonLayout) else '{"b": "la')
    assert events == add(0, known)
    rest = merge(parser.feed(text[cut:]) + parser.finish())
    assert [event.text for event in rest] == ['{"b": "later", "c": 1}'.removeprefix(known)]


def test_a_constrained_call_that_the_limit_cuts_off_is_a_call():
    text = FORMATS["hermes"].written("add", '{"a": "long"}')
    cut = text.index("long") + 2
    assert parse("hermes", text[:cut], constrained=True) == add(0, '{"a": "lo')
    assert parse("hermes", text[:14], constrained=True) == [Content(text[:14])]


def test_calls_within_reasoning_are_thoughts():
    text = f"<think>maybe <tool_call>{ADD}</tool_call></think>\n<tool_call>{ADD}</tool_call>"
    message = Message()
    message.add(parse("hermes", text, reasoning=THINK))
    assert message.reasoning == f"maybe <tool_call>{ADD}</tool_call>"
    assert (message.content, [one.arguments for one in message.calls]) == ("", ['{"a": 1}'])


def test_reasoning_may_be_left_out():
    text = "<think>maybe</think>yes"
    assert parse("hermes", text, reasoning=THINK, shows_reasoning=False) == [Content("yes")]


def test_other_json_is_shown_as_it_comes():
    parser = AnswerForm(call_format="json", tool_names=NAMES).parser()
    assert merge(parser.feed('{"city": "Oslo", "t')) == [Content('{"city": "Oslo", "t')]


MARKERS = sorted({marker for form in FORMATS.values() for marker in form.markers})
MARKERS += [
    "<arg_key>b</arg_key>",
    "<parameter=b>",
    '<parameter name="b">',
    "</parameter>",
    "</function>",
    "</invoke>",
]
PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
        ADD, '{"name": "add", ', '"arguments": {"a": "é"}}', "```json", "```", "{", "}", "[", "]", '"', ";", ",",
        "add", "\n", " ", "\\", "word", "(", ")", "=", "'", "b=", *MARKERS, "<", "</", "😀", '{"name": "add", "arguments": ', "}\n</tool_call>", "}]",
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("[TOOL_CALLS]", "["),
        ('{"a\\word', '{"a'),
        ('{"a" "b"}', '{"a" '),
        ('{"a": 12', '{"a": 12'),
        ('{"a": 12word}', '{"a": 12'),
        ('{"a": truth', '{"a": tru'),
        ('{"a": -1.5e+x', '{"a": -1.5e+'),
        ("{true", "{"),
        ('{"a": 12 word', '{"a": 12 '),
        ('{"a": "\\u00', '{"a": "'),
        ("{,}", "{"),
    ],
)
def test_arguments_that_a_grammar_would_not_have_let_through(arguments, given):
    text = '{"name": "add", "arguments": ' + arguments
    events = parse("json", text, constrained=True)
    assert [one.text for one in events if isinstance(one, CallArguments)] == [given]
    assert parse("json", *text, constrained=True) == events


@given(
    data=st.data(),
    name=st.sampled_from(sorted(FORMATS)),
    reasoning=st.sampled_from(sorted(REASONING)),
    is_open=st.booleans(),
    constrained=st.booleans(),
    texts=st.lists(PIECES, max_size=10),
)
@settings(max_examples=500, deadline=None)
def test_any_pieces_of_one_text_give_one_answer(data, name, reasoning, is_open, constrained, texts):
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    edges = [0, *cuts, len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    form = {
        "reasoning": REASONING[reasoning],
        "reasoning_is_open": is_open,
        "constrained": constrained,
    }
    assert parse(name, *pieces, **form) == parse(name, text, **form) == parse(name, *text, **form)


@given(name=st.sampled_from(sorted(FORMATS)), text=st.lists(PIECES, max_size=10).map("".join))
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_and_arguments_are_json(name, text):
    message = Message()
    message.add(parse(name, text))
    for call in message.calls:
        assert call.name in NAMES
        assert isinstance(json.loads(call.arguments), dict)
    if not message.calls:
        assert message.content == text


def test_a_value_of_many_items_is_read_once(monkeypatch):
    reads = []
    value = escaped_bodies._value

    def counting(text, begin, depth):
        reads.append(begin)
        return value(text, begin, depth)

    monkeypatch.setattr(escaped_bodies, "_value", counting)
    items = json.dumps({"a": list(range(500)), "b": "é" * 500, "c": list(range(500))})
    text = FORMATS["functiongemma"].written("add", items)
    events = parse("functiongemma", *text, constrained=True)
    assert [json.loads(event.text) for event in merge(events)[1:]] == [json.loads(items)]
    assert len(reads) < 1100  # one for each item, and a few for each argument


@pytest.mark.parametrize("name", ["granite", "qwen3_coder", "xlam", "deepseek_v3"])
def test_of_markers_without_calls_only_the_beginnings_are_read(name):
    form, sizes = FORMATS[name], []

    class Counting:
        def __init__(self, reader) -> None:
            self.reader = reader

        def read(self, body):
            sizes.append(len(body))
            return self.reader.read(body)

    counted = msgspec.structs.replace(
        form, reader=lambda opening, types: Counting(form.reader(opening, types))
    )
    first = form.written("add", '{"a": "x"}')
    text = first[: first.index("x")] + form.openings[0] * 5000
    parser = CallParser(counted, NAMES, types=TYPES if form.needs_types else {})
    message = Message()
    message.add(parser.feed(text) + parser.finish())
    assert (message.content, message.calls) == (text, [])
    assert len(sizes) >= 5000
    assert sum(sizes) < 256 * len(sizes) + 4 * len(text)


@pytest.mark.parametrize("filler", ["x", '\\"', "<tool_call>", '<tool_call>{"', "[", " "])
def test_a_long_answer_costs_no_more_than_its_length(filler):
    text = '<tool_call>{"name": "add", "arguments": {"a": "' + filler * 40_000
    parser = AnswerForm(call_format="hermes", tool_names=NAMES).parser()
    begin = time.process_time()
    for position in range(0, len(text), 8):
        parser.feed(text[position : position + 8])
    parser.finish()
    assert time.process_time() - begin < 10
