"""Tool calls that `max_tokens` ends before they are complete, in each dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.json_requests import HI, MODEL


class TestACallThatIsCut:
    """`max_tokens` may cut a required call. A reply that is no stream then omits it, as in vLLM."""

    FUNCTION: Any = {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 4, "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    TOOL: Any = {"type": "function", "function": FUNCTION}
    NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}

    @pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
    def test_chat(self, client, choice):
        fields: dict[str, Any] = {"model": MODEL, "tools": [self.TOOL], "messages": HI}
        fields |= {"tool_choice": choice, "temperature": 0, "parallel_tool_calls": False}
        ended = client.chat.completions.create(**fields, max_tokens=100)
        (call,) = ended.choices[0].message.tool_calls
        assert ended.choices[0].finish_reason == "tool_calls"
        num_tokens = ended.usage.completion_tokens
        for max_tokens in (1, 3, num_tokens // 2, num_tokens - 4):
            (one,) = client.chat.completions.create(**fields, max_tokens=max_tokens).choices
            assert (one.finish_reason, one.message.content) == ("length", "")
            assert one.message.tool_calls == []
            chunks = list(
                client.chat.completions.create(**fields, max_tokens=max_tokens, stream=True)
            )
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert chunks[-1].choices[0].finish_reason == "length"
            assert not any(delta.content for delta in deltas)
            # A stream has already sent the beginning of the call.
            pieces = [
                part.function.arguments for delta in deltas for part in delta.tool_calls or ()
            ]
            assert call.function.arguments.startswith("".join(piece or "" for piece in pieces))

    def test_a_stop_string_in_the_arguments(self, client, claude):
        fields: dict[str, Any] = {"model": MODEL, "tools": [self.TOOL], "messages": HI}
        fields |= {"tool_choice": "required", "temperature": 0, "max_tokens": 100, "stop": "city"}
        (one,) = client.chat.completions.create(**fields).choices
        assert (one.finish_reason, one.message.tool_calls) == ("stop", [])
        *_, last = client.chat.completions.create(**fields, stream=True)
        assert last.choices[0].finish_reason == "stop"
        shape: Any = {"name": "get_weather", "input_schema": self.FUNCTION["parameters"]}
        whole = claude.messages.create(
            model=MODEL,
            max_tokens=100,
            messages=HI,
            tools=[shape],
            tool_choice={"type": "any"},
            stop_sequences=["city"],
        )
        assert (whole.content, whole.stop_reason, whole.stop_sequence) == (
            [],
            "stop_sequence",
            "city",
        )

    def test_the_other_dialects(self, client, claude):
        tool: Any = {"type": "function", "strict": False, **self.FUNCTION}
        messages: Any = {"messages": HI, "tool_choice": {"type": "any"}}
        shape = {"name": "get_weather", "input_schema": self.FUNCTION["parameters"]}
        for max_tokens in (1, 3, 12):
            answer = client.responses.create(
                model=MODEL,
                input="What is a list?",
                tools=[tool],
                tool_choice="required",
                max_output_tokens=max_tokens,
            )
            assert [one.type for one in answer.output] == ["message"]
            assert (answer.status, answer.output_text) == ("incomplete", "")
            again = client.responses.create(
                model=MODEL, input="And?", previous_response_id=answer.id, max_output_tokens=3
            )
            assert again.output_text
            whole = claude.messages.create(
                model=MODEL, max_tokens=max_tokens, tools=[shape], **messages
            )
            assert (whole.content, whole.stop_reason) == ([], "max_tokens")

    def test_a_complete_one_before_it_stays(self, client):
        fields: dict[str, Any] = {"model": MODEL, "tools": [self.TOOL], "messages": HI}
        fields |= {"tool_choice": "required", "temperature": 1.5, "seed": 1, "max_tokens": 150}
        seen = set()
        for seed in range(12):
            (one,) = client.chat.completions.create(**fields | {"seed": seed}).choices
            for made in one.message.tool_calls:
                city = json.loads(made.function.arguments)["city"]
                assert 4 <= len(city) <= 8
            seen.add((one.finish_reason, bool(one.message.tool_calls)))
        assert seen <= {("length", True), ("tool_calls", True)}
