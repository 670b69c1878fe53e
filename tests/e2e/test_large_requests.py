"""Requests as large as a server takes: answered or refused in a process of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.server_process import HTTP, ServerProcess

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
    """After 20 MB of large bodies and answers the API process has little more memory than before."""
    process = psutil.Process(server.pid)
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": "x"} for index in range(50_000)
    ]

    def send(size: int) -> None:
        bodies = (
            (COMPLETIONS, {"prompt": "a" * size}, 400),
            (COMPLETIONS, {"prompt": "Hi", "max_tokens": 1, "user": "u" * size}, 200),
            (CHAT, {"messages": messages[: size // 100]}, 400),
            ("/tokenize", {"prompt": PROSE[: size // 20]}, 200),
            (COMPLETIONS, {"prompt": "Hi", "n": 16, "max_tokens": 32, "logprobs": 20}, 200),
        )
        for path, body, status in bodies:
            assert post(server, path, body).status_code == status

    send(1_000_000)
    before = process.memory_info().rss
    for megabytes in range(2, 8):  # each larger than all before
        send(megabytes * 1_000_000)
    deadline = time.monotonic() + 60
    while (growth := process.memory_info().rss - before) > 24 << 20:
        assert time.monotonic() < deadline, f"{growth >> 20} MiB more than before"
        time.sleep(0.1)


def test_a_request_of_many_sequences_leaves_a_row_to_others(server):
    many = {"prompt": "Once", "n": 128, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", server.url + COMPLETIONS, json=many) as stream:
        lines = stream.iter_lines()
        next(lines)
        # It is answered although 128 sequences came before it, which take 64 rows for seconds.
        assert post(server, COMPLETIONS, {"prompt": "Hi", "max_tokens": 4}).status_code == 200
        assert server.metrics()["ostinato_requests_running"] > 0
        assert next(lines) is not None


@pytest.mark.parametrize("content", ["Hi", "Hi" * 4000])
def test_a_template_without_end_is_ended(server, content):
    template = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    body = {"messages": [{"role": "user", "content": content}], "chat_template": template}
    error = post(server, CHAT, body).json()["error"]
    assert error["param"] == "chat_template"
    assert "2 s of processor time" in error["message"]
