"""Fields of requests that clients of other servers send, with a real server process."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import pytest

from tests.e2e.json_requests import CHAT, HI, MODEL, post, refused
from tests.e2e.server_process import HTTP, ServerProcess

# Fields that the server accepts and that change no answer.
SENT: dict[str, Any] = {
    "metadata": {"team": "a", "k" * 64: "v" * 512},
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s" * 128,
    "service_tier": "flex",
    "user": "u",
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {"k": 1}}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"safety_identifier": "s" * 129}, "safety_identifier"),
    ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ({"prompt_cache_options": {"ttl": "1s"}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ({"store": "yes"}, "store"),
]


class TestWithoutEffect:
    def test_chat(self, client):
        fields: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 12}
        fields["temperature"] = 0
        plain = client.chat.completions.create(**fields)
        sent = {**SENT, "store": True, "verbosity": "low", "reasoning_effort": "minimal"}
        answer = client.chat.completions.create(**fields, **sent)
        assert answer.choices == plain.choices
        assert (answer.metadata, answer.service_tier) == (SENT["metadata"], "default")
        assert (plain.metadata, plain.service_tier) == (None, None)
        options = {"include_obfuscation": False, "include_usage": True}
        chunks = list(
            client.chat.completions.create(**fields, **sent, stream=True, stream_options=options)
        )
        assert {chunk.service_tier for chunk in chunks} == {"default"}
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert text == answer.choices[0].message.content

    def test_responses(self, client):
        fields: dict[str, Any] = {"model": MODEL, "input": "What is a list?", "temperature": 0}
        fields["max_output_tokens"] = 12
        plain = client.responses.create(**fields)
        answer = client.responses.create(
            **fields,
            **SENT,
            store=False,
            max_tool_calls=3,
            text={"verbosity": "high"},
            reasoning={"effort": "low", "summary": "auto"},
            include=["reasoning.encrypted_content", "file_search_call.results"],
            extra_body={"background_options": {"completion_window": "soonest"}},
        )
        assert answer.output_text == plain.output_text
        shown = answer.model_dump()
        echoed = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
        for name in (*echoed, "user"):
            assert shown[name] == SENT[name]
        assert (shown["service_tier"], shown["store"]) == ("default", False)
        assert (shown["max_tool_calls"], shown["text"]["verbosity"]) == (3, "high")
        assert shown["reasoning"]["effort"] == "low"
        assert shown["reasoning"]["summary"] == "auto"

    @pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda one: str(one)[:40])
    def test_a_wrong_value_is_refused(self, server, fields, param):
        assert refused(server, CHAT, messages=HI, **fields)["param"].startswith(param)
        assert refused(server, "/v1/responses", input="a", **fields)["param"].startswith(param)

    def test_wrong_values_of_one_dialect(self, server):
        for name in ("verbosity", "reasoning_effort"):
            assert refused(server, CHAT, messages=HI, **{name: "loud"})["param"] == name
        for name, key in (("text", "verbosity"), ("reasoning", "effort"), ("reasoning", "summary")):
            error = refused(server, "/v1/responses", input="a", **{name: {key: "loud"}})
            assert error["param"] == f"{name}.{key}"

    def test_settings_reach_a_template_that_has_them(self, server):
        template = "{{ messages[0].content }} {{ reasoning_effort }} {{ verbosity }}"
        fields = {"chat_template": template, "max_tokens": 1, "return_prompt_text": True}
        settings = {"reasoning_effort": "max", "verbosity": "high"}
        reply = post(server, CHAT, messages=HI, **fields, **settings)
        assert reply["prompt_text"] == "What is a list? max high"


class TestMessages:
    TEMPLATE = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.mood }}|{{ (m.facts or {}).age }}]"
        "{% endfor %}"
    )

    def text(self, server: ServerProcess, *messages: dict[str, Any]) -> str:
        fields = {"max_tokens": 1, "return_prompt_text": True, "chat_template": self.TEMPLATE}
        prompt = post(server, CHAT, messages=messages, **fields)["prompt_text"]
        tokens = post(server, "/tokenize", messages=messages, chat_template=self.TEMPLATE)["tokens"]
        assert post(server, "/detokenize", tokens=tokens)["prompt"] == prompt
        return prompt

    def test_unknown_keys_reach_the_template(self, server):
        one = {"role": "user", "content": "Hi", "mood": "gay", "facts": {"age": 7}, "x": None}
        assert (
            self.text(server, one, {"role": "user", "content": "a"}) == "[user|Hi|gay|7][user|a||]"
        )
        same = {"role": "user", "content": "Hi", "template_fields": {"mood": "gay"}}
        assert self.text(server, same) == "[user|Hi|gay|]"
        # `template_fields` does not replace a field that the message itself has.
        hidden = {
            "role": "user",
            "content": "Hi",
            "template_fields": {"content": "no"},
            "mood": "b",
        }
        assert self.text(server, hidden) == "[user|Hi|b|]"

    def test_custom_roles_reach_the_template(self, server):
        assert self.text(server, {"role": "judge", "content": "Hi"}) == "[judge|Hi||]"
        assert self.text(server, {"role": "judge", "mood": "a"}) == "[judge||a|]"
        for role in ("", "r" * 65, 1):
            message = {"role": role, "content": "Hi"}
            assert refused(server, CHAT, messages=[message])["param"] == "messages[0].role"

    def test_a_template_may_refuse_them(self, server):
        template = "{% if messages[0].role != 'user' %}{{ raise_exception('odd role') }}{% endif %}"
        message = {"role": "judge", "content": "Hi"}
        error = refused(server, CHAT, messages=[message], chat_template=template)
        assert "odd role" in error["message"]

    def test_what_the_clients_send_back(self, server, client):
        answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=3)
        message = {**answer.choices[0].message.model_dump(), "annotations": []}
        assert "refusal" in message
        again = [*HI, message, {"role": "user", "content": "More."}]
        assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=2).choices
        refusal = {"role": "assistant", "content": None, "refusal": "No."}
        part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
        assert self.text(server, refusal) == self.text(server, part) == "[assistant|No.||]"

    def test_what_stays_refused(self, server):
        for key, value in (("audio", {"id": "a"}), ("function_call", {"name": "f"})):
            message = {"role": "assistant", "content": "a", "mood": "b", key: value}
            error = refused(server, CHAT, messages=[message])
            assert error["param"] == f"messages[0].{key}"
            assert error["code"] == "unsupported_parameter"

    def test_marks_of_cached_parts(self, server):
        part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        other = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
        message = {"role": "user", "content": [part, other]}
        assert self.text(server, message) == "[user|Hi\na||]"


class TestGuided:
    SCHEMA = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    JSON = r'\{\s*"yes":\s*(true|false)\s*\}'

    @pytest.mark.parametrize(
        ("fields", "pattern"),
        [
            ({"guided_json": SCHEMA}, JSON),
            ({"guided_json": json.dumps(SCHEMA)}, JSON),
            ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, r'\{ ?"yes" ?: ?(true|false) ?\}'),
            ({"guided_regex": "[a-c]{3}[0-9]"}, "[a-c]{3}[0-9]"),
            ({"guided_choice": ["north", "south"]}, "north|south"),
            ({"guided_grammar": 'root ::= "a" ("b" | "c") "d"'}, "a[bc]d"),
            ({"guided_choice": ["north", "south"], "guided_decoding_backend": "auto"}, "north|south"),
        ],
        ids=str,
    )  # fmt: skip
    def test_each_name_does_what_the_newer_does(self, client, fields, pattern):
        chat = client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=60, extra_body=fields
        )
        text = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=60, extra_body=fields
        )
        for found in (chat.choices[0].message.content, text.choices[0].text):
            assert re.fullmatch(pattern, found), found

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
            ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
            ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
            ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
            ({"guided_choice": []}, "guided_choice"),
            ({"guided_regex": "("}, "guided_regex"),
            ({"guided_grammar": "root ::="}, "guided_grammar"),
            ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
            ({"guided_json": "{"}, "guided_json"),
            ({"guided_choice": "a"}, "guided_choice"),
            ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ],
        ids=str,
    )
    def test_refusals_name_the_field(self, server, fields, param):
        for path, prompt in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
            error = refused(server, path, **prompt, **fields)
            assert error["param"] == param
            assert param in error["message"]


class TestMessagesDialect:
    def ask(self, claude: anthropic.Anthropic, messages: Any = HI, **fields: Any) -> Any:
        fields = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}} | fields
        return claude.messages.create(messages=messages, **fields)

    def test_redacted_thinking_and_system_messages(self, claude):
        turn = [{"type": "text", "text": "A"}]
        redacted = {"type": "redacted_thinking", "data": "x"}
        question = {"role": "user", "content": "More."}
        plain = self.ask(claude, [*HI, {"role": "assistant", "content": turn}, question])
        with_it = self.ask(
            claude, [*HI, {"role": "assistant", "content": [redacted, *turn]}, question]
        )
        assert with_it.content == plain.content
        assert (
            with_it.usage == plain.usage or with_it.usage.output_tokens == plain.usage.output_tokens
        )
        begin = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *HI]
        assert self.ask(claude, begin).content == self.ask(claude, system="Be brief.").content

    @pytest.mark.parametrize(
        "thinking",
        [
            {"type": "adaptive"},
            {"type": "adaptive", "display": "omitted"},
            {"type": "disabled"},
            {"type": "enabled", "budget_tokens": 1024},
        ],
        ids=str,
    )
    def test_thinking_of_a_model_that_does_not_think(self, claude, thinking):
        plain = self.ask(claude)
        answer = self.ask(claude, thinking=thinking)
        assert answer.content == plain.content
        counted = claude.messages.count_tokens(model=MODEL, messages=HI, thinking=thinking)
        assert counted == claude.messages.count_tokens(model=MODEL, messages=HI)

    def test_output_config(self, claude, server):
        config = {"effort": "low", "format": {"type": "json_schema", "schema": TestGuided.SCHEMA}}
        answer = self.ask(claude, output_config=config, max_tokens=60)
        assert re.fullmatch(TestGuided.JSON, answer.content[0].text)
        bad = {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format.*uniqueItems"):
            self.ask(claude, output_config=bad)

    def test_what_changes_nothing(self, claude):
        tool = {
            "name": "f",
            "input_schema": {"type": "object"},
            "eager_input_streaming": True,
            "defer_loading": False,
            "allowed_callers": ["direct"],
        }
        use = {
            "type": "tool_use",
            "id": "a",
            "name": "f",
            "input": {},
            "caller": {"type": "direct"},
        }
        result = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
        messages = [
            *HI,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        answer = self.ask(
            claude,
            messages,
            tools=[tool],
            metadata={"user_id": "u"},
            service_tier="auto",
            cache_control={"type": "ephemeral"},
        )
        assert answer.usage.service_tier == "standard"
        assert self.ask(claude).usage.service_tier is None

    def test_variables_of_the_template(self, server):
        body = {"messages": HI, "max_tokens": 1, "return_prompt_text": True}
        variables = {"chat_template_kwargs": {"nothing": 1}}
        reply = post(server, "/v1/messages", **body, **variables)
        assert "What is a list?" in reply["prompt_text"]
        error = HTTP.post(
            f"{server.url}/v1/messages",
            json={**body, "chat_template_kwargs": {"messages": []}},
        )
        assert "chat_template_kwargs cannot set messages" in error.json()["error"]["message"]
