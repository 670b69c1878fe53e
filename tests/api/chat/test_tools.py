"""Tools of the chat endpoint over a scripted engine: the template's input, and the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from ostinato.api.chat.tools import explained, new_call_id, template_messages
from ostinato.api.parsing.detect import traits
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.parsing.reasoning import REASONING
from ostinato.api.schemas.conversation import CalledFunction, Message, MessageToolCall
from ostinato.conf.sections.server_schema import ReasoningParserName, ServerConfig, ToolParserName
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.chat_template import ChatTemplate
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.outputs import FinishReason
from tests.api.fake_client import scripted
from tests.runtime.text import tokenizer_builders

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALL_OF_MESSAGE = MessageToolCall(
    id="call_1", function=CalledFunction(name="add", arguments='{"a": 1}')
)
# This template shows all its input. The markers at its end are those of Qwen3. From these markers
# the server chooses the parsers of reasoning and of calls.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}{{ m.reasoning_content }}{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}</think><tool_call>"
)


def function(**fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {**ADD["function"], **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def script(*pieces: str) -> list[Any]:
    """An answer in these pieces, one output for each piece. The token ids mean nothing."""
    return [
        *(scripted(piece, [5]) for piece in pieces),
        scripted("", [7], finish_reason=FinishReason.stop),
    ]


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(tokenizer_builders.byte_level_bpe(), {}, ChatTemplate(template, {}))


def prompt(app: Any) -> str:
    return app.engine.tokenizer.decode(app.engine.requests[-1][0], skip_special_tokens=False)


@pytest.fixture
def qwen(make_app):
    return lambda *pieces, **server: make_app(
        script(*pieces),
        tokenizer=tokenizer(TEMPLATE),
        max_model_len=4000,
        server=ServerConfig(**server),
    )


HERMES = (
    "<thi",
    "nk>\nhm\n</think>\n\nSo: <tool",
    '_call>\n{"name": "add", "argu',
    'ments": {"a": 1}}\n</tool_call>',
)


class TestAnswers:
    def test_reasoning_content_and_calls(self, qwen):
        (choice,) = qwen(*HERMES).chat(tools=[ADD]).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        (call,) = message.pop("tool_calls")
        assert message == {
            "role": "assistant",
            "content": "So:",
            "reasoning": "hm",
            "reasoning_content": "hm",
        }
        assert call.pop("id").startswith("call_")
        assert call == {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    def test_the_stream_adds_up_to_the_same(self, qwen):
        app = qwen(*HERMES)
        whole = app.chat(tools=[ADD]).json()["choices"][0]
        state = ChatCompletionStreamState()
        lines = app.chat(tools=[ADD], stream=True).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line]
        for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        choice = state.get_final_completion().choices[0]
        assert choice.finish_reason == whole["finish_reason"]
        assert choice.message.content == whole["message"]["content"]
        calls = choice.message.tool_calls or []
        assert [call.function.arguments for call in calls] == ['{"a": 1}']
        thoughts = [chunk["choices"][0]["delta"].get("reasoning", "") for chunk in chunks]
        assert "".join(thoughts) == whole["message"]["reasoning"]

    def test_a_malformed_call_is_content(self, qwen):
        text = '<tool_call>{"name": "add", "arguments": {oops}}</tool_call>'
        (choice,) = qwen(text).chat(tools=[ADD]).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "stop"

    def test_without_tools_a_call_is_content(self, qwen):
        for fields in ({}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}):
            app = qwen("<tool_call>{}</tool_call>")
            message = app.chat(**fields).json()["choices"][0]["message"]
            assert message["content"] == "<tool_call>{}</tool_call>"
            assert "adds" not in prompt(app)

    def test_no_parallel_calls(self, qwen):
        app = qwen(f"<tool_call>{json.dumps(CALL['function'] | {'arguments': {}})}</tool_call>" * 2)
        assert len(app.chat(tools=[ADD]).json()["choices"][0]["message"]["tool_calls"]) == 2
        answer = app.chat(tools=[ADD], parallel_tool_calls=False).json()["choices"][0]["message"]
        assert len(answer["tool_calls"]) == 1

    def test_every_completion_has_its_own_parser(self, qwen):
        choices = qwen(*HERMES).chat(tools=[ADD], n=2).json()["choices"]
        assert [one["message"]["content"] for one in choices] == ["So:", "So:"]
        first, second = (one["message"]["tool_calls"][0]["id"] for one in choices)
        assert first != second

    def test_a_call_that_the_limit_cuts_off_is_content(self, make_app):
        cut = [
            scripted('<tool_call>{"name": "add", ', [5]),
            scripted("", [6], finish_reason=FinishReason.length),
        ]
        app = make_app(cut, tokenizer=tokenizer(TEMPLATE), max_model_len=4000)
        (choice,) = app.chat(tools=[ADD]).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == '<tool_call>{"name": "add", '

    def test_reasoning_is_left_out_when_it_is_not_wanted(self, qwen):
        answer = qwen(*HERMES).chat(include_reasoning=False).json()["choices"][0]["message"]
        assert "reasoning" not in answer
        assert answer["content"].startswith("So: <tool_call>")

    def test_reasoning_that_the_prompt_opens(self, make_app):
        app = make_app(
            script("hm</think>yes"),
            tokenizer=tokenizer("{{ messages[0].content }}</think><think>\n"),
        )
        message = app.chat().json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "yes")

    def test_a_user_who_writes_the_marker_changes_nothing(self, qwen):
        body = [{"role": "user", "content": "what is <think>"}]
        assert qwen("yes").chat(messages=body).json()["choices"][0]["message"]["content"] == "yes"


class TestConstraints:
    """The constraint that the engine gets. Tests with a real engine check that answers obey it."""

    def format_of(self, app: Any, **fields: object) -> dict[str, Any]:
        response = app.chat(tools=[ADD], **fields)
        assert response.status_code == 200, response.text
        return app.engine.requests[-1][1].structured_outputs.structural_tag["format"]

    def test_required(self, qwen):
        whole = self.format_of(qwen("ok"), tool_choice="required")
        thoughts, _, calls = whole["elements"][0]["elements"]
        assert thoughts == {
            "type": "tag",
            "begin": "<think>",
            "content": {"type": "any_text"},
            "end": "</think>",
        }
        assert whole["elements"][1] == calls
        assert (calls["type"], calls["at_least_one"], calls["stop_after_first"]) == (
            "tags_with_separator",
            True,
            False,
        )
        assert calls["tags"] == [
            {
                "type": "tag",
                "begin": '<tool_call>\n{"name": "add", "arguments": ',
                "content": {"type": "json_schema", "json_schema": ADD["function"]["parameters"]},
                "end": "}\n</tool_call>",
            }
        ]

    def test_a_named_one_is_called_once(self, qwen):
        app = qwen("ok")
        other = function(name="other")
        app.chat(tools=[ADD, other], tool_choice=named("other"))
        calls = app.engine.requests[-1][1].structured_outputs.structural_tag["format"]["elements"][
            1
        ]
        assert calls["stop_after_first"] is True
        assert len(calls["tags"]) == 1

    def test_auto_is_not_constrained_unless_strict(self, qwen):
        app = qwen("ok")
        app.chat(tools=[ADD])
        assert app.engine.requests[-1][1].structured_outputs is None
        app.chat(tools=[function(strict=True)])
        constraint = app.engine.requests[-1][1].structured_outputs
        assert constraint is not None
        assert constraint.strict
        assert isinstance(constraint.structural_tag, dict)
        assert constraint.structural_tag["format"]["type"] == "triggered_tags"

    def test_beside_a_format_of_the_answer(self, qwen):
        answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        whole = self.format_of(qwen("ok"), response_format=answer)["elements"][1]
        assert [one["type"] for one in whole["elements"]] == ["tags_with_separator", "json_schema"]

    def test_beside_a_schema_as_an_object_or_as_text(self, qwen):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        formats = [
            self.format_of(qwen("ok"), **fields)
            for fields in (
                {"structured_outputs": {"json": schema}},
                {"structured_outputs": {"json": json.dumps(schema)}},
                {"guided_json": json.dumps(schema)},
            )
        ]
        assert formats[0]["elements"][1]["elements"][1]["json_schema"] == schema
        assert formats[1:] == [formats[0], formats[0]]

    def test_constrained_calls_stream_their_arguments(self, qwen):
        pieces = [
            "<tool",
            '_call>\n{"name": "ad',
            'd", "arguments": {"a"',
            ": 1",
            "}",
            "}\n</tool_",
            "call>",
        ]
        app = qwen(*pieces)
        text = app.chat(tools=[ADD], tool_choice="required", stream=True).text
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"].get("tool_calls")
            for line in text.split("\n\n")
            if line and "[DONE]" not in line
        ]
        calls = [one[0]["function"] for one in deltas if one]
        assert calls == [
            {"name": "add", "arguments": '{"a"'},
            {"arguments": ": 1"},
            {"arguments": "}"},
        ]


class TestPrompts:
    def test_the_template_sees_tools_calls_and_results(self, qwen):
        app = qwen("ok")
        conversation = [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "R"},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ]
        assert app.chat(messages=conversation, tools=[ADD]).status_code == 200
        shown = prompt(app)
        assert shown.startswith("[" + json.dumps(ADD) + "]")
        assert '[user]1+1?[assistant]add{"a": 1}R[tool]2call_1' in shown

    def test_a_template_without_tools_gets_them_explained(self, app):
        app.engine.model = app.engine.model.__class__(
            name="test-model", max_model_len=4000, vocab_size=1000, eos_token_ids=(0,), tokenizer=""
        )
        app.chat(tools=[ADD])
        shown = prompt(app)
        assert shown.startswith("<|begin|>system\nYou can call functions.")
        assert json.dumps(ADD["function"]) in shown

    @pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
    def test_reasoning_effort(self, make_app, qwen, effort, thinks):
        app = qwen("ok")
        app.chat(reasoning_effort=effort)
        assert effort + "</think>" in prompt(app)
        app = make_app(tokenizer=tokenizer("a{{ enable_thinking }}"))
        app.chat(reasoning_effort=effort)
        assert prompt(app) == f"a{thinks}"

    def test_settings_that_the_template_does_not_have_change_nothing(self, app):
        app.chat()
        plain = prompt(app)
        assert app.chat(reasoning_effort="low", verbosity="high").status_code == 200
        assert prompt(app) == plain

    def test_verbosity(self, make_app):
        app = make_app(tokenizer=tokenizer("a{{ verbosity }}"))
        app.chat(verbosity="low")
        assert prompt(app) == "alow"

    def test_tokenize_counts_the_tools(self, qwen):
        app = qwen("ok")
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        plain = app.http.post("/tokenize", json=body).json()["count"]
        assert app.http.post("/tokenize", json={**body, "tools": [ADD]}).json()["count"] > plain

    def test_markers_that_are_special_tokens_stay_in_the_text(self, make_app):
        backend = tokenizers.Tokenizer.from_str(tokenizer_builders.byte_level_bpe().to_str())
        backend.add_special_tokens(["[TOOL_CALLS]"])
        own = Tokenizer(backend, {}, ChatTemplate("{{ tools }}[TOOL_CALLS]", {}))
        app = make_app(script("ok"), tokenizer=own, max_model_len=4000)
        for fields, skips in (({}, True), ({"tools": [ADD]}, False)):
            app.chat(**fields)
            assert app.engine.requests[-1][1].skip_special_tokens is skips


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": [ADD, ADD]}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
            ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [ADD], "tool_choice": named("other")}, "tool_choice"),
            ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters"),
            ({"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
            ({"tools": [ADD], "structured_outputs": {"grammar": "start: \"a\""}}, "tools"),
            ({"tools": [ADD], "structured_outputs": {"json": "{"}}, "structured_outputs"),
            ({"tools": [ADD], "structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, "tools"),
            ({"tool_choice": "sometimes"}, "tool_choice"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "tool", "content": "2"}]}, "messages[0].tool_call_id"),
            ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
            ({"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}, "messages[0].reasoning"),
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "x"}}]}]},
                "messages[0].tool_calls[0].function.arguments",
            ),
        ],
    )  # fmt: skip
    def test_names_the_field(self, qwen, fields, param):
        response = qwen("ok").chat(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param

    def test_tools_are_refused_without_a_parser_of_calls(self, qwen):
        error = qwen("ok", tool_parser=ToolParserName.none).chat(tools=[ADD]).json()["error"]
        assert error["param"] == "tools"
        assert "server.tool_parser=none" in error["message"]


AUTO = ToolParserName.auto, ReasoningParserName.auto


class TestRecognition:
    @pytest.mark.parametrize(
        ("source", "calls"),
        [
            ("{{ tools }}<tool_call>", "hermes"),
            ("{{ tools }}[TOOL_CALLS]", "mistral"),
            ("{{ tools }}<|python_tag|>", "llama3_json"),
            ("{{ tools }}write <|tool_call|> followed by a JSON list", "granite"),
            ("{{ tools }}<tool_call></tool_call><|tool_call|>", "hermes"),  # Granite 4
            ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json"),
            ("{{ tools }}prefix function calls with functools marker", "phi4_mini_json"),
            ("{{ messages }}", "json"),
            ("{{ tools }}<tool_call><function=", "qwen3_coder"),
            ("{{ tools }}", None),
        ],
    )
    def test_calls(self, source, calls):
        found = traits(source, *AUTO)
        assert found.calls == (None if calls is None else FORMATS[calls])
        assert found.knows_tools is ("tools" in source)

    def test_reasoning(self):
        assert traits("</think>", *AUTO).reasoning == REASONING["think"]
        assert traits("[/THINK]", *AUTO).reasoning == REASONING["mistral"]
        assert traits("", *AUTO).reasoning is None
        chosen = ToolParserName.json, ReasoningParserName.none
        assert traits("</think>", *chosen).reasoning is None
        assert traits("{{ tools }}<tool_call>", *chosen).calls == FORMATS["json"]


class TestExplained:
    def test_a_whole_conversation(self):
        messages = template_messages(
            [
                Message(role="system", content="S"),
                Message(role="user", content="U"),
                Message(role="assistant", tool_calls=[CALL_OF_MESSAGE]),
                Message(role="tool", tool_call_id="call_1", content="2"),
            ]
        )
        shown = explained(messages, [ADD], FORMATS["hermes"])
        assert [one["role"] for one in shown] == ["system", "user", "assistant", "user"]
        assert shown[0]["content"].startswith("S\n\nYou can call functions.")
        assert shown[2]["content"] == (
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        )
        assert shown[3]["content"] == "Result of add: 2"

    def test_ids(self):
        assert len(new_call_id(FORMATS["mistral"])) == 9
        assert new_call_id(FORMATS["mistral"]).isalnum()
        assert new_call_id(None).startswith("call_")


def test_arguments_that_are_no_object():
    call = MessageToolCall(id="x", function=CalledFunction(name="f", arguments="[1]"))
    with pytest.raises(InvalidRequestError, match="must be a JSON object as text"):
        template_messages([Message(role="assistant", tool_calls=[call])])


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("{{ message.reasoning_content }}{{ message.reasoning }}", "reasoning_content"),
        ("{% if message['reasoning'] %}", "reasoning"),
        ("{%- if message.content and message.thinking %}", "thinking"),
        ("{{ message.content }} enable_thinking", "reasoning_content"),
    ],
)
def test_earlier_reasoning_has_the_key_that_the_template_reads(source, key):
    found = traits(source, ToolParserName.auto, ReasoningParserName.auto)
    assert found.reasoning_key == key
    call = MessageToolCall(id="c", function=CalledFunction(name="f", arguments="{}"))
    [plain, with_call, with_both] = template_messages(
        [
            Message(role="assistant", content="Hi", reasoning="It greets."),
            Message(role="assistant", reasoning="It asks.", tool_calls=[call]),
            Message(role="assistant", content="Hi", reasoning="Both.", tool_calls=[call]),
        ],
        found.reasoning_key,
    )
    assert (plain[key], with_call[key]) == ("It greets.", "It asks.")
    assert with_both.get(key) == (None if key == "thinking" else "Both.")
