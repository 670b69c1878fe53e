"""Requests as large as a server takes: answered or refused in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.server_process import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROSE = "once upon a time there was " * 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


def post(server: ServerProcess, path: str, body: dict) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a" * 7_000_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 7_000_000}]}, "messages"),
    ],
)
def test_a_text_that_can_not_fit_is_refused_by_its_length(server, path, body, param):
    error = post(server, path, body).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "7000" in error["message"]  # the number of its characters
    assert "512 tokens of at most" in error["message"]


def test_of_a_text_that_is_truncated_the_end_is_taken(server):
    body = {"max_tokens": 1, "truncate_prompt_tokens": 50, "return_token_ids": True}
    whole = post(server, COMPLETIONS, {**body, "prompt": PROSE}).json()
    short = post(server, COMPLETIONS, {**body, "prompt": PROSE[-2000:]}).json()
    assert whole["usage"]["prompt_tokens"] == 50
    assert whole["choices"][0]["prompt_token_ids"] == short["choices"][0]["prompt_token_ids"]


def test_a_large_request_is_answered_as_a_small_one(server):
    fields = {"max_tokens": 8, "temperature": 0, "seed": 1}
    messages = [{"role": "user", "content": "Hi"}]
    small = post(server, CHAT, {**fields, "messages": messages}).json()
    large = post(server, CHAT, {**fields, "messages": messages, "user": "u" * 100_000}).json()
    assert large["choices"] == small["choices"]
    assert large["usage"]["prompt_tokens"] == small["usage"]["prompt_tokens"]


def test_what_it_has_allocated_goes_back(server):
    process = psutil.Process(server.pid)
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": "x"} for index in range(50_000)
    ]
    post(server, CHAT, {"messages": messages})
    before = process.memory_info().rss
    for _ in range(3):
        assert post(server, CHAT, {"messages": messages}).status_code == 400
    assert process.memory_info().rss - before < 32 << 20


def test_a_template_without_end_is_ended(server):
    template = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": template}
    error = post(server, CHAT, body).json()["error"]
    assert error["param"] == "chat_template"
    assert "2 s of processor time" in error["message"]
