"""Fields that clients send by default, through the official clients against a real server process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.server_process import HTTP, ServerProcess

HI: Any = [{"role": "user", "content": "What is a list?"}]
CHAT = "/v1/chat/completions"
# What changes no answer of a single server.
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


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("model.name=demo") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as one:
        yield one


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=200) as one:
        yield one


def post(server: ServerProcess, path: str, **body: object) -> dict[str, Any]:
    response = HTTP.post(server.url + path, json=body, timeout=100)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: ServerProcess, path: str, **body: object) -> dict[str, Any]:
    response = HTTP.post(server.url + path, json=body, timeout=100)
    assert response.status_code == 400, response.text
    return response.json()["error"]


class TestWithoutEffect:
    def test_chat(self, client):
        fields: dict[str, Any] = {"model": "demo", "messages": HI, "max_tokens": 12}
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
        fields: dict[str, Any] = {"model": "demo", "input": "What is a list?", "temperature": 0}
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
        # What the server knows stays what it is.
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
        answer = client.chat.completions.create(model="demo", messages=HI, max_tokens=3)
        message = {**answer.choices[0].message.model_dump(), "annotations": []}
        assert "refusal" in message
        again = [*HI, message, {"role": "user", "content": "More."}]
        assert client.chat.completions.create(model="demo", messages=again, max_tokens=2).choices
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
            model="demo", messages=HI, max_tokens=60, extra_body=fields
        )
        text = client.completions.create(
            model="demo", prompt="Once", max_tokens=60, extra_body=fields
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
        fields = {"model": "demo", "max_tokens": 8, "extra_body": {"temperature": 0}} | fields
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
        counted = claude.messages.count_tokens(model="demo", messages=HI, thinking=thinking)
        assert counted == claude.messages.count_tokens(model="demo", messages=HI)

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
            timeout=60,
        )
        assert "chat_template_kwargs can not set messages" in error.json()["error"]["message"]


class TestNewerFields:
    """What vLLM added to chat, in the other two dialects."""

    def test_repetition_detection(self, server):
        schema = {"type": "array", "items": {"const": "la"}, "minItems": 300}
        found = {"max_pattern_size": 40, "min_count": 3}
        form = {"type": "json_schema", "schema": schema}
        body = {"messages": HI, "max_tokens": 400, "output_config": {"format": form}}
        reply = post(server, "/v1/messages", **body, repetition_detection=found)
        assert reply["stop_reason"] == "repetition"
        assert reply["usage"]["output_tokens"] < 200
        text: dict[str, Any] = {"format": {**form, "name": "a"}}
        body = {"input": "What is a list?", "max_output_tokens": 400, "text": text}
        reply = post(server, "/v1/responses", **body, repetition_detection=found)
        assert (reply["status"], reply["incomplete_details"]) == (
            "incomplete",
            {"reason": "repetition"},
        )
        assert reply["usage"]["output_tokens"] < 200
        wrong = {"repetition_detection": {"max_pattern_size": 9}}
        error = refused(server, "/v1/responses", input="a", **wrong)
        assert error["param"] == "repetition_detection"
        message = refused(server, "/v1/messages", messages=HI, max_tokens=5, **wrong)["message"]
        assert message.startswith("repetition_detection")

    @pytest.mark.parametrize(
        ("path", "body", "kind"),
        [
            ("/v1/messages", {"messages": HI, "max_tokens": 24}, "content_block_delta"),
            ("/v1/responses", {"input": "What is a list?", "max_output_tokens": 24}, "response.output_text.delta"),
        ],
    )  # fmt: skip
    def test_stream_interval(self, server, path, body, kind):
        def deltas(**fields: object) -> list[str]:
            sent = {**body, "temperature": 0, "stream": True, **fields}
            with HTTP.stream("POST", server.url + path, json=sent, timeout=100) as response:
                events = [
                    json.loads(line[6:]) for line in response.iter_lines() if line[:6] == "data: "
                ]
            found = [event["delta"] for event in events if event["type"] == kind]
            return [one if isinstance(one, str) else one["text"] for one in found]

        plain, wide = deltas(), deltas(stream_interval=8)
        assert "".join(plain) == "".join(wide)
        assert len(plain) > 10
        assert len(wide) <= 4
        error = refused(server, path, **body, stream_interval=8)
        assert "stream_interval=8 needs stream=true" in error["message"]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/messages", {"messages": HI, "max_tokens": 2}),
            ("/v1/responses", {"input": "What is a list?", "max_output_tokens": 2}),
        ],
    )
    def test_what_a_reply_shows_of_its_prompt(self, server, path, body):
        fields = {"return_prompt_text": True, "return_token_offsets": True}
        chat = post(server, CHAT, messages=HI, max_tokens=2, **fields)
        reply = post(server, path, **body, **fields)
        assert reply["prompt_text"] == chat["prompt_text"]
        assert reply["prompt_token_offsets"] == chat["prompt_token_offsets"]
        plain = post(server, path, **body)
        assert "prompt_text" not in plain
        assert "prompt_token_offsets" not in plain

    def test_log_probabilities_of_a_response(self, server, client):
        fields: dict[str, Any] = {"model": "demo", "input": "What is a list?", "temperature": 0}
        fields |= {"max_output_tokens": 6, "include": ["message.output_text.logprobs"]}
        answer = client.responses.create(**fields, top_logprobs=3)
        part = answer.output[0].content[0]
        assert "".join(one.token for one in part.logprobs) == part.text
        chat = client.chat.completions.create(
            model="demo", messages=HI, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
        )
        content = chat.choices[0].logprobs.content
        assert [one.logprob for one in part.logprobs] == [one.logprob for one in content]
        assert all(len(one.top_logprobs) == 3 for one in part.logprobs)
        assert answer.top_logprobs == 3
        with client.responses.stream(**fields, top_logprobs=3) as stream:
            events = list(stream)
        deltas = [one for one in events if one.type == "response.output_text.delta"]
        streamed = [entry.logprob for one in deltas for entry in one.logprobs]
        assert streamed == [one.logprob for one in part.logprobs]
        chosen = client.responses.create(**fields, extra_body={"logprob_token_ids": [300, 301]})
        entries = chosen.output[0].content[0].logprobs
        assert all(len(one.top_logprobs) == 2 for one in entries)
        plain = client.responses.create(**{**fields, "include": []})
        assert plain.output[0].content[0].logprobs == []

    def test_refusals_of_log_probabilities(self, server):
        error = refused(server, "/v1/responses", input="a", top_logprobs=2)
        assert "'message.output_text.logprobs' in include" in error["message"]
        for fields, param in (
            ({"top_logprobs": 21}, "top_logprobs"),
            ({"logprob_token_ids": [5]}, "logprob_token_ids"),
            ({"include": ["everything"]}, "include[0]"),
        ):
            assert refused(server, "/v1/responses", input="a", **fields)["param"] == param
        body = {"messages": HI, "max_tokens": 2, "logprob_token_ids": [5]}
        assert (
            "logprob_token_ids is not supported"
            in refused(server, "/v1/messages", **body)["message"]
        )

    def test_an_input_that_is_too_long(self, server, client):
        text = "one two three four " * 400
        with pytest.raises(openai.BadRequestError, match="512"):
            client.responses.create(model="demo", input=text)
        answer = client.responses.create(
            model="demo", input=text, truncation="auto", max_output_tokens=12
        )
        assert answer.usage.input_tokens == 500
        assert answer.truncation == "auto"


class TestBackground:
    def until(self, client: openai.OpenAI, response_id: str, *statuses: str) -> Any:
        while (answer := client.responses.retrieve(response_id)).status not in statuses:
            assert answer.status in ("queued", "in_progress")
        return answer

    def test_polling(self, client):
        fields: dict[str, Any] = {"model": "demo", "input": "What is a list?", "temperature": 0}
        fields["max_output_tokens"] = 24
        plain = client.responses.create(**fields)
        answer = client.responses.create(**fields, background=True)
        assert (answer.status, answer.background, answer.output) == ("queued", True, [])
        whole = self.until(client, answer.id, "completed", "incomplete")
        assert (whole.output_text, whole.status) == (plain.output_text, plain.status)
        assert whole.usage.output_tokens == plain.usage.output_tokens

    def test_cancel(self, server, client):
        text: Any = {"format": {"type": "json_schema", "name": "a", "schema": self.LONG}}
        answer = client.responses.create(
            model="demo", input="a", background=True, text=text, max_output_tokens=450
        )
        cancelled = client.responses.cancel(answer.id)
        assert cancelled.status == "cancelled"
        assert client.responses.retrieve(answer.id).status == "cancelled"
        assert client.responses.cancel(answer.id).status == "cancelled"
        while server.metrics()["ostinato_requests_running"]:
            pass
        done = client.responses.create(model="demo", input="a", max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="background=true"):
            client.responses.cancel(done.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel("resp_none")

    LONG = {"type": "array", "items": {"const": "la"}, "minItems": 400}

    def test_a_stream_that_is_taken_up_again(self, client):
        fields: dict[str, Any] = {"model": "demo", "input": "What is a list?", "temperature": 0}
        fields["max_output_tokens"] = 40
        stream = client.responses.create(**fields, background=True, stream=True)
        first = []
        for event in stream:
            first.append(event)
            if event.type == "response.output_text.delta":
                break
        stream.close()  # the reply goes on
        response_id = first[0].response.id
        after = first[-1].sequence_number
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=after))
        numbers = [event.sequence_number for event in (*first, *rest)]
        assert numbers == list(range(len(numbers)))
        assert first[1].type == "response.queued"
        deltas = [one for one in (*first, *rest) if one.type == "response.output_text.delta"]
        text = "".join(one.delta for one in deltas)
        assert rest[-1].response.output_text == text
        assert client.responses.create(**fields).output_text == text

    def test_input_tokens(self, client):
        counted = client.responses.input_tokens.count(model="demo", input="What is a list?")
        answer = client.responses.create(model="demo", input="What is a list?", max_output_tokens=1)
        assert counted.input_tokens == answer.usage.input_tokens


class TestInvocations:
    @pytest.mark.parametrize(
        ("path", "body", "kind"),
        [
            (CHAT, {"messages": HI, "max_tokens": 5}, "chat.completion"),
            ("/v1/completions", {"prompt": "Once", "max_tokens": 5}, "text_completion"),
            ("/v1/embeddings", {"input": "Once"}, "list"),
        ],
    )
    def test_the_body_says_what_is_asked(self, server, path, body, kind):
        body = {**body, "request_id": "same"}
        if path != "/v1/embeddings":
            body["temperature"] = 0
        one, other = (post(server, place, **body) for place in ("/invocations", path))
        assert one.pop("object") == other.pop("object") == kind
        for reply in (one, other):
            reply.pop("created")
            reply.pop("usage")
        assert one == other

    def test_rankings_and_scores(self, server):
        pair = {"text_1": "a", "text_2": "b"}
        assert len(post(server, "/invocations", **pair)["data"]) == 1
        assert post(server, "/invocations", query="a", documents=["b", "c"])["results"]

    def test_a_stream(self, server):
        body = {"prompt": "Once", "max_tokens": 3, "stream": True}
        text = HTTP.post(f"{server.url}/invocations", json=body, timeout=60).text
        assert text.endswith("data: [DONE]\n\n")

    def test_refusals(self, server):
        error = refused(server, "/invocations", model="demo")
        assert error["code"] == "missing_field"
        assert "messages, prompt, input" in error["message"]
        assert refused(server, "/invocations", messages=HI, temperature=9)["param"] == "temperature"
        for body, code in ((b"{", "invalid_json"), (b"[]", "invalid_value")):
            reply = HTTP.post(
                f"{server.url}/invocations",
                content=body,
                headers={"Content-Type": "application/json"},
                timeout=60,
            )
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)

    def test_ping(self, server):
        for method in ("GET", "POST"):
            assert HTTP.request(method, f"{server.url}/ping", timeout=60).json()["status"] == "ok"


class TestACallThatIsCut:
    """With `max_tokens` a call that must be made may end before its end; as in vLLM, it is no call."""

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
        fields: dict[str, Any] = {"model": "demo", "tools": [self.TOOL], "messages": HI}
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
            # A stream has given what there was.
            pieces = [
                part.function.arguments for delta in deltas for part in delta.tool_calls or ()
            ]
            assert call.function.arguments.startswith("".join(piece or "" for piece in pieces))

    def test_the_other_dialects(self, client, claude):
        tool: Any = {"type": "function", "strict": False, **self.FUNCTION}
        messages: Any = {"messages": HI, "tool_choice": {"type": "any"}}
        shape = {"name": "get_weather", "input_schema": self.FUNCTION["parameters"]}
        for max_tokens in (1, 3, 12):
            answer = client.responses.create(
                model="demo",
                input="What is a list?",
                tools=[tool],
                tool_choice="required",
                max_output_tokens=max_tokens,
            )
            assert [one.type for one in answer.output] == ["message"]
            assert (answer.status, answer.output_text) == ("incomplete", "")
            again = client.responses.create(
                model="demo", input="And?", previous_response_id=answer.id, max_output_tokens=3
            )
            assert again.output_text
            whole = claude.messages.create(
                model="demo", max_tokens=max_tokens, tools=[shape], **messages
            )
            assert (whole.content, whole.stop_reason) == ([], "max_tokens")

    def test_a_complete_one_before_it_stays(self, client):
        fields: dict[str, Any] = {"model": "demo", "tools": [self.TOOL], "messages": HI}
        fields |= {"tool_choice": "required", "temperature": 1.5, "seed": 1, "max_tokens": 150}
        seen = set()
        for seed in range(12):
            (one,) = client.chat.completions.create(**fields | {"seed": seed}).choices
            for made in one.message.tool_calls:
                city = json.loads(made.function.arguments)["city"]
                assert 4 <= len(city) <= 8
            seen.add((one.finish_reason, bool(one.message.tool_calls)))
        assert seen <= {("length", True), ("tool_calls", True)}


@pytest.mark.slow
def test_a_reply_in_the_background_outlives_the_engine_process(server, client):
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": TestBackground.LONG}}
    fields: dict[str, Any] = {"model": "demo", "input": "a", "text": text, "temperature": 0}
    fields["max_output_tokens"] = 440
    plain = client.responses.create(**fields)
    answer = client.responses.create(**fields, background=True)
    while not client.responses.retrieve(answer.id).output_text:
        pass
    server.engine.kill()
    while (done := client.responses.retrieve(answer.id)).status == "in_progress":
        pass
    assert (done.status, done.output_text) == (plain.status, plain.output_text)
    restarts = [name for name in server.metrics() if "restarts_total" in name]
    assert sum(server.metrics()[name] for name in restarts) == 1
