"""Requests as large as a server accepts. Child processes of the server prepare or refuse them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import PATIENCE_S, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROSE = "once upon a time there was " * 200_000


LONG = "a b " * 100_000  # large enough for a process of its own
MESSAGES = [{"role": "user", "content": LONG}]
ENDLESS = {
    "messages": MESSAGES,
    "chat_template": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
}
BODIES = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": LONG},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": LONG},
    "/v1/responses/input_tokens": {"input": LONG},
    "/v1/embeddings": {"input": LONG},
    "/v1/score": {"queries": LONG, "documents": "a"},
    "/v1/rerank": {"query": LONG, "documents": ["a"]},
    "/tokenize": {"prompt": LONG},
    "/detokenize": {"tokens": [700] * 100_000},
    "/invocations": {"prompt": LONG},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        "model.max_model_len=2048", "scheduler.max_num_batched_tokens=256"
    ) as process:
        yield process


def post(server: ServerProcess, path: str, body: dict) -> httpx.Response:
    return HTTP.post(server.url + path, json=body)


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
    assert "2048 tokens of at most" in error["message"]


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


@pytest.mark.slow
def test_what_it_has_allocated_goes_back(server):
    """After large bodies and answers the API process has little more memory than before."""
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
    for megabytes in range(2, 8):  # in bodies of rising size
        send(megabytes * 1_000_000)
    wait_until(
        lambda: process.memory_info().rss - before < 24 << 20,
        "the API process keeps more memory than before",
    )


def test_a_request_of_many_sequences_leaves_a_row_to_others(server):
    many = {"prompt": "Once", "n": 128, "max_tokens": 480, "ignore_eos": True, "stream": True}
    many["request_id"] = "many"
    with HTTP.stream("POST", server.url + COMPLETIONS, json=many) as stream:
        lines = stream.iter_lines()
        next(lines)
        # 128 sequences came before this request and run for seconds. It is answered while they run.
        assert post(server, COMPLETIONS, {"prompt": "Hi", "max_tokens": 4}).status_code == 200
        assert next(lines) is not None
        assert not any("cmpl-many " in line for line in server.output)


def test_a_prompt_is_scored_in_pieces_beside_a_stream(server):
    """A stream gets a token in each of the steps that together compute 2,000 log probabilities."""
    ids = [300 + index * 7 % 2000 for index in range(2000)]
    scored = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 20}
    endless = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    with (
        ThreadPoolExecutor(1) as pool,
        server.held_engine(),
        server.sent(COMPLETIONS, endless, "endless") as connection,
    ):
        answer = pool.submit(
            HTTP.post, server.url + COMPLETIONS, json=scored, headers={"x-trace": "1"}
        )
        wait_until(lambda: server.load() == 2)
        server.engine.resume()
        reply = answer.result().json()
        connection.close()
    assert len(reply["choices"][0]["prompt_logprobs"]) == 2000
    (one,) = reply["trace"]["completions"]
    pieces = [event for event in one["events"] if event["event"] == "prefill"]
    assert len(pieces) >= 2000 // 256
    assert {piece["batch"] for piece in pieces} == {2}


def connect(server: ServerProcess, path: str, body: dict, request_id: str) -> socket.socket:
    """A connection on which a whole request was sent."""
    data = json.dumps(body).encode()
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port), timeout=PATIENCE_S)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return connection


def large_forks(server: ServerProcess) -> list[psutil.Process]:
    """The processes that prepare large bodies or endless templates.

    They have a lower priority than the server.
    """
    process = psutil.Process(server.pid)
    forks = process.children(recursive=True)
    found = []
    for one in forks:
        with suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE and one.nice() > process.nice():
                found.append(one)
    return found


@contextmanager
def held_forks(server: ServerProcess) -> Iterator[None]:
    """Suspend the two processes that prepare large bodies or endless templates.

    A process may end before it can be suspended. So the caller should send more than two bodies.
    """

    def are_held() -> bool:
        forks = large_forks(server)
        for one in forks:
            with suppress(psutil.NoSuchProcess):
                one.suspend()
        return len(forks) == 2 == len(large_forks(server))

    wait_until(are_held, "two large bodies are not prepared at once")
    try:
        yield
    finally:
        for one in large_forks(server):
            with suppress(psutil.NoSuchProcess):
                one.resume()


def test_a_client_that_leaves_while_its_body_is_prepared(server):
    """The log names the request. Its preparation ends, whether it runs or waits for a process."""
    working = [connect(server, CHAT, ENDLESS, f"works-{number}") for number in range(8)]
    with held_forks(server):
        for number, (path, body) in enumerate(BODIES.items()):  # these wait
            connect(server, path, body, f"waits-{number}").close()
        for number, path in enumerate(BODIES):
            line = f"disconnected phase=preparation endpoint={path}"
            assert server.log_of(f"waits-{number} ") == f"waits-{number} {line}"
        for connection in working:
            connection.close()
    wait_until(lambda: not large_forks(server), "a process works for a client that has left")
    for number in range(6, 8):  # the first six requests may have ended before
        assert "disconnected phase=preparation" in server.log_of(f"works-{number} ")
    wait_until(lambda: server.load() == 0)


def test_templates_leave_the_processes_to_other_requests(server):
    """Endless templates take 2 processes at a time, so ordinary requests do not wait for them."""
    endless = ENDLESS | {"messages": [{"role": "user", "content": "Hi " * 2000}]}
    sent = [connect(server, CHAT, endless, f"endless-{number}") for number in range(12)]
    with held_forks(server):  # two of the 12 are prepared at a time, in processes of their own
        assert post(server, "/tokenize", {"prompt": PROSE[:12_000]}).status_code == 200
        assert len(large_forks(server)) == 2
    for connection in sent:
        connection.close()


def test_a_client_that_leaves_before_the_end_of_its_body(server):
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=PATIENCE_S) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            'X-Request-Id: half\r\nContent-Length: 100\r\n\r\n{"prompt"'.encode()
        )
    line = f"half disconnected phase=body endpoint={COMPLETIONS}"
    assert server.log_of("half ") == line


@pytest.mark.slow  # `TestChatTemplate` has a loop without end too, in a request of a few words
@pytest.mark.parametrize("content", ["Hi", "Hi" * 4000])
def test_a_template_without_end_is_ended(server, content):
    template = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    body = {"messages": [{"role": "user", "content": content}], "chat_template": template}
    error = post(server, CHAT, body).json()["error"]
    assert error["param"] == "chat_template"
    assert "2 s of processor time" in error["message"]
