"""The responses dialect over a scripted engine: conversions, events, the store, refusals."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response

from ostinato.api.responses.convert import input_messages
from ostinato.api.schemas.conversation import CalledFunction, Message, MessageToolCall
from ostinato.api.service.response_store import ResponseStore
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.outputs import DEADLINE_REASON, FinishReason
from tests.api.fake_client import scripted
from tests.api.responses.scripted_answer import post, prompt

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


class TestInput:
    def test_a_text(self):
        assert input_messages("Hi") == [Message(role="user", content="Hi")]

    def test_items(self):
        items = [
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "A", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": None, "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {"role": "assistant", "content": "B"},
            {"role": "assistant", "content": "C"},
        ]  # fmt: skip
        calls = [
            MessageToolCall(id=call_id, function=CalledFunction(name=name, arguments="{}"))
            for call_id, name in (("c1", "f"), ("c2", "g"))
        ]
        assert input_messages(items) == [
            Message(role="developer", content="D"),
            Message(role="user", content="U"),
            Message(role="assistant", content="A", reasoning="R", tool_calls=calls),
            Message(role="tool", tool_call_id="c1", content="1"),
            Message(role="tool", tool_call_id="c2", content="2"),
            Message(role="assistant", content="B"),
            Message(role="assistant", content="C"),
        ]


class TestAnswers:
    def test_a_whole_one(self, app):
        reply = post(app, tools=[TOOL], instructions="I", metadata={"k": "v"}, temperature=0.5)
        answer = reply.json()
        Response.model_validate(answer)
        assert prompt(app).startswith("[" + json.dumps(function(TOOL)) + "][system]I[user]Hi")
        thoughts, message, call = answer["output"]
        assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert message["content"][0]["text"] == "So:"
        assert (call["name"], call["arguments"]) == ("add", '{"a": 1}')
        assert [one["status"] for one in answer["output"]] == ["completed"] * 3
        prompt_tokens = len(app.engine.requests[0][0])
        assert answer["usage"] == {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": prompt_tokens + 4,
        }
        for name, value in {
            "status": "completed",
            "metadata": {"k": "v"},
            "temperature": 0.5,
        }.items():
            assert answer[name] == value

    def test_the_events(self, app):
        text = post(app, tools=[TOOL], stream=True).text
        pairs = [event.split("\n") for event in text.strip().split("\n\n")]
        events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
        assert [name for name, _ in pairs] == [f"event: {one['type']}" for one in events]
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        kinds = [one["type"].removeprefix("response.") for one in events]
        block = (
            ["output_item.added", "content_part.added"],
            ["content_part.done", "output_item.done"],
        )
        assert kinds == [
            *("created", "in_progress"),
            *(*block[0], "reasoning_text.delta", "reasoning_text.done", *block[1]),
            *(*block[0], "output_text.delta", "output_text.done", *block[1]),
            "output_item.added",
            *("function_call_arguments.delta", "function_call_arguments.done"),
            *("output_item.done", "completed"),
        ]
        assert events[0]["response"]["status"] == "in_progress"
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]

    def test_an_answer_that_the_limit_ends(self, make):
        app = make([scripted("a", [5]), scripted("b", [6], finish_reason=FinishReason.length)])
        answer = post(app, max_output_tokens=2).json()
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["status"] == "incomplete"
        assert "event: response.incomplete" in post(app, max_output_tokens=2, stream=True).text

    def test_an_answer_that_its_deadline_ends(self, make):
        end = {"finish_reason": FinishReason.length, "stop_reason": DEADLINE_REASON}
        answer = post(make([scripted("a", [5]), scripted("b", [6], **end)])).json()
        assert answer["incomplete_details"] == {"reason": DEADLINE_REASON}

    def test_a_failure_within_a_stream(self, make):
        app = make([scripted("a", [5]), RuntimeError("secret")])
        text = post(app, stream=True).text
        name, data = text.strip().split("\n\n")[-1].split("\n")
        assert name == "event: response.failed"
        response = json.loads(data[6:])["response"]
        assert (response["status"], response["error"]["code"]) == ("failed", "internal_error")
        assert "secret" not in text

    def test_a_format_of_the_text(self, app):
        schema = {"type": "object", "properties": {}}
        body = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
        answer = post(app, text=body).json()
        constraint = app.engine.requests[-1][1].structured_outputs
        assert (constraint.json, constraint.strict) == (schema, True)
        assert answer["text"]["format"]["schema"] == schema


def function(tool: dict[str, Any]) -> dict[str, Any]:
    fields = {"name": tool["name"], "description": "", "parameters": tool["parameters"]}
    return {"type": "function", "function": fields}


class TestStored:
    def test_a_request_goes_on_from_a_stored_reply(self, app):
        first = post(app, tools=[TOOL], instructions="I").json()
        item = {
            "type": "function_call_output",
            "call_id": first["output"][2]["call_id"],
            "output": "2",
        }
        second = post(app, input=[item], previous_response_id=first["id"]).json()
        assert prompt(app).startswith("[user]Hi[assistant]So:add[tool]2")
        assert second["previous_response_id"] == first["id"]
        post(app, previous_response_id=second["id"], input="more")
        assert "[tool]2[assistant]So:" in prompt(app)

    def test_retrieve_and_delete(self, app):
        answer = post(app).json()
        path = f"/v1/responses/{answer['id']}"
        assert app.http.get(path).json() == answer
        assert app.http.delete(path).json()["deleted"] is True
        assert app.http.get(path).status_code == 404
        assert app.http.delete(path).status_code == 404

    def test_what_is_not_stored(self, app):
        answer = post(app, store=False).json()
        assert answer["store"] is False
        assert app.http.get(f"/v1/responses/{answer['id']}").status_code == 404
        error = post(app, previous_response_id=answer["id"]).json()["error"]
        assert (error["param"], error["code"]) == (
            "previous_response_id",
            "previous_response_not_found",
        )

    def test_a_server_that_stores_nothing(self, make):
        app = make(response_store_mib=0)
        assert post(app).json()["store"] is False
        assert post(app, store=True).json()["error"]["param"] == "store"

    def test_the_oldest_go_first(self):
        store = ResponseStore(0.001)  # 1048 bytes
        message, answer = (Message(role=role, content="x" * 150) for role in ("user", "assistant"))
        before = msgspec.Raw(msgspec.json.encode([message]))
        for name in ("a", "b", "c"):
            store.put(name, b"{}", before, answer)
        assert store.messages("a") is None
        assert msgspec.json.decode(store.messages("c"), type=list[Message]) == [message, answer]
        store.put("large", b"y" * 2000, before, answer)
        with pytest.raises(InvalidRequestError):
            store.response("large")
        assert store.response("c") == b"{}"
        store.put("d", b"{}", msgspec.Raw(b"[ ]"), answer)
        assert msgspec.json.decode(store.messages("d"), type=list[Message]) == [answer]


class TestIncluded:
    WITH = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}

    def test_log_probabilities_are_those_of_the_text(self, app):
        answer = post(app, **self.WITH, top_logprobs=1, tools=[TOOL]).json()
        thoughts, message, _ = answer["output"]
        # The reply has no log probabilities for the tokens of the reasoning and of the call.
        assert [len(one["top_logprobs"]) for one in message["content"][0]["logprobs"]] == [1]
        assert "logprobs" not in thoughts["content"][0]
        text = post(app, **self.WITH, top_logprobs=1, tools=[TOOL], stream=True).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line[:6] == "data: "]
        for kind in ("delta", "done"):
            (event,) = [one for one in events if one["type"] == f"response.output_text.{kind}"]
            assert event["logprobs"] == message["content"][0]["logprobs"]
        assert events[-1]["response"]["output"][1] == {
            **message,
            "id": events[-1]["response"]["output"][1]["id"],
        }

    def test_encoded_reasoning_comes_back_as_text(self, app):
        thoughts, *_ = post(app, **self.WITH).json()["output"]
        content = thoughts["encrypted_content"]
        assert content
        assert "encrypted_content" not in post(app).json()["output"][0]
        item = {"type": "reasoning", "id": "a", "summary": [], "encrypted_content": content}
        end = {"role": "assistant", "content": "A"}
        assert input_messages([item, end]) == [
            Message(role="assistant", content="A", reasoning="hm")
        ]
        # A value that another server encoded, or that was changed, has no effect.
        for other in ("gAAAA", f"{content}é", content[:12] + "?"):
            unread = input_messages([{**item, "encrypted_content": other}, end])
            assert unread == [Message(role="assistant", content="A")]

    def test_the_items_of_a_stream_that_was_cut_within_a_call_come_back(self, make):
        cut = scripted('<tool_call>\n{"name": "add", "arguments": {"a": 1', [5])
        app = make([cut, scripted("", [6], finish_reason=FinishReason.length)])
        text = post(app, tools=[TOOL], tool_choice="required", stream=True).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line[:6] == "data: "]
        (call,) = events[-1]["response"]["output"]
        assert (call["arguments"], call["status"]) == ('{"a": 1', "incomplete")
        said = [{"role": "user", "content": text} for text in ("Hi", "On")]
        answer = post(app, input=[said[0], call, said[1]])
        assert answer.status_code == 200, answer.text
        assert prompt(app).startswith("[user]Hi[user]On")

    def test_input_tokens(self, app):
        def count(**fields: object) -> int:
            reply = app.http.post("/v1/responses/input_tokens", json=fields)
            assert reply.status_code == 200, reply.text
            assert reply.json()["object"] == "response.input_tokens"
            return reply.json()["input_tokens"]

        first = post(app, tools=[TOOL]).json()
        assert count(input="Hi", tools=[TOOL]) == len(app.engine.requests[0][0])
        assert count(input="Hi", instructions="I") > count(input="Hi")
        assert count(previous_response_id=first["id"]) > count(input="Hi")
        assert len(app.engine.requests) == 1
        error = app.http.post("/v1/responses/input_tokens", json={}).json()["error"]
        assert (error["param"], error["code"]) == ("input", "missing_field")


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": []}, "input"),
            ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
            ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0].file_id"),
            ({"input": [{"role": "user", "content": "a"}, {"role": "robot", "content": "a"}]}, "input[1].role"),
            ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
            ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
            ({"input": [{"type": "function_call", "call_id": "a", "name": "", "arguments": "{}"}]}, "input[0].name"),
            ({"instructions": "I", "input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}]}, "input[0].arguments"),
            ({"input": [{"type": "function_call_output", "call_id": "", "output": ""}]}, "input[0].call_id"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 100000}, "max_output_tokens"),
            ({"temperature": 5}, "temperature"),
            ({"background": True, "store": False}, "background"),
            ({"background_options": {"completion_window": "2h"}}, "background_options"),
            ({"include": ["nothing"]}, "include[0]"),
            ({"truncation": "some"}, "truncation"),
            ({"reasoning": {"effort": "loud"}}, "reasoning.effort"),
            ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
            ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"max_tool_calls": 0}, "max_tool_calls"),
            ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
            ({"tools": [{**TOOL, "output_schema": {}}]}, "tools[0].output_schema"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
            ({"colour": 1}, "colour"),
        ],
    )  # fmt: skip
    def test_names_the_field(self, app, fields, param):
        response = post(app, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")

    def test_what_asks_for_nothing_is_let_through(self, app):
        fields = {
            "background": False,
            "include": [],
            "service_tier": "auto",
            "truncation": "disabled",
        }
        assert (
            post(app, **fields, top_logprobs=0, reasoning=None, conversation=None).status_code
            == 200
        )
