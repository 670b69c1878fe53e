"""Fields of chat completions in the Messages and Responses dialects."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.e2e.json_requests import CHAT, HI, MODEL, post, refused
from tests.e2e.server_process import HTTP


class TestNewerFields:
    """Fields that vLLM added to chat completions; log probabilities and truncation of responses."""

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
            with HTTP.stream("POST", server.url + path, json=sent) as response:
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
        fields: dict[str, Any] = {"model": MODEL, "input": "What is a list?", "temperature": 0}
        fields |= {"max_output_tokens": 6, "include": ["message.output_text.logprobs"]}
        answer = client.responses.create(**fields, top_logprobs=3)
        part = answer.output[0].content[0]
        assert "".join(one.token for one in part.logprobs) == part.text
        chat = client.chat.completions.create(
            model=MODEL, messages=HI, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
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
            client.responses.create(model=MODEL, input=text)
        answer = client.responses.create(
            model=MODEL, input=text, truncation="auto", max_output_tokens=12
        )
        assert answer.usage.input_tokens == 500
        assert answer.truncation == "auto"
