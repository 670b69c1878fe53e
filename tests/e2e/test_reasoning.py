"""Constraints of models that reason: the reasoning is free, the answer obeys the constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.scripted_model import scripted_server
from tests.e2e.server_process import HTTP, ServerProcess

THOUGHT = 'Is it {"age": "old"} or 7?'
ANSWERS = {
    "age?": ["<think>", "\n", THOUGHT, "\n\n", "</think>", "\n\n\n", '{"age":', " 7", " years", "}"],
    "yes?": ["no", ", maybe", "yes", " 1", "8", "{a}"],
}  # fmt: skip
TOKENS = ["<unk>", "</s>", *ANSWERS, *ANSWERS["age?"]]  # in the order of the scripted model's ids
TEMPLATE = (
    "{# tools <tool_call> </think> #}{% for m in messages %}"
    "{{ m.reasoning_content }} {{ m.content }} {% endfor %}"
)
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE, "strict": True}}
JSON = r'\{\s*"age":\s*(\d|[1-9]\d)\s*\}'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("model"), ANSWERS, TEMPLATE) as process:
        yield process


def ask(server: ServerProcess, text: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    reply = HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=200)
    assert reply.status_code == 200, reply.text
    return reply


def test_what_the_model_says_by_itself(server):
    message = ask(server, "age?").json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHT, '{"age": 7 years}')


def test_the_usage_tells_thoughts_apart(server):
    whole = ask(server, "age?").json()["usage"]
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    events = ask(server, "age?", **fields).text.split("data: ")
    assert json.loads(events[-2])["usage"] == whole
    # These are the tokens from <think> to the last token before </think>.
    assert whole["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert whole["completion_tokens"] == len(ANSWERS["age?"]) + 1
    none = ask(server, "yes?").json()["usage"]["completion_tokens_details"]
    assert none == {"reasoning_tokens": 0}
    plain = {"prompt": "age?", "max_tokens": 4}
    reply = HTTP.post(f"{server.url}/v1/completions", json=plain).json()
    assert "completion_tokens_details" not in reply["usage"]


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"response_format": FORMAT}, JSON),
        ({"response_format": FORMAT, "tools": [TOOL]}, JSON),
        ({"structured_outputs": {"choice": ["no", '{"age":']}}, r'\{"age":'),
        ({"structured_outputs": {"regex": "[0-9]{2}"}}, r"\d\d"),
        ({"structured_outputs": {"grammar": 'root ::= "{" [a-z]+ "}"'}}, r"\{[a-z]+\}"),
    ],
    ids=["schema", "schema beside tools", "choice", "regex", "grammar"],
)
def test_it_thinks_first_and_then_keeps_to_the_form(server, asked, pattern):
    message = ask(server, "age?", **asked).json()["choices"][0]["message"]
    assert message["reasoning"] == THOUGHT
    assert re.fullmatch(pattern, message["content"])
    lines = ask(server, "age?", stream=True, **asked).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    hidden = ask(server, "age?", include_reasoning=False, **asked).json()["choices"][0]["message"]
    assert (hidden["content"], "reasoning" in hidden) == (message["content"], False)


def test_a_limit_within_the_thoughts_leaves_no_broken_answer(server):
    (choice,) = ask(server, "age?", max_tokens=4, response_format=FORMAT).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")


def test_who_does_not_think_keeps_to_the_form_from_the_start(server):
    asked = {"structured_outputs": {"choice": ["yes", "no"]}}
    (choice,) = ask(server, "yes?", **asked).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "no")
    assert "reasoning" not in choice["message"]


@pytest.mark.parametrize(
    ("budget", "thought"), [(0, ""), (1, ""), (2, THOUGHT), (3, THOUGHT), (1000, THOUGHT)]
)
@pytest.mark.parametrize("asked", [{}, {"response_format": FORMAT}], ids=["free", "schema"])
def test_a_budget_ends_the_thoughts(server, budget, thought, asked):
    """The model writes a line end, the thought and line ends, and then the end marker."""
    fields = {"thinking_token_budget": budget, "return_token_ids": True, **asked}
    (choice,) = ask(server, "age?", **fields).json()["choices"]
    message = choice["message"]
    assert message.get("reasoning", "") == thought
    if asked:
        assert re.fullmatch(JSON, message["content"])
    else:
        assert message["content"] == '{"age": 7 years}'
    num_tokens = choice["token_ids"].index(TOKENS.index("</think>"))
    assert num_tokens == 1 + min(budget, 3)
    lines = ask(server, "age?", stream=True, **fields).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line[6:7] == "{"]
    ids = [one for event in events for one in event["choices"][0].get("token_ids", ())]
    assert ids == choice["token_ids"]


def test_a_budget_of_who_does_not_think_changes_nothing(server):
    plain, limited = (
        ask(server, "yes?", **fields).json()["choices"][0]["message"]
        for fields in ({}, {"thinking_token_budget": 0})
    )
    assert plain == limited


def test_a_budget_without_reasoning_is_refused(server):
    body = {
        "messages": [{"role": "user", "content": "age?"}],
        "chat_template": "{{ messages[-1].content }}",
        "thinking_token_budget": 5,
    }
    reply = HTTP.post(f"{server.url}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "thinking_token_budget")
    assert "no known markers of reasoning" in error["message"]


def test_reasoning_that_comes_back_encoded(server):
    """The client sets `store` to false and sends the items again."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as client:
        fields: Any = {"model": "scripted", "temperature": 0, "store": False}
        fields["include"] = ["reasoning.encrypted_content"]
        first = client.responses.create(input="age?", **fields).model_dump()
        thoughts, message = first["output"]
        assert thoughts["encrypted_content"]
        bare = {**thoughts, "content": None}
        items: Any = [{"role": "user", "content": "age?"}, bare, message]
        counts = [
            client.responses.input_tokens.count(model="scripted", input=given).input_tokens
            for given in (items, [items[0], thoughts, message], [items[0], message])
        ]
        assert counts[0] == counts[1] > counts[2]
        next_one: Any = [*items, {"role": "user", "content": "yes?"}]
        assert client.responses.create(input=next_one, **fields).output_text


def test_thinking_that_is_left_out(server):
    body = {"messages": [{"role": "user", "content": "age?"}], "max_tokens": 50, "temperature": 0}
    kinds = []
    for display in ("summarized", "omitted"):
        thinking = {"type": "adaptive", "display": display}
        reply = HTTP.post(f"{server.url}/v1/messages", json={**body, "thinking": thinking})
        kinds.append([block["type"] for block in reply.json()["content"]])
    assert kinds == [["thinking", "text"], ["text"]]


def test_a_format_in_the_responses_dialect(server):
    form: Any = {"type": "json_schema", "name": "age", "schema": AGE, "strict": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as client:
        reply = client.responses.create(
            model="scripted", input="age?", temperature=0, text={"format": form}
        )
    thoughts, message = reply.model_dump()["output"]
    assert (thoughts["type"], message["type"]) == ("reasoning", "message")
    assert thoughts["content"][0]["text"] == THOUGHT
    assert 0 <= json.loads(reply.output_text)["age"] <= 99
