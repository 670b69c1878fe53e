"""The Anthropic dialect over a scripted engine: conversions, shapes, events, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message

from ostinato.api.anthropic.convert import to_chat
from ostinato.api.anthropic.schemas import UNSUPPORTED, MessagesRequest
from ostinato.api.schemas.body_decoding import decode
from ostinato.api.schemas.conversation import NamedToolChoice
from ostinato.runtime.errors import DeadlineError, InvalidRequestError
from ostinato.runtime.text.chat_template import ChatTemplate
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.outputs import DEADLINE_REASON, FinishReason
from tests.api.fake_client import scripted
from tests.runtime.text import tokenizer_builders

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{{ enable_thinking }}</think><tool_call>"
)
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
USER = [{"role": "user", "content": "Hi"}]


def chat_of(**fields: object) -> Any:
    body = {"messages": USER, "max_tokens": 5, **fields}
    return to_chat(decode(json.dumps(body).encode(), MessagesRequest, UNSUPPORTED))


@pytest.fixture
def app(make_app):
    return make_app(
        [
            scripted("<think>hm</think>So: ", [5], num_cached_tokens=2),
            scripted('<tool_call>{"name": "add", "arguments": ', [6], num_cached_tokens=2),
            scripted('{"a": 1}}</tool_call>', [7], num_cached_tokens=2),
            scripted("", [7], finish_reason=FinishReason.stop, num_cached_tokens=2),
        ],
        tokenizer=Tokenizer(tokenizer_builders.byte_level_bpe(), {}, ChatTemplate(TEMPLATE, {})),
        max_model_len=4000,
    )


def post(app: Any, path: str = "/v1/messages", **fields: object) -> Any:
    return app.http.post(path, json={"messages": USER, "max_tokens": 50, **fields})


class TestToChat:
    def test_a_conversation_with_tools(self):
        chat = chat_of(
            system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "T", "signature": "x"},
                        {"type": "text", "text": "Well"},
                        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "now?"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": "2",
                            "is_error": None,
                        },
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_2",
                            "content": None,
                            "is_error": True,
                        },
                    ],
                },
            ],
            tools=[TOOL],
        )
        shown = [(one.role, one.content, one.tool_call_id) for one in chat.messages]
        assert shown == [
            ("system", "S", None),
            ("user", "1+1?", None),
            ("assistant", "Well", None),
            ("tool", "2", "toolu_1"),
            ("tool", "Error: ", "toolu_2"),
            ("user", "now?", None),
        ]
        assert chat.messages[2].reasoning == "T"
        assert chat.messages[2].tool_calls[0].function.arguments == '{"a": 1}'
        assert chat.tools[0].function.parameters == TOOL["input_schema"]

    def test_the_block_that_marks_each_request_of_claude_code_is_left_out(self):
        mark = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=4f1a;"}
        real = {"type": "text", "text": "S"}
        late = {"role": "system", "content": [mark]}
        found = chat_of(system=[mark, real], messages=[*USER, late]).messages
        assert found == chat_of(system="S").messages
        assert chat_of(system=[mark]).messages == chat_of().messages

    def test_consecutive_messages_of_one_role_are_one(self):
        """Templates of Gemma and Mistral refuse them otherwise."""
        call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
        chat = chat_of(
            messages=[
                *USER,
                {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "T"}]},
                {"role": "assistant", "content": "Well"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
                {"role": "user", "content": "now?"},
                {"role": "user", "content": "?"},
            ]
        )
        shown = [(one.role, one.content) for one in chat.messages]
        assert shown == [
            ("user", "Hi\n1+1?"),
            ("assistant", "Well"),
            ("tool", "2"),
            ("user", "now?\n?"),
        ]
        assert chat.messages[1].reasoning == "T"
        assert [call.id for call in chat.messages[1].tool_calls] == ["toolu_1"]

    def test_sampling(self):
        chat = chat_of(temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"])
        assert (chat.max_tokens, chat.temperature, chat.top_p, chat.top_k, chat.stop) == (
            5,
            0.5,
            0.9,
            4,
            ["END"],
        )

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            ({"type": "auto"}, (None, True)),
            ({"type": "auto", "disable_parallel_tool_use": True}, (None, False)),
            ({"type": "none"}, ("none", None)),
            ({"type": "any"}, ("required", True)),
        ],
    )
    def test_tool_choice(self, choice, expected):
        chat = chat_of(tools=[TOOL], tool_choice=choice)
        assert (chat.tool_choice, chat.parallel_tool_calls) == expected

    def test_a_named_tool(self):
        choice = chat_of(tools=[TOOL], tool_choice={"type": "tool", "name": "add"}).tool_choice
        assert isinstance(choice, NamedToolChoice)
        assert choice.function.name == "add"

    def test_an_answer_whose_beginning_is_given(self):
        chat = chat_of(messages=[*USER, {"role": "assistant", "content": "Well,"}])
        assert chat.continue_final_message
        assert not chat_of().continue_final_message

    @pytest.mark.parametrize(("kind", "effort"), [("disabled", "none"), ("adaptive", "high")])
    def test_thinking(self, kind, effort):
        assert chat_of(thinking={"type": kind}).reasoning_effort == effort

    def test_a_thinking_budget(self):
        chat = chat_of(thinking={"type": "enabled", "budget_tokens": 1024})
        assert (chat.reasoning_effort, chat.thinking_token_budget) == ("high", 1024)
        for thinking in ({"type": "enabled"}, {"type": "adaptive", "budget_tokens": 5}):
            with pytest.raises(InvalidRequestError) as refused:
                chat_of(thinking=thinking)
            assert refused.value.param == "thinking.budget_tokens"


BLOCKS = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "So:"},
    {"type": "tool_use", "name": "add", "input": {"a": 1}},
]


class TestAnswers:
    def test_a_whole_one(self, app):
        reply = post(app, tools=[TOOL]).json()
        Message.model_validate(reply)
        assert reply.pop("id").startswith("msg_")
        assert reply["content"][2].pop("id").startswith("call_")
        prompt_tokens = len(app.engine.requests[0][0])
        assert reply == {
            "type": "message",
            "role": "assistant",
            "model": "test-model",
            "content": BLOCKS,
            "stop_reason": "tool_use",
            "stop_sequence": None,
            "usage": {
                "input_tokens": prompt_tokens - 2,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 2,
                "output_tokens": 4,
            },
        }

    def test_the_events(self, app):
        text = post(app, tools=[TOOL], stream=True).text
        pairs = [event.split("\n") for event in text.strip().split("\n\n")]
        events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
        assert [name for name, _ in pairs] == [f"event: {one['type']}" for one in events]
        start, *middle, delta, stop = events
        assert start["message"]["content"] == []
        assert start["message"]["stop_reason"] is None
        assert [(one["type"], one["index"]) for one in middle] == [
            ("content_block_start", 0),
            ("content_block_delta", 0),
            ("content_block_delta", 0),  # the signature
            ("content_block_stop", 0),
            ("content_block_start", 1),
            ("content_block_delta", 1),
            ("content_block_stop", 1),
            ("content_block_start", 2),
            ("content_block_delta", 2),
            ("content_block_stop", 2),
        ]
        assert middle[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
        assert middle[1]["delta"] == {"type": "thinking_delta", "thinking": "hm"}
        assert middle[2]["delta"] == {"type": "signature_delta", "signature": ""}
        assert middle[5]["delta"] == {"type": "text_delta", "text": "So:"}
        assert middle[7]["content_block"]["input"] == {}
        assert middle[8]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
        assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert delta["usage"]["output_tokens"] == 4
        assert stop == {"type": "message_stop"}

    @pytest.mark.parametrize(
        ("fields", "stop"),
        [
            ({"finish_reason": FinishReason.length}, ("max_tokens", None)),
            ({"finish_reason": FinishReason.stop, "stop_reason": "END"}, ("stop_sequence", "END")),
            ({"finish_reason": FinishReason.stop, "stop_reason": 7}, ("end_turn", None)),
            (
                {"finish_reason": FinishReason.length, "stop_reason": DEADLINE_REASON},
                (DEADLINE_REASON, None),
            ),
        ],
    )
    def test_how_it_ended(self, make_app, fields, stop):
        reply = post(make_app([scripted("a", [5], **fields)]), max_tokens=5).json()
        assert (reply["stop_reason"], reply["stop_sequence"]) == stop
        assert reply["content"] == [{"type": "text", "text": "a"}]

    def test_count_tokens(self, app):
        def count(**fields: object) -> int:
            body = {"messages": USER, **fields}
            return app.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]

        assert count(tools=[TOOL]) > count(system="S") > count()
        assert app.engine.requests == []


# Refuses a system message that is not the first, as that of Qwen3.5, and two of the user in a row.
SYSTEM_FIRST = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}"
    "{% if m.role == ns.last %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.last = m.role %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
LATE_SYSTEM = (
    ("user", "A", "[system]S[user]A"),
    ("system", "B", "\nB"),
    ("assistant", "C", "[assistant]C"),
    ("system", "D", "[user]D"),
    ("user", "E", "\nE"),
)


@pytest.mark.parametrize("template", [SYSTEM_FIRST, TEMPLATE])
def test_a_system_message_within_the_conversation(make_app, template):
    own = ChatTemplate(template, {})
    tokenizer = Tokenizer(tokenizer_builders.byte_level_bpe(), {}, own)
    app = make_app(tokenizer=tokenizer, max_model_len=4000)
    messages = [{"role": role, "content": text} for role, text, _ in LATE_SYSTEM]
    answer = post(app, system="S", messages=messages)
    assert answer.status_code == 200, answer.text
    shown = tokenizer.decode(app.engine.requests[-1][0], skip_special_tokens=False)
    if template == SYSTEM_FIRST:
        assert shown == "".join(text for _, _, text in LATE_SYSTEM)
    else:  # a template that takes such messages gets them
        assert shown.startswith("[system]S[user]A[system]B[assistant]C[system]D[user]E")
    counted = app.http.post(
        "/v1/messages/count_tokens", json={"system": "S", "messages": messages}
    ).json()
    assert counted["input_tokens"] == len(app.engine.requests[-1][0])
    first = post(app, system="S", messages=[{"role": "system", "content": "T"}, *messages])
    assert first.status_code == 200, first.text
    assert post(app, messages=[USER[0], USER[0]]).status_code == 200  # they are joined


class TestTakenAsItIs:
    @pytest.mark.parametrize(
        "fields",
        [
            {"context_management": {"edits": []}},
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
            {"mcp_servers": [], "container": None, "speed": "standard"},
            {"service_tier": "standard_only"},
        ],
        ids=str,
    )
    def test_what_asks_for_nothing(self, app, fields):
        assert post(app, **fields).status_code == 200

    def test_an_edit_of_the_context_is_refused(self, app):
        edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
        error = post(app, context_management=edits).json()["error"]
        assert error["message"].startswith("context_management is not supported: it needs edits")


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"max_tokens": None}, "max_tokens"),
            ({"temperature": 3}, "temperature"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
            ({"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "a"}]}]}, "thinking block"),
            ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "a"}]}]}, "redacted_thinking block"),
            ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0].type"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]}, "messages[0].content[0].source.type"),
            ({"messages": [{"role": "assistant", "content": [{"type": "image", "source": {"type": "url", "url": "a"}}]}]}, "image block"),
            ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "thinking block"),
            ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f", "input": {}}]}]}, "messages[0].content[0].id"),
            ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "", "input": {}}]}]}, "messages[0].content[0].name"),
            ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": ""}]}]}, "messages[0].content[0].tool_use_id"),
            ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "must be followed by a message of the user"),
            ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "must be followed by a message of the user"),
            ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required with"),
            ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
            ({"output_config": {"effort": "least"}}, "output_config.effort"),
            ({"output_format": {"type": "json_schema"}}, "give output_config.format instead"),
            ({"logprob_token_ids": [1]}, "logprob_token_ids is not supported: it needs log-prob"),
            ({"stream_interval": 2}, "stream_interval=2 needs stream=true"),
            ({"service_tier": "gold"}, "service_tier"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
            ({"colour": 1}, "colour is not a field"),
        ],
    )  # fmt: skip
    def test_a_refusal_has_the_dialects_form(self, app, fields, text):
        body = {"messages": USER, "max_tokens": 50, **fields}
        response = app.http.post(
            "/v1/messages", json={k: v for k, v in body.items() if v is not None}
        )
        assert response.status_code == 400
        answer = response.json()
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert text in answer["error"]["message"]

    def test_another_model(self, app):
        response = post(app, model="other")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"

    def test_a_method_that_is_not_there(self, app):
        response = app.http.get("/v1/messages")
        assert response.status_code == 405
        assert response.json()["type"] == "error"

    def test_a_deadline_without_a_token(self, make_app):
        response = post(make_app([DeadlineError("too late")]), max_tokens=5)
        assert response.status_code == 504
        error = ErrorResponse.model_validate(response.json()).error
        assert (error.type, error.message) == ("timeout_error", "too late")
        assert response.headers["x-should-retry"] == "false"

    def test_a_failure_within_a_stream(self, make_app):
        app = make_app([scripted("a", [5]), RuntimeError("secret")])
        last = post(app, max_tokens=5, stream=True).text.strip().split("\n\n")[-1]
        name, data = last.split("\n")
        assert name == "event: error"
        assert json.loads(data[6:])["error"]["type"] == "api_error"
        assert "secret" not in last
