"""Structured output of a real server, through the openai SDK and by plain HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import psutil
import pytest
from pydantic import BaseModel

from ostinato.api.anthropic.schemas import MessagesRequest
from ostinato.api.responses.schemas import ResponsesRequest
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.text_completions import CompletionRequest
from ostinato.runtime.grammar.compiler import MAX_BYTES
from ostinato.runtime.grammar.json_schemas import MAX_OPTIONAL_OF_SOME, MAX_OPTIONAL_PROPERTIES
from ostinato.runtime.types.structured_outputs import MAX_CHOICES
from tests.e2e.number_fields import SCHEMAS, Endpoint, Place, check_numbers
from tests.e2e.server_process import HTTP, ServerProcess

CAT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "Tell me about a cat."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "cat", "schema": CAT, "strict": True}}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another path of this environment's Python."""
    directory = tmp_path_factory.mktemp("environment")
    (directory / "bin").mkdir()
    link = directory / "bin" / "python"
    link.symlink_to(Path(sys.executable).resolve())
    (directory / "lib").symlink_to(Path(sys.prefix) / "lib")
    settings = Path(sys.prefix) / "pyvenv.cfg"
    if settings.exists():
        (directory / "pyvenv.cfg").symlink_to(settings)
    return link


@pytest.fixture(scope="module")
def server(python: Path) -> Iterator[ServerProcess]:
    # Its processes inherit a limit of memory that is above what they limit themselves to.
    limited = ("sh", "-c", f'ulimit -v {16 << 20}; shift; exec "$0" "$@"', str(python))
    with ServerProcess(prefix=limited) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


END_IDS = (0, 2)  # of the demo model


def complete(server: ServerProcess, **fields: object) -> dict[str, Any]:
    body = {"prompt": "A cat: ", "max_tokens": 80, "temperature": 1, "seed": 1, **fields}
    response = HTTP.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def refused(server: ServerProcess, path: str = "/v1/completions", **fields: object) -> dict:
    body = {"prompt": "A cat: "} if path == "/v1/completions" else {"messages": HI}
    response = HTTP.post(f"{server.url}{path}", json=body | fields, timeout=120)
    assert response.status_code == 400, response.text
    return response.json()["error"]


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

        # A random name may go on for ever; what ends must parse.
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

    def test_text_asks_for_nothing(self, client):
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
            answer = HTTP.post(f"{server.url}{place.endpoint.path}", json=body, timeout=60)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error.get("param", "tools") == "tools"
            text = 'tools can not be used: the schema has "uniqueItems", which can not be enforced'
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


def optional(count: int, **more: Any) -> dict[str, Any]:
    """The schema of an object with so many optional properties and a required one."""
    names = [f"property {index}" for index in range(count)]
    return {
        "type": "object",
        "properties": {**{name: {"type": "null"} for name in names}, "last": {"const": 1}},
        "required": ["last"],
        "additionalProperties": False,
        **more,
    }


class TestLimits:
    """Of docs/structured-output.md: each at the limit and one beyond it."""

    def test_choices(self, server):
        words = [f"w{index:05}" for index in range(MAX_CHOICES)]
        assert complete(server, structured_outputs={"choice": words})["text"] in words
        error = refused(server, structured_outputs={"choice": [*words, "one more"]})
        assert f"1 to {MAX_CHOICES} texts" in error["message"]

    def test_a_choice_that_begins_another_one(self, server):
        """Each can be the answer: it depends on whether the model ends there."""
        fields = {"structured_outputs": {"choice": ["yes", "yes, but"]}, "temperature": 0}
        for bias, text in ((100, "yes"), (-100, "yes, but")):
            ends = {str(token_id): bias for token_id in END_IDS}
            choice = complete(server, **fields, logit_bias=ends)
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")

    @pytest.mark.parametrize("kind", [{}, {"type": "string"}, {"type": ["string", "null"]}])
    def test_an_enum_of_50000(self, server, kind):
        words = [f"the value {index}" for index in range(50_000)]
        choice = complete(server, structured_outputs={"json": {**kind, "enum": words}})
        assert json.loads(choice["text"]) in words

    def test_the_size_of_a_constraint(self, server):
        body = {"choice": ["yes", ""]}
        rest = "n" * (MAX_BYTES - len(json.dumps(body, separators=(",", ":"))))
        choice = complete(server, structured_outputs={"choice": ["yes", rest]}, max_tokens=1)
        assert choice["text"][0] in "yn"
        error = refused(server, structured_outputs={"choice": ["yes", rest + "n"]})
        assert f"has {MAX_BYTES + 1} bytes, at most {MAX_BYTES}" in error["message"]
        assert error["code"] == "constraint_too_complex"

    @pytest.mark.parametrize(
        ("most", "more"),
        [(MAX_OPTIONAL_PROPERTIES, {}), (MAX_OPTIONAL_OF_SOME, {"minProperties": 2})],
    )
    def test_optional_properties(self, server, most, more):
        schema = optional(most, **more)
        choice = complete(server, structured_outputs={"json": schema}, max_tokens=300)
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema)
        error = refused(server, structured_outputs={"json": optional(most + 1, **more)})
        assert f"at most {most} are possible" in error["message"]


def tool_places(name: str, schema: dict[str, Any]) -> list[Place]:
    """Requests that must call a tool with one argument of a schema."""
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


class TestNumbers:
    """Of any size, in every keyword of a schema."""

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


PREPARATION = "ostinato.api.server.preparation_main"


def grammar_processes(server: ServerProcess) -> list[psutil.Process]:
    return processes(server, "ostinato.runtime.grammar.process")


def processes(server: ServerProcess, module: str) -> list[psutil.Process]:
    children = psutil.Process(server.pid).children()
    return [one for one in children if module in one.cmdline()]


class TestProcess:
    def test_it_is_replaced_when_it_is_killed(self, server):
        complete(server, structured_outputs={"choice": ["first"]})
        (process, *_) = grammar_processes(server)
        os.kill(process.pid, signal.SIGKILL)
        assert complete(server, structured_outputs={"choice": ["second"]})["text"] == "second"

    def test_killed_in_the_middle(self, server):
        """A stopped process holds its job; its death sends the job to the next one."""
        complete(server, structured_outputs={"choice": ["warm"]})
        for process in grammar_processes(server):
            process.suspend()
        stopped = {process.pid for process in grammar_processes(server)}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(complete, server, structured_outputs={"choice": ["held"]})
            assert complete(server, max_tokens=5)["text"]  # others go on
            assert not waiting.done()
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            assert waiting.result(120)["text"] == "held"
        assert not stopped & {process.pid for process in grammar_processes(server)}

    def test_none_can_be_started(self, server, python):
        """The server is at fault, not the request."""
        complete(server, structured_outputs={"choice": ["known"]})
        target = python.readlink()
        python.unlink()
        for process in (*grammar_processes(server), *processes(server, PREPARATION)):
            process.kill()
        bodies = [
            {"prompt": "A", "user": "u" * 10_000},  # large enough for a process of its own
            {"messages": HI, "chat_template": "Hi"},
            {"prompt": "A", "structured_outputs": {"choice": ["a new one"]}},
            {"prompt": "A", "structured_outputs": {"choice": ["streamed"]}, "stream": True},
            {"messages": HI, "structured_outputs": {"json": {"const": "new"}}},
        ]
        for body in bodies:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answer = HTTP.post(f"{server.url}{path}", json=body | {"max_tokens": 2}, timeout=120)
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) > 0
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "helper_process")
            assert "can not be started (No such file" in error["message"]
        # What was checked before is still served.
        assert complete(server, structured_outputs={"choice": ["known"]})["text"] == "known"
        python.symlink_to(target)
        assert complete(server, structured_outputs={"choice": ["a new one"]})["text"]
        assert complete(server, user="u" * 10_000)["text"]

    def test_the_system_leaves_no_memory_for_one(self, server):
        """As `ulimit -v` does: the server is at fault, and says what is missing."""
        template = {"messages": HI, "chat_template": "{{ 'a' * 300000000 }}", "max_tokens": 2}
        url = f"{server.url}/v1/chat/completions"
        answer = HTTP.post(url, json=template, timeout=120)
        assert answer.status_code == 400  # longer than the context
        (process,) = processes(server, PREPARATION)
        limit = process.memory_info().vms + (200 << 20)
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))
        answer = HTTP.post(url, json=template, timeout=120)
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "helper_process")
        assert "MiB that the limit of the system leaves it" in error["message"]
        assert complete(server, user="u" * 10_000)["text"]  # for which there is room
        process.kill()


def test_others_go_on_while_hostile_constraints_come(server):
    """Constraints that cost much are refused; a stream beside them has no gap."""
    hostile = (
        [{"regex": "(.*a){200}.{200}b" + "x" * number} for number in range(3)]
        + [
            {
                "json": {
                    "type": "object",
                    "properties": {
                        f"p{index}": {"type": "string", "pattern": f"^(a|b)*c{{1,{500 + number}}}$"}
                        for index in range(2000)
                    },
                }
            }
            for number in range(2)
        ]
        + [{"grammar": "start: " + "(" * depth + '"a"' + ")" * depth} for depth in (200, 20_000)]
    )
    gaps: list[float] = []
    done = threading.Event()

    def watch() -> None:
        body = {"prompt": "A cat", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not done.is_set():
            with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as r:
                last = time.monotonic()
                for line in r.iter_lines():
                    if line and not done.is_set():
                        gaps.append(time.monotonic() - last)
                        last = time.monotonic()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(4) as pool:
        codes = list(
            pool.map(
                lambda constraint: (
                    HTTP.post(
                        f"{server.url}/v1/completions",
                        json={"prompt": "A", "max_tokens": 4, "structured_outputs": constraint},
                        timeout=120,
                    ).status_code
                ),
                hostile,
            )
        )
    done.set()
    watcher.join()
    assert set(codes) <= {200, 400}
    assert 400 in codes
    assert len(gaps) > 20
    # Far below the seconds that a constraint may take; a busy machine alone makes some gap.
    assert sorted(gaps)[int(len(gaps) * 0.95)] < 0.5
