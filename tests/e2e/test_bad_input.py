"""Wrong requests: the server answers a 4xx with the OpenAI error object, and does not hang."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from ostinato.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from ostinato.api.responses.schemas import ResponsesRequest
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.text_completions import CompletionRequest
from ostinato.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from tests.e2e.number_fields import Endpoint, Place, check_numbers, places
from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import PATIENCE_S, wait_until

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CLAUDE = {"messages": HI, "model": "ostinato-demo"}
ENDPOINTS = [
    Endpoint(COMPLETIONS, CompletionRequest, {"prompt": "Hi", "max_tokens": 2}),
    Endpoint(CHAT, ChatCompletionRequest, {"messages": HI, "max_tokens": 2}),
    Endpoint("/v1/responses", ResponsesRequest, {"input": "Hi", "max_output_tokens": 2}),
    Endpoint("/v1/messages", MessagesRequest, {**CLAUDE, "max_tokens": 2}),
    Endpoint("/v1/messages/count_tokens", CountTokensRequest, CLAUDE),
    Endpoint("/tokenize", TokenizeRequest, {"prompt": "Hi"}),
    Endpoint("/detokenize", DetokenizeRequest, {"tokens": [5]}),
]


@pytest.fixture(scope="module")
def server(server: ServerProcess) -> Iterator[ServerProcess]:
    def num_faults() -> dict[str, float]:
        # 504 is the right answer if `deadline_ms` is short; `send` allows it for no other field.
        return {
            name: n
            for name, n in server.metrics().items()
            if name.startswith("ostinato_refused") and 'status="50' in name and "504" not in name
        }

    before = num_faults()
    yield server
    # After the tests of this module no request is left and the server still works.
    wait_until(lambda: server.metrics()["ostinato_requests_running"] == 0)
    reply = HTTP.post(server.url + COMPLETIONS, json={"prompt": "Hi", "max_tokens": 1})
    assert reply.status_code == 200
    assert num_faults() == before


def refuse(
    server: ServerProcess,
    path: str,
    body: bytes | dict,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
) -> dict:
    """Sends `body` and checks that the answer is the OpenAI error object with these values."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = HTTP.post(
        server.url + path, content=data, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert list(response.json()) == ["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert param.partition("[")[0] in error["message"]
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
class TestEveryBody:
    @pytest.mark.parametrize("body", [b"{", b"", b"nonsense", b'{"a": 1,}', b"{} {}"])
    def test_invalid_json(self, server, path, body):
        refuse(server, path, body, code="invalid_json")

    def test_non_utf8(self, server, path):
        refuse(server, path, b'{"prompt": "\xff\xfe"}', code="invalid_json")
        refuse(server, path, '{"prompt": "Hi"}'.encode("utf-16"), code="invalid_json")

    @pytest.mark.parametrize("body", [b"[]", b"null", b"3"])
    def test_not_an_object(self, server, path, body):
        refuse(server, path, body, code="invalid_value")

    def test_10_mb(self, server, path):
        body = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
        refuse(server, path, body, status=413, code="body_too_large")

    def test_unknown_field(self, server, path):
        refuse(server, path, {"nonsense": 1}, param="nonsense", code="unknown_parameter")


class TestModel:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (CHAT, {"messages": HI}),
            (COMPLETIONS, {"prompt": "Hi"}),
            ("/tokenize", {"prompt": "Hi"}),
            ("/detokenize", {"tokens": [1]}),
        ],
    )
    def test_unknown(self, server, path, body):
        body = {**body, "model": "gpt-9"}
        refuse(server, path, body, status=404, param="model", code="model_not_found")


class TestNumbers:
    def places(self) -> list[Place]:
        found = [place for one in ENDPOINTS for place in places(one)]
        names = [place.name for place in found if place.endpoint.path == CHAT]
        assert {"truncate_prompt_tokens", "logit_bias.key", "stop_token_ids[0]"} < set(names)
        return found

    def test_of_any_size_in_every_field(self, server):
        check_numbers(server.url, self.places(), max_examples=100)

    @pytest.mark.slow
    def test_many(self, server):
        check_numbers(server.url, self.places(), max_examples=4000)

    def test_without_a_limit_of_tokens(self, server):
        for number in (10**30, 2**63, 513):
            body = {"messages": HI, "min_tokens": number}
            refuse(server, CHAT, body, param="min_tokens", code="invalid_value")

    @pytest.mark.parametrize("number", ["1e400", "9" * 5000])
    def test_what_python_does_not_hold(self, server, number):
        body = b'{"prompt": "Hi", "seed": ' + number.encode() + b"}"
        error = refuse(server, COMPLETIONS, body, code="invalid_value")
        assert "out of range" in error["message"]


class TestTypesAndRanges:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", 2.5),
            ("temperature", -1),
            ("temperature", "hot"),
            ("temperature", [1]),
            ("top_p", 0),
            ("top_p", 1.5),
            ("top_k", -2),
            ("top_k", 10**20),
            ("min_p", 2),
            ("n", 0),
            ("n", 10**9),
            ("n", 1.5),
            ("max_tokens", 0),
            ("max_tokens", -5),
            ("max_tokens", "many"),
            ("max_tokens", 10**12),
            ("max_tokens", 512),
            ("min_tokens", -1),
            ("presence_penalty", 3),
            ("frequency_penalty", -3),
            ("repetition_penalty", 0),
            ("seed", 10**30),
            ("seed", "x"),
            ("stop", ["a"] * 17),
            ("stop", ""),
            ("stop", {"a": 1}),
            ("stop_token_ids", [10**9]),
            ("stop_token_ids", [-1]),
            ("logit_bias", {"1": 1000}),
            ("logit_bias", {"99999999": 1}),
            ("logit_bias", {"word": 1}),
            ("logit_bias", [1]),
            ("stream", "yes"),
            ("stream_options", {"include_usage": True}),
            ("user", 5),
            ("priority", 10**20),
            ("request_id", "two words"),
        ],
    )
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_a_wrong_value(self, server, path, field, value):
        body = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
        refuse(server, path, {**body, field: value}, param=field)

    def test_too_large_max_tokens_says_how_many_fit(self, server):
        error = refuse(
            server,
            CHAT,
            {"messages": HI, "max_completion_tokens": 600},
            param="max_completion_tokens",
            code="context_length_exceeded",
        )
        assert "512" in error["message"]

    @pytest.mark.parametrize("value", [True, "3", -1, 21])
    def test_logprobs_of_completions(self, server, value):
        refuse(server, COMPLETIONS, {"prompt": "Hi", "logprobs": value}, param="logprobs")

    def test_top_logprobs_of_chat(self, server):
        body = {"messages": HI, "logprobs": True, "top_logprobs": 21}
        refuse(server, CHAT, body, param="top_logprobs")
        refuse(server, CHAT, {"messages": HI, "top_logprobs": 2}, param="top_logprobs")


class TestMessages:
    def test_missing(self, server):
        refuse(server, CHAT, {}, param="messages", code="missing_field")

    def test_empty(self, server):
        refuse(server, CHAT, {"messages": []}, param="messages")

    @pytest.mark.parametrize(
        ("message", "param"),
        [
            ({"role": "user"}, "messages[0].content"),
            ({"content": "Hi"}, "messages[0].role"),
            ({"role": "", "content": "Hi"}, "messages[0].role"),
            ({"role": "user", "content": 5}, "messages[0].content"),
            ({"role": "user", "content": None}, "messages[0].content"),
            ({"role": "user", "content": "Hi", "audio": {"id": "a"}}, "messages[0].audio"),
            ("Hi", "messages[0]"),
        ],
    )
    def test_a_wrong_message(self, server, message, param):
        refuse(server, CHAT, {"messages": [message]}, param=param)

    def test_an_image_for_a_model_without_a_tower(self, server):
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        error = refuse(server, CHAT, body, param="messages", code="unsupported_parameter")
        assert "text only" in error["message"]

    def test_audio_for_a_model_without_an_encoder(self, server):
        part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        error = refuse(server, CHAT, body, param="messages", code="unsupported_parameter")
        assert "takes no sounds; send text only" in error["message"]

    @pytest.mark.parametrize("kind", ["file", "video"])
    def test_an_unsupported_content_part(self, server, kind):
        part = {"type": kind, kind: {"url": "data:image/png;base64,"}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        error = refuse(server, CHAT, body, param="messages[0].content[0].type")
        assert f"Invalid value '{kind}'" in error["message"]

    def test_longer_than_the_context(self, server):
        body = {"messages": [{"role": "user", "content": "a list of words " * 400}]}
        refuse(server, CHAT, body, param="messages", code="context_length_exceeded")

    def test_a_prediction_without_drafts(self, server):
        body = {"messages": HI, "prediction": {"type": "content", "content": "Hello"}}
        error = refuse(server, CHAT, body, param="prediction", code="unsupported_parameter")
        assert error["message"] == (
            "prediction needs drafts, and this server has none: start it with "
            "speculation.method=auto"
        )

    @pytest.mark.parametrize(
        "prediction", ["text", {}, {"type": "x", "content": "a"}, {"content": 1}]
    )
    def test_a_wrong_prediction(self, server, prediction):
        body = {"messages": HI, "prediction": prediction}
        response = HTTP.post(server.url + CHAT, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("prediction")

    @pytest.mark.parametrize("field", ["audio", "functions"])
    def test_what_this_server_can_not_do(self, server, field):
        body = {"messages": HI, field: {"type": "something"}}
        refuse(server, CHAT, body, param=field, code="unsupported_parameter")


class TestPrompts:
    @pytest.mark.parametrize(
        "prompt",
        [None, 5, {}, [], [[]], ["a", 1], [1.5], [[1], "a"], [10**9], [-1], [10**30], "", [True]],
        ids=str,
    )
    def test_a_wrong_prompt(self, server, prompt):
        error = refuse_any_param(server, {"prompt": prompt, "add_special_tokens": False})
        assert error["param"].startswith("prompt")

    def test_longer_than_the_context(self, server):
        body = {"prompt": "a list of words " * 400}
        refuse(server, COMPLETIONS, body, param="prompt", code="context_length_exceeded")

    def test_megabytes_of_prompt(self, server):
        body = {"prompt": "a list of words " * 200_000}
        refuse(server, COMPLETIONS, body, param="prompt", code="context_length_exceeded")

    def test_one_of_many_is_too_long(self, server):
        body = {"prompt": [[1], [1] * 600]}
        refuse(server, COMPLETIONS, body, param="prompt", code="context_length_exceeded")

    def test_too_many(self, server):
        refuse(server, COMPLETIONS, {"prompt": [[1]] * 5000}, param="prompt")

    def test_a_lone_surrogate(self, server):
        refuse(server, COMPLETIONS, b'{"prompt": "\\ud83d"}', code="invalid_json")

    def test_what_this_server_can_not_do(self, server):
        body = {"prompt": "Hi", "suffix": "end"}
        refuse(server, COMPLETIONS, body, param="suffix", code="unsupported_parameter")

    def test_token_ids_to_text(self, server):
        refuse(server, "/detokenize", {"tokens": [10**9]}, param="tokens")
        refuse(server, "/detokenize", {"tokens": ["a"]}, param="tokens[0]")
        refuse(server, "/tokenize", {}, param="prompt")


def refuse_any_param(server: ServerProcess, body: dict) -> dict:
    response = HTTP.post(server.url + COMPLETIONS, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


class TestHttp:
    def test_no_such_path(self, server):
        response = HTTP.get(server.url + "/v1/nothing")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
    def test_wrong_method(self, server, method, path):
        response = HTTP.request(method, server.url + path)
        assert response.status_code == 405
        assert response.json()["error"]["code"] == "method_not_allowed"

    def test_wrong_content_type(self, server):
        response = HTTP.post(server.url + CHAT, data={"messages": "Hi"})
        assert response.status_code == 415
        assert "application/json" in response.json()["error"]["message"]

    def test_a_body_that_never_comes(self, server):
        """A client announces a body and disconnects. The server still answers other requests."""
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
        assert HTTP.get(server.url + "/health").status_code == 200

    def test_a_large_body_in_chunks_without_a_length(self, server):
        def chunks():
            for _ in range(100):
                yield b"a" * 100_000

        response = HTTP.post(
            server.url + COMPLETIONS,
            content=chunks(),
            headers={"Content-Type": "application/json"},
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


def raw(server: ServerProcess, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to these bytes."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            status = int(answer.readline().split()[1])
            headers: dict[str, str] = {}
            while line := answer.readline().strip():
                name, _, value = line.decode("latin-1").partition(": ")
                headers[name.lower()] = value
            return status, headers, answer.read(int(headers["content-length"]))


class TestRequestIds:
    """Each answer has a request id, which comes from the request or from the server."""

    @pytest.mark.parametrize(
        ("method", "path", "body", "status"),
        [
            ("GET", "/health", None, 200),
            ("GET", "/metrics", None, 200),
            ("GET", "/schema", None, 200),
            ("GET", "/", None, 200),
            ("HEAD", "/nothing", None, 404),
            ("OPTIONS", CHAT, None, 204),
            ("PUT", CHAT, None, 405),
            ("GET", "/v1/nothing", None, 404),
            ("GET", "/page/nothing.js", None, 404),
            ("GET", "/v1/responses/none", None, 404),
            ("POST", CHAT, b"{", 400),
            ("POST", "/v1/messages", b"{", 400),
            ("POST", COMPLETIONS, b'{"prompt": "a", "model": "b"}', 404),
            ("POST", COMPLETIONS, b'"' + b"a" * 5_000_000 + b'"', 413),
            ("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 1}', 200),
            ("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "stream": true}', 200),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_every_answer_has_one(self, server, method, path, body, status):
        names = set()
        for sent in ({}, {}, {"X-Request-Id": "mine"}, {"X-Request-Id": "x" * 129}):
            headers = {"Content-Type": "application/json", **sent}
            reply = HTTP.request(method, server.url + path, content=body, headers=headers)
            if len(sent.get("X-Request-Id", "")) <= 128:  # some routes refuse a longer id
                assert reply.status_code == status
            (name,) = reply.headers.get_list("x-request-id")
            names.add(name)
            if path == "/v1/messages":
                assert reply.headers["request-id"] == reply.json()["request_id"] == name
        assert len(names) == 4
        assert "mine" in names
        assert all(len(name) == 32 for name in names - {"mine"})

    @pytest.mark.parametrize(
        "request_bytes",
        [
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",  # a TLS handshake
        ],
    )
    def test_what_is_not_http(self, server, request_bytes):
        status, headers, body = raw(server, request_bytes)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert len(headers["x-request-id"]) == 32

    def test_a_request_for_a_web_socket(self, server):
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        keys = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        status, headers, _ = raw(
            server, b"GET /v1/responses HTTP/1.1\r\nHost: x\r\n" + upgrade + keys + b"\r\n"
        )
        assert status == 405
        assert len(headers["x-request-id"]) == 32
