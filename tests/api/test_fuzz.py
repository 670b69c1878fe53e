"""The answer to any body is a reply, or a 4xx with the error object of the endpoint's dialect."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from ostinato.api.base.unsupported_fields import UNSUPPORTED
from ostinato.api.responses.schemas import InputTokensRequest, ResponsesRequest
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.text_completions import CompletionRequest
from ostinato.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["user", "assistant", "text", "test-model", "Hi", "1e999"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "5", "include_usage", "x"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


@cache
def likely(name: str) -> st.SearchStrategy[Any]:
    """A value that is often valid, so that bodies pass the first check."""
    return {
        "messages": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(["user", "system", "assistant", "tool"]),
                    "content": st.text(max_size=5),
                }
            ),
            min_size=1,
            max_size=2,
        ),
        "prompt": st.one_of(
            st.text(max_size=5),
            st.lists(st.integers(0, 999), max_size=4),
            st.lists(st.text(max_size=3), max_size=3),
        ),
        "input": st.one_of(
            st.text(max_size=5),
            st.lists(
                st.one_of(
                    st.fixed_dictionaries(
                        {
                            "role": st.sampled_from(["user", "assistant"]),
                            "content": st.text(max_size=5),
                        }
                    ),
                    st.fixed_dictionaries(
                        {
                            "type": st.sampled_from(["function_call", "function_call_output"]),
                            "call_id": st.text(max_size=3),
                            "name": st.text(max_size=3),
                            "arguments": st.sampled_from(["{}", "[", ""]),
                        }
                    ),
                ),
                max_size=3,
            ),
        ),
        "tools": st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.just("function"),
                    "name": st.sampled_from(["f", "g", "a b"]),
                    "parameters": values,
                },
                optional={
                    "function": st.fixed_dictionaries({"name": st.just("f")}),
                    "strict": st.booleans(),
                },
            ),
            max_size=2,
        ),
        "tool_choice": st.sampled_from(
            ["none", "auto", "required", {"type": "any"}, {"type": "function", "name": "f"}]
        ),
        "tokens": st.lists(st.integers(-1, 1001), max_size=4),
        "model": st.sampled_from(["test-model", None]),
    }.get(name, st.one_of(st.none(), st.booleans(), st.integers(0, 5), st.floats(0, 1)))


@cache  # building a strategy takes longer than a request
def bodies(schema: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    names = [field.name for field in msgspec.structs.fields(schema)]
    required = [field.name for field in msgspec.structs.fields(schema) if field.required]
    good = st.fixed_dictionaries(
        {name: likely(name) for name in required},
        optional={name: likely(name) for name in names if name not in required},
    )
    wild = st.dictionaries(
        st.one_of(
            st.sampled_from(names), st.sampled_from(sorted(UNSUPPORTED)), st.text(max_size=3)
        ),
        values,
        max_size=3,
    )
    return st.builds(lambda first, second: first | second, good, wild)


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v1/chat/completions", ChatCompletionRequest),
        ("/v1/completions", CompletionRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/messages/count_tokens", CountTokensRequest),
        ("/v1/responses", ResponsesRequest),
        ("/v1/responses/input_tokens", InputTokensRequest),
        ("/invocations", ChatCompletionRequest),
    ],
)
@given(data=st.data())
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_json(app, path, schema, data):
    body = data.draw(bodies(schema))
    response = app.http.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert 200 <= response.status_code < 500, response.text
    if response.status_code == 200:
        return
    error = response.json()["error"]
    kinds = {"invalid_request_error"}
    if path.startswith("/v1/messages"):
        assert sorted(error) == ["message", "type"]
        kinds.add("not_found_error")
    else:
        assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] in kinds
    assert error["message"]


@given(body=st.binary(max_size=60))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes(app, body):
    response = app.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
