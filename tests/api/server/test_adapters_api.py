"""Adapters over HTTP with a scripted engine: load, unload, list, and name them in requests."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from ostinato.api.preparation.generation import check_model
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.outputs import FinishReason
from tests.api.adapter_apps import adapter_apps, load, unload, wait_until_released
from tests.api.answers import error_of, events
from tests.api.fake_client import scripted

HI = [{"role": "user", "content": "Hi"}]
DONE = scripted("Hel", [5], finish_reason=FinishReason.stop)
# Requests of every dialect that the engine computes.
COMPUTED = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "the"},
    "/v1/rerank": {"query": "Hi", "documents": ["the", "a"]},
    "/invocations": {"messages": HI},
}
# Requests that the API process answers by itself.
TEXT_ONLY = {
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "Hi"},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.fixture
def make(make_app):
    return adapter_apps(make_app)


@pytest.fixture
def app(make):
    return make()


class TestLoadAndUnload:
    def test_they_answer_as_vllm_does(self, app):
        answer = load(app)
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'sql' added successfully.",
        )
        assert answer.headers["content-type"].startswith("text/plain")
        assert app.engine.adapters.get("sql").path == "sql"
        assert error_of(unload(app, lora_int_id=7))["param"] == "lora_int_id"
        answer = unload(app)
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'sql' removed successfully.",
        )
        assert app.engine.adapters.served == []

    def test_in_place(self, app):
        load(app)
        assert error_of(load(app))["param"] == "lora_name"
        assert load(app, load_inplace=True).status_code == 200
        assert app.engine.adapters.count == 2

    def test_one_log_line_each(self, app, caplog):
        with caplog.at_level(logging.INFO, logger="ostinato.api"):
            load(app, path="some/sql")
            unload(app)
        lines = [one.getMessage() for one in caplog.records if one.name == "ostinato.api"]
        loaded, unloaded = lines
        assert re.match(r"adapter 'sql' is loaded: some/sql, slot 0, \d+\.\d+ s", loaded)
        assert re.match(r"adapter 'sql' is unloaded: some/sql, slot 0, \d+\.\d+ s", unloaded)

    def test_what_the_engine_refuses(self, app):
        app.engine.loading_error = InvalidRequestError("adapter_config.json: r=99", code="broken")
        answer = load(app)
        assert answer.status_code == 400
        assert error_of(answer)["message"] == "adapter_config.json: r=99"
        assert app.chat().status_code == 200
        assert unload(app).status_code == 404

    @pytest.mark.parametrize("call", [load, unload])
    def test_they_are_off_by_default(self, make, call):
        answer = call(make(runtime=False))
        assert answer.status_code == 403
        error = error_of(answer)
        assert error["code"] == "call_refused"
        assert error["message"].startswith("lora.allow_runtime_loading=false: start the server")

    @pytest.mark.parametrize("call", [load, unload])
    def test_they_need_a_key_if_the_server_has_keys(self, make, call):
        app = make(server=ServerConfig(api_keys=["secret"]))
        assert error_of(call(app))["code"] == "invalid_api_key"
        app.http.headers["Authorization"] = "Bearer secret"
        assert load(app).status_code == 200
        assert unload(app).status_code == 200

    @pytest.mark.parametrize("call", [load, unload])
    def test_they_wait_for_the_model(self, make, call):
        app = make()
        app.service.admission.phase = "loading"
        assert call(app).status_code == 503

    @pytest.mark.parametrize(
        ("body", "param", "code"),
        [
            ({"lora_path": "sql"}, "lora_name", "missing_field"),
            ({"lora_name": "sql"}, "lora_path", "missing_field"),
            ({"lora_name": 5, "lora_path": "sql"}, "lora_name", "invalid_value"),
            ({"lora_name": "a", "lora_path": "sql", "rank": 5}, "rank", "unknown_parameter"),
            ({"lora_name": "a", "lora_path": "sql", "load_inplace": 1}, "load_inplace", None),
        ],
    )
    def test_bodies_that_are_refused(self, app, body, param, code):
        answer = app.http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400
        error = error_of(answer)
        assert (error["param"], error["code"]) == (param, code or "invalid_value")

    @pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
    def test_a_body_that_is_not_json(self, app, path):
        assert app.http.post(path, content=b"{").status_code == 400
        wrong = app.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert wrong.status_code == 415


class TestModels:
    def test_adapters_come_after_the_model_in_the_order_of_loading(self, app):
        load(app, "sql")
        load(app, "org/chat")
        base, sql, chat = app.http.get("/v1/models").json()["data"]
        assert (base["id"], base["parent"], base["root"]) == ("test-model", None, "test-model")
        assert sql == {
            "id": "sql",
            "object": "model",
            "created": 1_700_000_001,
            "owned_by": "ostinato",
            "root": "sql",
            "parent": "test-model",
            "max_model_len": 8000,
        }
        assert app.http.get("/v1/models/org/chat").json() == chat
        unload(app, "sql")
        assert [one["id"] for one in app.http.get("/v1/models").json()["data"]] == [
            "test-model",
            "org/chat",
        ]
        assert error_of(app.http.get("/v1/models/sql"))["code"] == "model_not_found"


class TestRequests:
    @pytest.mark.parametrize("path", COMPUTED)
    def test_name_an_adapter(self, make, path):
        app = make([DONE])
        adapter = app.engine.adapters.add("sql")
        answer = app.http.post(path, json={**COMPUTED[path], "model": "sql"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "sql"
        assert set(app.engine.used) == {adapter}
        wait_until_released(app)

    @pytest.mark.parametrize("path", COMPUTED)
    @pytest.mark.parametrize("fields", [{}, {"model": "test-model"}])
    def test_name_the_model(self, make, path, fields):
        app = make([DONE])
        app.engine.adapters.add("sql")
        answer = app.http.post(path, json=COMPUTED[path] | fields)
        assert answer.json()["model"] == "test-model"
        assert set(app.engine.used) == {None}

    @pytest.mark.parametrize("path", TEXT_ONLY)
    def test_that_the_engine_does_not_see(self, app, path):
        app.engine.adapters.add("sql")
        plain = app.http.post(path, json=TEXT_ONLY[path])
        answer = app.http.post(path, json={**TEXT_ONLY[path], "model": "sql"})
        assert (answer.status_code, answer.text) == (200, plain.text)

    def test_large_bodies(self, make):
        """They are prepared in another process, which was started before the adapter was loaded."""
        app = make([DONE])

        def post(path: str, name: str) -> Any:
            body = json.dumps({**(COMPUTED | TEXT_ONLY)[path], "model": name})
            return app.http.post(path, content=body + " " * 6000)

        assert post("/tokenize", "sql").status_code == 404
        adapter = app.engine.adapters.add("sql")
        for path in COMPUTED:
            answer = post(path, "sql")
            assert (answer.status_code, answer.json().get("model")) == (200, "sql"), path
        assert set(app.engine.used) == {adapter}
        wait_until_released(app)
        assert [path for path in TEXT_ONLY if post(path, "sql").status_code != 200] == []
        for path in (*COMPUTED, *TEXT_ONLY):
            answer = post(path, "gpt")
            assert answer.status_code == 404, path
            assert "the adapters 'sql'" in answer.json()["error"]["message"]

    @pytest.mark.parametrize("path", STREAMED)
    def test_streams_name_it_in_every_event(self, app, path):
        adapter = app.engine.adapters.add("sql")
        answer = app.http.post(path, json={**COMPUTED[path], "model": "sql", "stream": True})
        assert answer.status_code == 200
        assert '"model":"sql"' in answer.text
        assert '"model":"test-model"' not in answer.text
        assert app.engine.used == [adapter]
        wait_until_released(app)

    def test_a_stream_with_usage(self, app):
        app.engine.adapters.add("sql")
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = app.chat(model="sql", stream=True, stream_options=options, n=2)
        *chunks, done = events(answer.text)
        assert done == "[DONE]"
        assert {chunk["model"] for chunk in chunks} == {"sql"}
        assert chunks[-1]["usage"]["completion_tokens"] == 6

    @pytest.mark.parametrize(
        "fields",
        [
            {"n": 3},
            {"best_of": 3},
            {"prompt": ["Hi", "the"]},
            {"prompt": ["Hi", "the"], "stream": True},
            {"echo": True, "logprobs": 1},
            {"prompt_logprobs": 1},
            {"use_beam_search": True, "n": 2, "best_of": 2, "temperature": 0},
            {"structured_outputs": {"regex": "a"}},
        ],
    )
    def test_every_prompt_of_a_request_has_the_adapter(self, app, fields):
        adapter = app.engine.adapters.add("sql")
        answer = app.complete(model="sql", **fields)
        assert answer.status_code == 200, answer.text
        assert set(app.engine.used) == {adapter}
        wait_until_released(app)

    @pytest.mark.parametrize("path", [*COMPUTED, *TEXT_ONLY])
    def test_an_unknown_name_is_a_404(self, make, path):
        app = make([DONE])
        app.engine.adapters.add("sql")
        answer = app.http.post(path, json={**(COMPUTED | TEXT_ONLY)[path], "model": "gpt"})
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message == (
            "the model 'gpt' does not exist; this server has 'test-model' and the adapters 'sql'"
        )
        assert app.engine.used == []

    def test_the_404_lists_few_adapters_and_shortens_their_names(self, make):
        app = make(slots=20)
        for number in range(9):
            app.engine.adapters.add(str(number) * 200)
        message = error_of(app.chat(model="gpt"))["message"]
        assert message.endswith(f"'{'3' * 80}', '{'4' * 80}' and 4 more")
        assert len(message) < 600

    def test_an_unloaded_name_is_a_404(self, app):
        load(app)
        assert app.chat(model="sql").status_code == 200
        unload(app)
        answer = app.chat(model="sql")
        assert answer.status_code == 404
        assert error_of(answer) == {
            "message": "the model 'sql' does not exist; this server has 'test-model'",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }

    def test_a_server_without_slots_has_no_adapters(self, make_app):
        app = make_app()
        app.engine.adapters.add("sql")
        assert app.chat(model="sql").status_code == 404
        assert app.chat().status_code == 200

    def test_each_adapter_has_a_fingerprint(self, app):
        app.engine.adapters.add("sql")
        app.engine.adapters.add("chat")
        found = [app.chat(model=name).json()["system_fingerprint"] for name in ("sql", "chat")]
        assert found == ["fp-bitwise-test-000000000000", "fp-bitwise-test-000000000001"]
        assert app.chat().json()["system_fingerprint"] == "fp-bitwise-test"

    def test_a_stored_conversation_goes_on_with_another_model(self, app):
        adapter = app.engine.adapters.add("sql")
        first = app.http.post("/v1/responses", json={"input": "Hi", "model": "sql"}).json()
        fields = {"input": "the", "previous_response_id": first["id"]}
        second = app.http.post("/v1/responses", json=fields | {"model": "sql"}).json()
        third = app.http.post("/v1/responses", json=fields).json()
        assert [one["model"] for one in (first, second, third)] == ["sql", "sql", "test-model"]
        assert app.engine.used == [adapter, adapter, None]
        assert app.engine.requests[1][0] == app.engine.requests[2][0]
        assert app.http.get(f"/v1/responses/{first['id']}").json()["model"] == "sql"

    def test_the_log_line_has_the_name(self, app, caplog):
        app.engine.adapters.add("sql")
        with caplog.at_level(logging.INFO, logger="ostinato.requests"):
            app.chat(model="sql")
            app.chat()
        assert [("adapter=sql" in one.getMessage()) for one in caplog.records] == [True, False]


def test_check_model_accepts_adapters(make_app):
    model = make_app().engine.model
    check_model("sql", model, ("chat", "sql"))
    with pytest.raises(InvalidRequestError, match="'test-model' and the adapters 'chat'"):
        check_model("sql", model, ("chat",))
