"""Custom tools, allowed tools and the items of a reply, through the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server_process import HTTP, ServerProcess

MODEL = "ostinato-demo"
ASK: Any = [{"role": "user", "content": "Count the apples."}]
SUM = 'start: NUMBER (" + " NUMBER)~1..2\nNUMBER: /[1-9][0-9]?/\n'
SUM_TEXT = re.compile(r"[1-9][0-9]?( \+ [1-9][0-9]?){1,2}")
TIME = r"[0-2][0-9]:[0-5][0-9] \"(am|pm)\""
COUNT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
FUNCTIONS: Any = [
    {"type": "function", "function": {"name": name, "parameters": COUNT}} for name in ("one", "two")
]


def custom(name: str, syntax: str = "", definition: str = "") -> Any:
    tool: dict[str, Any] = {"name": name, "description": "takes a text"}
    if syntax:
        grammar = {"syntax": syntax, "definition": definition}
        tool["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": tool}


def flat(tool: dict[str, Any]) -> Any:
    """A tool of chat completions, converted to the form of the Responses API."""
    inner = dict(tool[tool["type"]])
    if "grammar" in inner.get("format", {}):
        inner["format"] = {"type": "grammar", **inner["format"]["grammar"]}
    return {"type": tool["type"], **inner}


def allowed(mode: str, *names: str, kind: str = "function") -> Any:
    tools = [{"type": kind, kind: {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as one:
        yield one


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**{**given, **fields})


class TestAllowedTools:
    def test_only_these_are_called_and_all_are_shown(self, client):
        every = ask(client, tools=FUNCTIONS, tool_choice="required", max_tokens=1)
        for name in ("one", "two"):
            answer = ask(client, tools=FUNCTIONS, tool_choice=allowed("required", name))
            calls = answer.choices[0].message.tool_calls or []
            assert {call.function.name for call in calls} <= {name}
            assert calls or answer.choices[0].finish_reason == "length"
            assert answer.usage.prompt_tokens == every.usage.prompt_tokens
        answer = ask(client, tools=FUNCTIONS, tool_choice=allowed("auto", "two"), max_tokens=8)
        assert answer.choices[0].message.content is not None

    def test_in_responses(self, client):
        choice = {"type": "allowed_tools", "mode": "required"}
        choice["tools"] = [{"type": "function", "name": "two"}]
        answer = client.responses.create(
            model=MODEL,
            input="Count.",
            tools=[flat(one) for one in FUNCTIONS],
            tool_choice=choice,
            temperature=0,
            max_output_tokens=200,
        )
        assert answer.tool_choice.model_dump(exclude_none=True) == choice
        calls = [item for item in answer.output if item.type == "function_call"]
        assert {call.name for call in calls} <= {"two"}
        assert calls or answer.status == "incomplete"

    @pytest.mark.parametrize(
        ("choice", "said"),
        [
            (allowed("auto", "three"), "names the function 'three', and tools has one, two"),
            (allowed("auto", "one", kind="custom"), "tools has no custom tool"),
            ({"type": "custom", "custom": {"name": "one"}}, "tools has no custom tool"),
            (allowed("never", "one"), "never"),
            (allowed("auto"), "Expected `array` of length >= 1"),
        ],
    )
    def test_what_is_refused(self, client, choice, said):
        with pytest.raises(openai.BadRequestError, match=re.escape(said)) as refused:
            ask(client, tools=FUNCTIONS, tool_choice=choice)
        assert str(refused.value.param).startswith("tool_choice")


CASES = [
    (custom("note"), re.compile(r"(?s).*")),
    (custom("add", "lark", SUM), SUM_TEXT),
    (custom("clock", "regex", TIME.replace('\\"', '"')), re.compile(TIME.replace('\\"', '"'))),
]


@pytest.mark.parametrize(("tool", "language"), CASES, ids=["text", "lark", "regex"])
class TestCustomTools:
    def test_chat(self, client, tool, language):
        name = tool["custom"]["name"]
        fields = {"tools": [tool], "max_tokens": 70}
        fields["tool_choice"] = {"type": "custom", "custom": {"name": name}}
        choice = ask(client, **fields).choices[0]
        pieces = [
            one
            for chunk in ask(client, **fields, stream=True)
            for one in chunk.choices[0].delta.tool_calls or []
        ]
        if choice.finish_reason == "length":  # without a grammar the text may have no end
            assert tool["custom"].get("format") is None
            return
        (call,) = choice.message.tool_calls
        assert (call.type, call.custom.name) == ("custom", name)
        assert language.fullmatch(call.custom.input)
        assert pieces[0].type == "custom"
        assert pieces[0].custom["name"] == name
        assert "".join(one.custom["input"] for one in pieces) == call.custom.input
        turn = [
            *ASK,
            {"role": "assistant", "tool_calls": [call.model_dump(exclude_none=True)]},
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        answer = ask(client, messages=turn, tools=[tool], max_tokens=4)
        assert (
            answer.usage.prompt_tokens > ask(client, tools=[tool], max_tokens=4).usage.prompt_tokens
        )

    def test_responses(self, client, tool, language):
        name = tool["custom"]["name"]
        fields: dict[str, Any] = {
            "model": MODEL,
            "input": "Count the apples.",
            "tools": [flat(tool)],
            "tool_choice": {"type": "custom", "name": name},
            "temperature": 0,
            "max_output_tokens": 70,
        }
        answer = client.responses.create(**fields)
        if answer.status == "incomplete":
            assert tool["custom"].get("format") is None
            return
        (call,) = answer.output
        assert (call.type, call.name) == ("custom_tool_call", name)
        assert language.fullmatch(call.input)
        assert call.id.startswith("ctc_")
        events = list(client.responses.create(**fields, stream=True))
        of_input = [one for one in events if one.type.startswith("response.custom_tool_call")]
        assert "".join(one.delta for one in of_input[:-1]) == of_input[-1].input == call.input
        assert events[-1].response.output[0].input == call.input
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
        follow: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4, "temperature": 0}
        stored = client.responses.create(**follow, previous_response_id=answer.id, input=[result])
        items: Any = [{"role": "user", "content": fields["input"]}, call.model_dump(), result]
        whole = client.responses.create(**follow, input=items)
        assert stored.output_text == whole.output_text
        assert stored.usage.input_tokens == whole.usage.input_tokens


def test_an_invalid_grammar_is_refused(client):
    for syntax, text in (("lark", "start: ("), ("regex", "(")):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, tools=[custom("a", syntax, text)])
        assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="two tools named 'one'"):
        ask(client, tools=[custom("one"), *FUNCTIONS])
    wrong = {"id": "a", "type": "custom", "function": {"name": "a", "arguments": "{}"}}
    with pytest.raises(openai.BadRequestError, match=r"tool_calls\[0\].custom is required"):
        ask(client, messages=[{"role": "assistant", "tool_calls": [wrong]}])


class TestInputItems:
    def test_of_a_conversation(self, client):
        fields: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4}
        first = client.responses.create(**fields, input="Hi")
        given: Any = [
            {"role": "assistant", "content": "Yes?"},
            {"id": "mine", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        ]
        second = client.responses.create(**fields, input=given, previous_response_id=first.id)
        items = list(client.responses.input_items.list(second.id, order="asc"))
        texts = [item.content[0].text for item in items]
        assert texts == ["Hi", first.output_text, "Yes?", "Go"]
        assert [item.role for item in items] == ["user", "assistant", "assistant", "user"]
        assert items[0].content[0].type == "input_text"
        assert items[2].content[0].type == "output_text"
        assert items[3].id == "mine"
        assert len({item.id for item in items}) == 4
        down = client.responses.input_items.list(second.id, limit=3)
        assert [item.id for item in down.data] == [item.id for item in items[:0:-1]]
        assert (down.has_more, down.first_id, down.last_id) == (True, "mine", items[1].id)
        assert [item.id for item in down.get_next_page().data] == [items[0].id]
        # The listed items are accepted as input.
        again = [json.loads(item.model_dump_json(exclude_none=True)) for item in items]
        client.responses.create(**fields, input=again)

    def test_while_it_is_made_and_when_it_is_gone(self, client):
        answer = client.responses.create(model=MODEL, input="Hi", background=True)
        (item,) = client.responses.input_items.list(answer.id)
        assert item.content[0].text == "Hi"
        client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(answer.id)

    @pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "after=none", "limit=x"])
    def test_what_is_refused(self, server, client, query):
        answer = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
        url = f"{server.url}/v1/responses/{answer.id}/input_items?{query}"
        response = HTTP.get(url)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == query.partition("=")[0]
