"""Structured output of a real server, through the openai SDK and by plain HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from ostinato.api.anthropic.schemas import MessagesRequest
from ostinato.api.responses.schemas import ResponsesRequest
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.text_completions import CompletionRequest
from tests.e2e.number_fields import SCHEMAS, Endpoint, Place, check_numbers
from tests.e2e.server_process import HTTP, ServerProcess
from tests.e2e.structured_requests import HI, complete, refused
from tests.waiting import PATIENCE_S

CAT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "cat", "schema": CAT, "strict": True}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    )


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


class TestOpenAI:
    def test_a_schema(self, client):
        reply = client.chat.completions.create(
            model=model_of(client), messages=HI, response_format=FORMAT, max_tokens=80, n=3, seed=1
        )
        assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 3
        for choice in reply.choices:
            jsonschema.validate(json.loads(choice.message.content or ""), CAT)

    def test_a_streamed_schema(self, client):
        stream = client.chat.completions.create(
            model=model_of(client),
            messages=HI,
            response_format=FORMAT,
            max_tokens=80,
            seed=1,
            stream=True,
        )
        chunks = [chunk.choices[0] for chunk in stream]
        jsonschema.validate(json.loads("".join(c.delta.content or "" for c in chunks)), CAT)
        assert chunks[-1].finish_reason == "stop"

    def test_a_pydantic_model(self, client):
        class Cat(BaseModel):
            name: str
            lives: int

        # A random name may have no end. A reply that ends must parse.
        for seed in range(8):
            reply = client.chat.completions.create(
                model=model_of(client),
                messages=HI,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "cat", "schema": Cat.model_json_schema()},
                },
                max_tokens=120,
                temperature=0.7,
                seed=seed,
            )
            if reply.choices[0].finish_reason == "stop":
                Cat.model_validate_json(reply.choices[0].message.content or "")
                return
        pytest.fail("none of 8 answers ended within 120 tokens")

    def test_json_object(self, client):
        reply = client.chat.completions.create(
            model=model_of(client),
            messages=HI,
            response_format={"type": "json_object"},
            max_tokens=200,
            temperature=0.8,
            seed=5,
        )
        text = reply.choices[0].message.content or ""
        assert text.startswith("{")
        if reply.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)

    def test_the_format_text_constrains_nothing(self, client):
        reply = client.chat.completions.create(
            model=model_of(client),
            messages=HI,
            response_format={"type": "text"},
            max_tokens=5,
            temperature=0,
        )
        plain = client.chat.completions.create(
            model=model_of(client), messages=HI, max_tokens=5, temperature=0
        )
        assert reply.choices[0].message.content == plain.choices[0].message.content


class TestKinds:
    def test_regex(self, server):
        choice = complete(server, structured_outputs={"regex": r"[a-c]{4}-\d\d"})
        assert re.fullmatch(r"[a-c]{4}-\d\d", choice["text"])
        assert choice["finish_reason"] == "stop"

    def test_choice(self, server):
        words = ["yes", "no", "not at all, thank you"]
        for seed in range(3):
            choice = complete(server, seed=seed, structured_outputs={"choice": words})
            assert choice["text"] in words
            assert choice["finish_reason"] == "stop"

    @pytest.mark.parametrize(
        "grammar",
        [
            'root ::= item ("," item){2}\nitem ::= [a-c] [0-9]',
            'start: item ("," item){2}\nitem: /[a-c][0-9]/',
        ],
    )
    def test_grammar(self, server, grammar):
        choice = complete(server, structured_outputs={"grammar": grammar})
        assert re.fullmatch(r"[a-c]\d,[a-c]\d,[a-c]\d", choice["text"])

    def test_structural_tag(self, server):
        tag = {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<cat"],
                "tags": [
                    {
                        "begin": "<cat>",
                        "content": {"type": "json_schema", "json_schema": CAT},
                        "end": "</cat>",
                    }
                ],
                "at_least_one": True,
                "stop_after_first": True,
            },
        }
        for fields in (
            {"structured_outputs": {"structural_tag": json.dumps(tag)}},
            {"response_format": tag},
        ):
            text = complete(server, **fields)["text"]
            match = re.fullmatch(r"<cat>(.*)</cat>", text, re.DOTALL)
            assert match, text
            jsonschema.validate(json.loads(match[1]), CAT)

    def test_length_cuts_it_off(self, server):
        choice = complete(server, max_tokens=3, structured_outputs={"json": CAT})
        assert choice["finish_reason"] == "length"


def tool_places(name: str, schema: dict[str, Any]) -> list[Place]:
    """A required tool call whose argument has `schema`, for each endpoint that takes tools."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters, "strict": True}
    claude = {"name": "f", "input_schema": parameters, "strict": True}
    short = {"max_tokens": 3, "messages": HI}
    return [
        Place(
            Endpoint("/v1/chat/completions", ChatCompletionRequest, short),
            name,
            {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        ),
        Place(
            Endpoint("/v1/responses", ResponsesRequest, {"input": "Hi", "max_output_tokens": 3}),
            name,
            {"tools": [{"type": "function", **function}], "tool_choice": "required"},
        ),
        Place(
            Endpoint("/v1/messages", MessagesRequest, {"model": "ostinato-demo", **short}),
            name,
            {"tools": [claude], "tool_choice": {"type": "any"}},
        ),
    ]


class TestRefusals:
    @pytest.mark.parametrize(
        ("constraint", "part"),
        [
            ({"regex": "(?=a)b"}, "look-around"),
            ({"regex": "["}, "unclosed"),
            ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, "repeats too much"),
            ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
            ({"json": "{"}, "not valid JSON"),
            ({"grammar": "what"}, "neither Lark nor GBNF"),
            ({"choice": []}, "choice"),
            ({"regex": "a", "choice": ["a"]}, "regex and choice"),
            ({"regex": ""}, "empty text"),
            ({}, "none of them"),
            ({"structural_tag": {"type": "structural_tag"}}, "structural_tag"),
        ],
    )
    def test_a_bad_constraint(self, server, constraint, part):
        error = refused(server, structured_outputs=constraint, stream=True)
        assert part in error["message"]
        assert (error["param"] or "").startswith("structured_outputs")

    def test_the_field_that_was_given_is_named(self, server):
        schema = {"type": "string", "not": {}}
        error = refused(
            server,
            "/v1/chat/completions",
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
        assert error["param"] == "response_format"

    def test_a_tool_is_named(self, server):
        for place in tool_places("unique", {"type": "array", "uniqueItems": True}):
            body = place.endpoint.body | place.fields
            answer = HTTP.post(f"{server.url}{place.endpoint.path}", json=body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error.get("param", "tools") == "tools"
            text = 'tools cannot be used: the schema has "uniqueItems", which cannot be enforced'
            assert error["message"].startswith(text)

    def test_two_constraints(self, server):
        error = refused(
            server,
            response_format={"type": "json_object"},
            structured_outputs={"choice": ["a"]},
        )
        assert "two constraints" in error["message"]

    def test_beam_search(self, server):
        error = refused(server, use_beam_search=True, n=2, structured_outputs={"choice": ["a"]})
        assert "use_beam_search" in error["message"]
        assert error["param"] == "structured_outputs"


class TestNumbers:
    """Numbers of any size in the keywords of the schemas in `SCHEMAS`."""

    def places(self) -> list[Place]:
        short = {"max_tokens": 3}
        completions = Endpoint("/v1/completions", CompletionRequest, {"prompt": "A", **short})
        chat = Endpoint("/v1/chat/completions", ChatCompletionRequest, {"messages": HI, **short})
        responses = Endpoint(
            "/v1/responses", ResponsesRequest, {"input": "Hi", "max_output_tokens": 3}
        )
        found = []
        for name, schema in SCHEMAS.items():
            named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            part = {"type": "json_schema", "json_schema": schema}
            tag = {"type": "structural_tag", "format": part}
            text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
            found += [
                Place(completions, name, {"structured_outputs": {"json": schema}}),
                Place(completions, name, {"response_format": tag}),
                Place(chat, name, {"response_format": named}),
                Place(responses, name, {"text": text}),
                *tool_places(name, schema),
            ]
        return found

    def test_a_few(self, server):
        check_numbers(server.url, self.places(), max_examples=50)

    @pytest.mark.slow
    def test_many(self, server):
        check_numbers(server.url, self.places(), max_examples=4000)

    def test_a_whole_number_with_a_point(self, server):
        schema = '{"type": "array", "items": {"const": 1.0}, "minItems": 2.0, "maxItems": 2e0}'
        choice = complete(server, structured_outputs={"json": json.loads(schema)})
        assert json.loads(choice["text"]) == [1, 1]
        assert json.loads(complete(server, structured_outputs={"json": schema})["text"]) == [1, 1]

    def test_a_number_that_is_not_exact(self, server):
        error = refused(server, structured_outputs={"json": {"const": 2**63 + 1}})
        assert "9223372036854775809" in error["message"]
        assert "#/const" in error["message"]
