"""The application over a scripted engine: endpoints, errors, request ids."""

from __future__ import annotations

import re

import pytest

import ostinato
from ostinato.api.base.unsupported_endpoints import hint_for
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.errors import EngineDeadError
from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.outputs import FinishReason
from tests.api.answers import error_of, events
from tests.api.fake_client import HELLO, scripted


def test_no_plugins_for_types_that_no_handler_uses(app):
    modules = {type(plugin).__module__ for plugin in app.http.app.plugins}
    assert any("msgspec" in name for name in modules)
    assert not any(word in name for name in modules for word in ("pydantic", "attrs"))


class TestOtherEndpoints:
    def test_models(self, app):
        card = {
            "id": "test-model",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "ostinato",
            "root": "test-model",
            "parent": None,
            "max_model_len": 64,
        }
        assert app.http.get("/v1/models").json() == {"object": "list", "data": [card]}
        assert app.http.get("/v1/models/test-model").json() == card
        response = app.http.get("/v1/models/org/other")
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"

    def test_a_model_whose_name_has_a_slash(self, make_app):
        app = make_app(name="org/model")
        assert app.http.get("/v1/models/org/model").json()["id"] == "org/model"

    def test_tokenize_and_back(self, app):
        body = app.http.post(
            "/tokenize", json={"prompt": "hello", "return_token_strs": True}
        ).json()
        assert body["count"] == len(body["tokens"])
        assert body["max_model_len"] == 64
        assert "".join(body["token_strs"]) == "hello"
        back = app.http.post("/detokenize", json={"tokens": body["tokens"]})
        assert back.json() == {"prompt": "hello"}

    def test_tokenize_messages(self, app):
        messages = [{"role": "user", "content": "Hi"}]
        body = app.http.post("/tokenize", json={"messages": messages}).json()
        app.chat(messages=messages)
        assert body["tokens"] == app.engine.requests[0][0]
        assert "token_strs" in body

    def test_version(self, app):
        app.engine.stats = EngineStats(layers_by_program={"captured": 8, "fx": 0})
        assert app.http.get("/version").json() == {
            "version": ostinato.__version__,
            "layers": {"captured": 8, "fx": 0},
            "isa": "",
            "isa_microseconds": {},
            "determinism": "bitwise",
            "system_fingerprint": "fp-bitwise-test",
            "ranks": [],
        }

    def test_openapi_tells_of_the_bodies(self, app):
        document = app.http.get("/schema/openapi.json").json()
        operation = document["paths"]["/v1/chat/completions"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert "messages" in schema["required"]
        node = document
        for key in schema["properties"]["messages"]["items"]["$ref"].split("/")[1:]:
            node = node[key.replace("~1", "/")]
        assert node["title"] == "Message"


class TestErrors:
    def test_no_such_path(self, app):
        response = app.http.get("/v1/nothing")
        assert response.status_code == 404
        assert error_of(response)["message"].startswith("there is no GET /v1/nothing")

    def test_wrong_method(self, app):
        response = app.http.get("/v1/completions")
        assert response.status_code == 405
        assert "POST" in response.headers["allow"]
        assert error_of(response)["code"] == "method_not_allowed"

    @pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
    def test_wrong_content_type(self, app, content_type):
        response = app.http.post(
            "/v1/completions", content=b"{}", headers={"content-type": content_type}
        )
        assert response.status_code == 415
        assert "application/json" in error_of(response)["message"]

    def test_a_charset_is_fine(self, app):
        response = app.http.post(
            "/v1/completions",
            content=b'{"prompt": "Hi"}',
            headers={"content-type": "application/json; charset=utf-8"},
        )
        assert response.status_code == 200

    def test_a_large_body(self, make_app):
        app = make_app(server=ServerConfig(max_body_mib=1 / 128))
        empty = b'{"prompt": "Hi", "user": ""}'
        body = empty[:-2] + b"u" * (8192 - len(empty)) + b'"}'
        assert app.http.post("/v1/completions", content=body).status_code == 200
        response = app.http.post("/v1/completions", content=body + b" ")
        assert response.status_code == 413
        error = error_of(response)
        assert (error["code"], error["type"]) == ("body_too_large", "invalid_request_error")
        assert "server.max_body_mib=0.0078125" in error["message"]

    def test_unknown_model(self, app):
        response = app.complete(model="gpt-9")
        assert response.status_code == 404
        assert error_of(response)["param"] == "model"

    def test_the_engine_gives_a_request_up(self, make_app):
        failing = scripted("", [], finish_reason=FinishReason.error, error="it broke")
        response = make_app([failing]).chat()
        assert response.status_code == 500
        assert error_of(response) == {
            "message": "it broke",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }

    def test_the_engine_dies(self, make_app):
        response = make_app([HELLO[0], EngineDeadError("the engine ended: killed")]).chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_dead"

    def test_in_a_stream_it_is_the_last_event(self, make_app):
        app = make_app([HELLO[0], EngineDeadError("the engine ended: killed")])
        *chunks, last = events(app.chat(stream=True).text)
        assert len(chunks) == 2
        assert last["error"]["code"] == "engine_dead"

    def test_an_aborted_request(self, make_app):
        app = make_app([scripted("", [], finish_reason=FinishReason.abort)])
        response = app.chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "aborted"

    def test_a_bug_is_a_500_that_tells_nothing(self, make_app, caplog):
        response = make_app([KeyError("secret")]).chat()
        assert response.status_code == 500
        assert "secret" not in response.text
        assert error_of(response)["code"] == "internal_error"
        assert "secret" in caplog.text


class TestTheRequestsName:
    def test_from_the_header(self, app, caplog):
        name = "0af76519-16cd"
        headers = {"x-request-id": name}
        bodies = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
            "/v1/completions": {"prompt": "Hi"},
        }
        for path, body in bodies.items():
            reply = app.http.post(path, json=body, headers=headers)
            assert reply.json()["id"].endswith(f"-{name}")
            assert reply.headers["x-request-id"] == name
            stream = app.http.post(path, json={**body, "stream": True}, headers=headers)
            assert f"-{name}" in stream.text.partition("\n")[0]
            assert stream.headers["x-request-id"] == name
            named = app.http.post(path, json={**body, "request_id": "mine"}, headers=headers)
            assert named.json()["id"].endswith("-mine")  # the id in the body wins over the header
            assert named.headers["x-request-id"] == name

    def test_comes_back_with_refusals(self, app):
        headers = {"x-request-id": "me"}
        for reply in (
            app.http.post("/v1/completions", json={"prompt": 1}, headers=headers),
            app.http.get("/no/such/path", headers=headers),
            app.http.get("/health", headers=headers),
        ):
            assert reply.headers["x-request-id"] == "me"

    def test_a_request_without_one_is_named_by_the_server(self, app):
        reply = app.http.post("/v1/completions", json={"prompt": "Hi"})
        name = reply.headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", name)
        assert reply.json()["id"] == f"cmpl-{name}"
        names = {app.http.get("/health").headers["x-request-id"] for _ in range(3)}
        assert len(names | {name}) == 4

    def test_an_invalid_one_is_refused(self, app):
        reply = app.http.post(
            "/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": "a b"}
        )
        assert (reply.status_code, error_of(reply)["param"]) == (400, "x-request-id")
        assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])

    def test_a_log_line_has_it_beside_an_id_of_its_own(self, app, caplog):
        with caplog.at_level("INFO", logger="ostinato.requests"):
            reply = app.http.post("/v1/responses", json={"input": "Hi"})
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("resp_")
        assert f" x_request_id={reply.headers['x-request-id']}" in line


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/pooling", "use /v1/embeddings"),
        ("/v1/files", "use `run batch`"),
        ("/v1/audio/speech", "it needs text-to-speech models"),
        ("/sleep", "it needs models that can be unloaded while the server runs"),
        ("/what", "GET /schema lists the endpoints"),
    ],
)
def test_endpoints_of_other_servers_are_refused_by_name(app, path, said):
    reply = app.http.post(path, json={})
    assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")
    assert said in error_of(reply)["message"]


def test_no_endpoint_that_is_there_is_called_missing(app):
    paths = app.http.get("/schema/openapi.json").json()["paths"]
    assert [path for path in paths if hint_for(path)] == []
