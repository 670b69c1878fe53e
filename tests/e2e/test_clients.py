"""The official clients against a real server process: tools, streams, parsed answers, errors.

The bundled model cannot call tools by itself. A grammar writes the required calls.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.e2e.server_process import ServerProcess

GREEDY = {"temperature": 0}  # newer versions of the anthropic package have no such parameter
HI = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "weather", "parameters": PARAMETERS},
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("model.max_model_len=1024", "model.name=demo") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as one:
        yield one


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=200) as one:
        yield one


def check_weather(arguments: str) -> None:
    value = json.loads(arguments)
    assert value["city"] in ("Oslo", "Rome")
    assert 1 <= value["days"] <= 5


class TestOpenAIChat:
    def test_a_required_call_and_the_next_turn(self, client):
        fields = {"model": "demo", "tools": [WEATHER], "max_tokens": 80}
        first = client.chat.completions.create(messages=HI, tool_choice="required", **fields)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        call = choice.message.tool_calls[0]
        assert call.function.name == "get_weather"
        check_weather(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        second = client.chat.completions.create(
            messages=[*HI, choice.message, result], tool_choice="none", **fields
        )
        assert second.choices[0].message.content
        assert second.choices[0].message.tool_calls is None

    def test_a_named_call(self, client):
        answer = client.chat.completions.create(
            model="demo",
            messages=HI,
            tools=[WEATHER, TIME],
            tool_choice={"type": "function", "function": {"name": "get_time"}},
            max_tokens=80,
            temperature=2,
            n=3,
        )
        for choice in answer.choices:
            (call,) = choice.message.tool_calls
            assert call.function.name == "get_time"
            assert isinstance(json.loads(call.function.arguments), dict)

    def test_a_stream_of_calls(self, client):
        with client.chat.completions.stream(
            model="demo",
            messages=HI,
            tools=[WEATHER, TIME],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=80,
            temperature=1.5,
            seed=4,
        ) as stream:
            events = list(stream)
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
        pieces = [one for one in events if one.type == "tool_calls.function.arguments.delta"]
        assert "".join(one.arguments_delta for one in pieces) == call.function.arguments
        assert len(pieces) > 1

    def test_parse_gives_a_call_of_a_pydantic_model(self, client):
        class Weather(pydantic.BaseModel):
            """Weather of a city."""

            city: str = pydantic.Field(max_length=8)
            days: int = pydantic.Field(ge=1, le=9)

        answer = client.chat.completions.parse(
            model="demo",
            messages=HI,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=80,
        )
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)

    def test_parse_gives_a_pydantic_model_beside_tools(self, client):
        class Answer(pydantic.BaseModel):
            yes: bool

        answer = client.chat.completions.parse(
            model="demo", messages=HI, response_format=Answer, tools=[STRICT], max_tokens=80
        )
        message = answer.choices[0].message
        assert isinstance(message.parsed, Answer) or message.tool_calls

    def test_strict_calls_leave_free_text_free(self, client):
        answer = client.chat.completions.create(
            model="demo", messages=HI, tools=[STRICT], max_tokens=30
        )
        message = answer.choices[0].message
        for call in message.tool_calls or ():
            check_weather(call.function.arguments)
        assert message.content or message.tool_calls

    def test_asynchronously(self, server):
        async def calls() -> list[str]:
            client: Any = openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", timeout=200
            )
            async with client:
                answers = await asyncio.gather(
                    *(
                        client.chat.completions.create(
                            model="demo",
                            messages=HI,
                            tools=[WEATHER],
                            tool_choice="required",
                            parallel_tool_calls=False,
                            max_tokens=80,
                        )
                        for _ in range(4)
                    )
                )
            return [one.choices[0].message.tool_calls[0].function.arguments for one in answers]

        for arguments in asyncio.run(calls()):
            check_weather(arguments)

    def test_a_schema_that_can_not_be_enforced_is_refused(self, client):
        schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
            client.chat.completions.create(
                model="demo", messages=HI, tools=[tool], tool_choice="required"
            )
        assert refused.value.param == "tools"


TOOL = {"type": "function", "strict": True, **WEATHER["function"]}


class TestOpenAIResponses:
    def test_a_conversation_on_the_server(self, client):
        first = client.responses.create(
            model="demo", input="Name a city.", max_output_tokens=20, temperature=0
        )
        assert first.output_text
        assert client.responses.retrieve(first.id).output_text == first.output_text
        second = client.responses.create(
            model="demo",
            input="Another one.",
            previous_response_id=first.id,
            instructions="Be brief.",
            max_output_tokens=20,
            temperature=0,
        )
        assert second.usage.input_tokens > first.usage.input_tokens
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)

    def test_a_stream_adds_up_to_the_whole(self, client):
        fields = {"model": "demo", "input": "Say hi.", "temperature": 0}
        with client.responses.stream(**fields) as stream:
            deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert len(deltas) > 1
        assert final.output_text == "".join(deltas)
        assert final.output_text == client.responses.create(**fields).output_text

    def test_a_call_and_its_result(self, client):
        fields = {"model": "demo", "tools": [TOOL], "max_output_tokens": 80}
        with client.responses.stream(
            input="Weather in Oslo?", tool_choice="required", parallel_tool_calls=False, **fields
        ) as stream:
            first = stream.get_final_response()
        (call,) = first.output
        check_weather(call.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for given in (
            {"input": [result], "previous_response_id": first.id},
            {"input": [*HI, *first.output, result]},
        ):
            assert client.responses.create(tool_choice="none", **given, **fields).output_text

    def test_parse_gives_a_pydantic_model(self, client):
        class Answer(pydantic.BaseModel):
            yes: bool
            city: str = pydantic.Field(max_length=6)

        parsed = client.responses.parse(
            model="demo", input="Is Oslo a city?", text_format=Answer, max_output_tokens=60
        )
        assert isinstance(parsed.output_parsed, Answer)

    def test_a_limit(self, client):
        answer = client.responses.create(model="demo", input="Count.", max_output_tokens=2)
        assert (answer.status, answer.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )

    def test_an_error(self, client):
        image = {"type": "input_image", "image_url": "data:"}
        with pytest.raises(openai.BadRequestError, match="text only") as refused:
            client.responses.create(model="demo", input=[{"role": "user", "content": [image]}])
        assert refused.value.param == "input"


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
CLAUDE_TOOL = {"name": "get_weather", "description": "weather", "input_schema": PARAMETERS}


class TestAnthropic:
    def test_a_conversation(self, claude):
        answer = claude.messages.create(
            model="demo", max_tokens=20, system="Be brief.", messages=HI, extra_body=GREEDY
        )
        assert answer.content[0].text
        assert answer.stop_reason in ("end_turn", "max_tokens")
        assert answer.usage.output_tokens > 0

    def test_tools_and_their_results(self, claude):
        fields = {"model": "demo", "max_tokens": 80, "tools": [CLAUDE_TOOL]}
        answer = claude.messages.create(messages=HI, tool_choice={"type": "any"}, **fields)
        assert answer.stop_reason == "tool_use"
        use = answer.content[0]
        check_weather(json.dumps(use.input))
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        second = claude.messages.create(
            messages=[
                *HI,
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ],
            tool_choice={"type": "none"},
            **fields,
        )
        assert second.content[0].type == "text"

    def test_a_stream(self, claude):
        with claude.messages.stream(
            model="demo", max_tokens=20, messages=HI, extra_body=GREEDY
        ) as stream:
            text = "".join(stream.text_stream)
        final = stream.get_final_message()
        assert final.content[0].text == text
        whole = claude.messages.create(model="demo", max_tokens=20, messages=HI, extra_body=GREEDY)
        assert whole.content[0].text == text
        assert final.usage.output_tokens == whole.usage.output_tokens

    def test_a_stream_of_a_call(self, claude):
        with claude.messages.stream(
            model="demo",
            max_tokens=80,
            messages=HI,
            tools=[CLAUDE_TOOL],
            tool_choice={"type": "tool", "name": "get_weather"},
        ) as stream:
            pieces = [one.partial_json for one in stream if one.type == "input_json"]
        (use,) = stream.get_final_message().content
        assert json.loads("".join(pieces)) == use.input
        check_weather(json.dumps(use.input))

    def test_stop_sequences_and_a_given_beginning(self, claude):
        messages = [*HI, {"role": "assistant", "content": "The weather"}]
        fields = {"model": "demo", "max_tokens": 20, "messages": messages, "extra_body": GREEDY}
        text = claude.messages.create(**fields).content[0].text
        stop = text.split()[1]
        answer = claude.messages.create(**fields, stop_sequences=[stop])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert answer.content[0].text == text[: text.index(stop)]

    def test_count_tokens(self, claude):
        count = claude.messages.count_tokens(model="demo", messages=HI).input_tokens
        usage = claude.messages.create(model="demo", max_tokens=1, messages=HI).usage
        assert count == usage.input_tokens + usage.cache_read_input_tokens

    @pytest.mark.parametrize("empty", ["id", "name"])
    def test_a_tool_use_without_id_or_name_is_refused(self, claude, empty):
        use = {"type": "tool_use", "id": "a", "name": "f", "input": {}, empty: ""}
        messages = [*HI, {"role": "assistant", "content": [use]}]
        place = rf"messages\[1\].content\[0\].{empty}"
        with pytest.raises(anthropic.BadRequestError, match=place):
            claude.messages.create(model="demo", max_tokens=5, messages=messages)

    def test_errors(self, claude):
        with pytest.raises(anthropic.NotFoundError, match="does not exist") as refused:
            claude.messages.create(model="other", max_tokens=5, messages=HI)
        body: Any = refused.value.body
        assert refused.value.request_id == body["request_id"]
        answer = claude.messages.create(model="demo", max_tokens=1, messages=HI)
        assert len(answer._request_id) == 32
        with pytest.raises(anthropic.BadRequestError, match="temperature must be"):
            claude.messages.create(
                model="demo", max_tokens=5, messages=HI, extra_body={"temperature": 7}
            )


def test_curl(server):
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 80}
    command = ["curl", "-sS", f"{server.url}/v1/chat/completions", "-d", json.dumps(body)]
    done = subprocess.run(
        [*command, "-H", "Content-Type: application/json"],
        capture_output=True,
        check=True,
        timeout=200,
    )
    (choice,) = json.loads(done.stdout)["choices"]
    check_weather(choice["message"]["tool_calls"][0]["function"]["arguments"])
