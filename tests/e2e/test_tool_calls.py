"""Tool calls without a constraint, reasoning and malformed calls, over HTTP and both clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.scripted_model import scripted_server
from tests.e2e.server_process import HTTP, ServerProcess


def call(city: str) -> str:
    return (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    )


MALFORMED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": Oslo}}\n</tool_call>'
ANSWERS = {
    "weather?": f"<think>\nTwo cities.\n</think>\n\nLooking.\n{call('Oslo')}\n{call('Rome')}",
    "broken?": f"So: {MALFORMED}",
    "sunny": "It is sunny.",
    "stop?": "<think>\nno END here\n</think>\n\nall END of it",
}
TEMPLATE = (
    "{# tools <tool_call> </think> #}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %} {{ c.function.name }}"
    "{% endfor %} {% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CLAUDE_TOOL = {"name": "get_weather", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("model"), ANSWERS, TEMPLATE) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as one:
        yield one


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_reasoning_content_and_parallel_calls(client):
    fields = {"model": "scripted", "tools": [TOOL], "messages": user("Hi weather?")}
    (choice,) = client.chat.completions.create(**fields).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Looking.", "Two cities.")
    cities = [json.loads(one.function.arguments)["city"] for one in message.tool_calls]
    assert cities == ["Oslo", "Rome"]
    results = [
        {"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in message.tool_calls
    ]
    fields["messages"] = [*fields["messages"], message, *results]
    assert client.chat.completions.create(**fields).choices[0].message.content == "It is sunny."


def test_the_same_answer_streamed(client):
    fields = {"model": "scripted", "tools": [TOOL], "messages": user("Hi weather?")}
    with client.chat.completions.stream(**fields) as stream:
        thoughts = [
            getattr(event.chunk.choices[0].delta, "reasoning", None) or ""
            for event in stream
            if event.type == "chunk"
        ]
        final = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(**fields).choices[0]
    assert final.message.content == whole.message.content
    assert "".join(thoughts) == whole.message.reasoning
    assert [one.function.arguments for one in final.message.tool_calls] == [
        one.function.arguments for one in whole.message.tool_calls
    ]
    assert final.finish_reason == "tool_calls"


def test_one_call_where_parallel_ones_are_not_wanted(client):
    fields = {"model": "scripted", "tools": [TOOL], "messages": user("weather?")}
    answer = client.chat.completions.create(**fields, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1


def test_a_malformed_call_is_content(client):
    fields = {"model": "scripted", "tools": [TOOL], "messages": user("broken?")}
    (choice,) = client.chat.completions.create(**fields).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWERS["broken?"])
    assert choice.message.tool_calls is None
    chunks = client.chat.completions.create(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ANSWERS["broken?"]


def test_a_stop_string_counts_within_reasoning(client):
    fields = {"model": "scripted", "messages": user("stop?")}
    message = client.chat.completions.create(**fields, stop="END").choices[0].message
    assert (message.reasoning, message.content) == ("no ", "")
    message = client.chat.completions.create(**fields, stop="END of").choices[0].message
    assert (message.reasoning, message.content) == ("no END here", "all ")


def test_in_the_anthropic_dialect(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=200) as claude:
        fields = {"model": "scripted", "max_tokens": 300, "tools": [CLAUDE_TOOL]}
        with claude.messages.stream(messages=user("weather?"), **fields) as stream:
            final = stream.get_final_message()
        whole = claude.messages.create(messages=user("weather?"), **fields)
        kinds = [(one.type, getattr(one, "input", None)) for one in whole.content]
        assert kinds == [
            ("thinking", None),
            ("text", None),
            ("tool_use", {"city": "Oslo"}),
            ("tool_use", {"city": "Rome"}),
        ]
        assert [(one.type, getattr(one, "input", None)) for one in final.content] == kinds
        assert whole.content[0].thinking == final.content[0].thinking == "Two cities."
        assert whole.stop_reason == final.stop_reason == "tool_use"
        turn = {"role": "assistant", "content": final.content}
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": "sunny"}
            for one in final.content
            if one.type == "tool_use"
        ]
        messages = [*user("weather?"), turn, {"role": "user", "content": results}]
        answer = claude.messages.create(messages=messages, **fields)
        assert answer.content[0].text == "It is sunny."


def test_in_the_responses_dialect(client):
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    fields = {"model": "scripted", "tools": [tool]}
    with client.responses.stream(input="weather?", **fields) as stream:
        first = stream.get_final_response()
    assert [one.type for one in first.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert first.usage.output_tokens_details.reasoning_tokens > 10
    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "sunny"}
        for one in first.output[2:]
    ]
    stored = client.responses.create(input=results, previous_response_id=first.id, **fields)
    items = [{"role": "user", "content": "weather?"}, *first.output, *results]
    sent = client.responses.create(input=items, **fields)
    assert stored.output_text == sent.output_text == "It is sunny."


def test_no_parser_runs_if_the_template_has_neither_tools_nor_reasoning(server):
    whole = HTTP.post(
        f"{server.url}/v1/chat/completions",
        json={
            "messages": user("weather?"),
            "chat_template": "{{ messages[-1].content }}",  # renders neither tools nor reasoning
        },
        timeout=200,
    ).json()
    assert whole["choices"][0]["message"]["content"] == ANSWERS["weather?"]
