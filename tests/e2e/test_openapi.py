"""Requests made up from the OpenAPI document against a real server: no 5xx, and the document
describes each answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.e2e.made_up_requests import ask_all
from tests.e2e.server_process import HTTP, ServerProcess
from tests.models.minilm import minilm_directory

# These limits keep answers short. Most made-up requests ask for long ones, which test nothing more.
LIMITS = ("sampling.max_tokens=4", "model.max_model_len=256", "scheduler.max_num_seqs=8")
ENCODER = (f"model.path={minilm_directory()}", "graphs.bundle=false")


def check(seen: dict[str, set[int]], url: str, *answered: str) -> None:
    """Check that no status is 5xx, and that each operation in `answered` gave at least one 200."""
    assert len(seen) >= 25
    assert not [name for name, statuses in seen.items() if max(statuses) >= 500]
    assert [name for name in answered if 200 not in seen[name]] == []
    assert HTTP.get(f"{url}/health").status_code == 200


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*LIMITS) as process:
        yield process


def test_made_up_requests(server):
    seen = ask_all(server.url, 5)
    check(seen, server.url, "GET /health", "GET /tokenizer_info", "POST /reset_prefix_cache")


HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
CALL = {"tool_choice": "required"}
CHAT_TOOL = {"type": "function", "function": TOOL}
CLAUDE_TOOL = {"name": "f", "input_schema": TOOL["parameters"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": HI, "tools": [CHAT_TOOL], **CALL, "max_tokens": 30}),
        ("/v1/completions", {"prompt": "Once", "logprobs": 2, "echo": True}),
        ("/v1/responses", {"input": "Hi"}),
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", **TOOL}], **CALL},
        ),
        ("/v1/messages", {"messages": HI, "max_tokens": 4}),
        (
            "/v1/messages",
            {
                "messages": HI,
                "max_tokens": 30,
                "tools": [CLAUDE_TOOL],
                "tool_choice": {"type": "any"},
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_events_of_a_stream_are_as_the_document_says(server, path, body):
    document = HTTP.get(f"{server.url}/schema/openapi.json").json()
    operation = document["paths"][path]["post"]
    described = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
    data = described["properties"]["data"]
    if "anyOf" in data:
        data, end = data["anyOf"]
        assert end == {"const": "[DONE]"}
    assert data["contentMediaType"] == "application/json"
    check_event = jsonschema.Draft202012Validator({**document, **data["contentSchema"]})
    events = list(stream(f"{server.url}{path}", {**body, "stream": True}))
    assert len(events) > 2
    for event in events:
        check_event.validate(event)
    if path in ("/v1/responses", "/v1/messages"):  # each type has a schema of its own
        assert not check_event.is_valid({**events[0], "type": events[-1]["type"][:-1]})
        assert not check_event.is_valid({"type": events[0]["type"]})


def stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with HTTP.stream("POST", url, json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def test_the_page_of_the_document_loads_nothing(server):
    page = HTTP.get(f"{server.url}/schema")
    assert page.headers["content-type"].startswith("text/html")
    text = page.text
    assert "/v1/responses" in text
    assert "ResponseCreated" in text
    assert "Answer a conversation." in text
    assert "<script" not in text
    assert "default-src 'none'" in text
    assert " src=" not in text
    assert "://" not in text.replace("http://json-schema.org", "")
    links = {part.partition('"')[0] for part in text.split('href="')[1:]}
    assert links == {"data:,", "/schema/openapi.json"}
    for other in ("swagger", "redoc", "elements", "rapidoc"):
        assert HTTP.get(f"{server.url}/schema/{other}").status_code == 404


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("overrides", "answered"),
    [
        ((), ["POST /v1/completions", "POST /v1/embeddings", "POST /v1/rerank", "POST /tokenize"]),
        (ENCODER, ["POST /v1/embeddings", "POST /v1/rerank", "POST /tokenize"]),
    ],
    ids=["generates", "embeds"],
)
def test_many_made_up_requests(overrides, answered):
    with ServerProcess(*LIMITS, *overrides) as server:
        check(ask_all(server.url, 150), server.url, *answered)
