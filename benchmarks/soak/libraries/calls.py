"""Traffic of one Python client library, checked; the soak test starts it as a script.

    python calls.py openai http://127.0.0.1:8000 60

Imports nothing of this project, because the library may be in an environment of its own. Prints one
line of JSON at the end: for each call its request id, when it was sent and its seconds; the wrong
answers; and the library's version.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ("main",)

_REST_S = 2.0  # between two calls
_ANSWER_S = 120.0
_MODEL = "demo"
_QUESTION = "What is a list?"
_WEATHER = {
    "name": "get_weather",
    "description": "weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}
Headers = dict[str, str]
Call = Callable[[Headers], object]
"""Makes a call; the headers have its request id."""


def _check(holds: object, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _openai(url: str) -> Iterator[Call]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=_ANSWER_S)
    messages: Any = [{"role": "user", "content": _QUESTION}]

    def whole(headers: Headers) -> None:
        answer = client.chat.completions.create(
            model=_MODEL, messages=messages, max_tokens=16, extra_headers=headers
        )
        _check(answer.choices[0].finish_reason in ("stop", "length"), str(answer))

    def stream(headers: Headers) -> None:
        chunks = client.chat.completions.create(
            model=_MODEL, messages=messages, max_tokens=16, stream=True, extra_headers=headers
        )
        ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        _check(ends[-1] in ("stop", "length"), str(ends))

    def tool(headers: Headers) -> None:
        tools: Any = [{"type": "function", "function": _WEATHER}]
        answer = client.chat.completions.create(
            model=_MODEL,
            messages=messages,
            tools=tools,
            tool_choice="required",
            max_tokens=64,
            extra_headers=headers,
        )
        (call, *_) = answer.choices[0].message.tool_calls or [None]
        if answer.choices[0].finish_reason != "length":
            _check(call and call.type == "function" and json.loads(call.function.arguments), "call")

    def response(headers: Headers) -> None:
        answer = client.responses.create(
            model=_MODEL, input=_QUESTION, max_output_tokens=16, extra_headers=headers
        )
        _check(answer.status in ("completed", "incomplete"), str(answer))

    def events(headers: Headers) -> None:
        with client.responses.stream(
            model=_MODEL, input="Hi", max_output_tokens=16, extra_headers=headers
        ) as events:
            _check([event.type for event in events][-1].startswith("response."), "events")

    def refused(headers: Headers) -> None:
        try:
            client.completions.create(
                model=_MODEL, prompt="x", temperature=9, extra_headers=headers
            )
        except openai.BadRequestError as error:
            _check(error.param == "temperature", str(error))
            return
        raise AssertionError("temperature=9 was accepted")

    yield from (whole, stream, tool, response, events, refused)


def _anthropic(url: str) -> Iterator[Call]:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", timeout=_ANSWER_S)
    fields: Any = {
        "model": _MODEL,
        "max_tokens": 32,
        "messages": [{"role": "user", "content": _QUESTION}],
    }
    ends = ("end_turn", "max_tokens")

    def whole(headers: Headers) -> None:
        _check(
            client.messages.create(**fields, extra_headers=headers).stop_reason in ends,
            "stop_reason",
        )

    def stream(headers: Headers) -> None:
        with client.messages.stream(**fields, extra_headers=headers) as events:
            _check(events.get_final_message().stop_reason in ends, "stop_reason")

    def tool(headers: Headers) -> None:
        schema: Any = {"name": _WEATHER["name"], "input_schema": _WEATHER["parameters"]}
        answer = client.messages.create(
            **fields, tools=[schema], tool_choice={"type": "any"}, extra_headers=headers
        )
        _check(answer.stop_reason in ("tool_use", "max_tokens"), str(answer))

    def count(headers: Headers) -> None:
        found = client.messages.count_tokens(
            model=_MODEL, messages=fields["messages"], extra_headers=headers
        )
        _check(found.input_tokens > 0, "input_tokens")

    yield from (whole, stream, tool, count)


def _langchain(url: str) -> Iterator[Call]:
    from langchain_openai import ChatOpenAI

    fields: Any = {
        "model": _MODEL,
        "base_url": f"{url}/v1",
        "api_key": "none",
        "timeout": _ANSWER_S,
        "max_tokens": 64,
    }
    model = ChatOpenAI(**fields)

    def invoke(headers: Headers) -> None:
        answer = model.invoke(_QUESTION, extra_headers=headers)
        _check(answer.response_metadata["finish_reason"], "finish_reason")

    def stream(headers: Headers) -> None:
        _check(list(model.stream(_QUESTION, extra_headers=headers)), "chunks")

    def tool(headers: Headers) -> None:
        bound = model.bind_tools([{"type": "function", "function": _WEATHER}], tool_choice="any")
        answer: Any = bound.invoke(_QUESTION, extra_headers=headers)
        if answer.response_metadata["finish_reason"] != "length":
            _check(answer.tool_calls[0]["name"] == _WEATHER["name"], str(answer))

    def structured(headers: Headers) -> None:
        schema = {"title": "count", **_SCHEMA}
        constrained = model.with_structured_output(schema, method="json_schema")
        found = constrained.invoke(_QUESTION, extra_headers=headers)
        _check(isinstance(found, dict) and 0 <= found["count"] <= 99, str(found))

    yield from (invoke, stream, tool, structured)


def _litellm(url: str) -> Iterator[Call]:
    import litellm  # pyright: ignore[reportMissingImports] - in an environment of its own

    fields: Any = {
        "model": f"openai/{_MODEL}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": 16,
        "timeout": _ANSWER_S,
    }

    def whole(headers: Headers) -> None:
        answer = litellm.completion(**fields, extra_headers=headers)
        _check(answer.choices[0].finish_reason, "finish_reason")

    def stream(headers: Headers) -> None:
        _check(list(litellm.completion(**fields, stream=True, extra_headers=headers)), "chunks")

    def structured(headers: Headers) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "count", "schema": _SCHEMA}}
        more: Any = {"max_tokens": 64, "response_format": form, "extra_headers": headers}
        answer = litellm.completion(**{**fields, **more})
        if answer.choices[0].finish_reason == "stop":
            _check("count" in json.loads(answer.choices[0].message.content), str(answer))

    yield from (whole, stream, structured)


_LIBRARIES: dict[str, Callable[[str], Iterator[Call]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "langchain-openai": _langchain,
    "litellm": _litellm,
}


def main(arguments: list[str]) -> int:
    """Call the library until the time is over, and print the result; returns the exit code 0."""
    name, url, seconds = arguments
    calls = list(_LIBRARIES[name](url))
    wrong: list[str] = []
    made: list[tuple[str, str, float, float]] = []
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        call = calls[len(made) % len(calls)]
        kind = getattr(call, "__name__", "call")
        request_id = f"{name}-{len(made)}"
        sent, begin = time.time(), time.perf_counter()
        try:
            call({"X-Request-Id": request_id})
        except Exception as error:  # a library can raise any exception
            wrong.append(f"{name}: {kind}: {type(error).__name__}: {error}"[:1000])
        made.append((request_id, kind, sent, time.perf_counter() - begin))
        time.sleep(_REST_S)
    version = importlib.metadata.version(name)
    result = {"calls": len(made), "made": made, "wrong": wrong[:20], "version": version}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
