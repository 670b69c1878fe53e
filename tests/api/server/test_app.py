"""The application over a scripted engine: endpoints, errors, aborts, figures."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import ostinato
from ostinato.api.base.unsupported_endpoints import hint_for
from ostinato.api.server.app import create_app
from ostinato.conf.schema import SamplingSection
from ostinato.conf.server_schema import ServerConfig
from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.errors import EngineDeadError
from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.outputs import FinishReason
from tests.api.fake_client import HELLO, scripted


def error_of(response) -> dict:
    assert response.headers["content-type"] == "application/json"
    (name, error), *others = response.json().items()
    assert (name, others) == ("error", [])
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


def events(text: str) -> list[Any]:
    """The data of each event; the last is usually "[DONE]"."""
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [json.loads(one) if one.startswith("{") else one for one in data]


class TestChat:
    def test_whole(self, app):
        response = app.chat(request_id="me")
        assert response.status_code == 200
        body = response.json()
        assert body["id"] == "chatcmpl-me"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        prompt, *_ = app.engine.requests[0]
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 3,
            "total_tokens": len(prompt) + 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert app.engine.tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|begin|>user\nHi<|end|><|begin|>assistant\n"
        )

    def test_stream_exact_bytes(self, app, monkeypatch):
        monkeypatch.setattr("time.time", lambda: 1_700_000_123.9)
        response = app.chat(request_id="me", stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        start = (
            b'data: {"id":"chatcmpl-me","object":"chat.completion.chunk","created":1700000123,'
            b'"model":"test-model","choices":[{"index":0,"delta":'
        )
        assert response.content == b"".join(
            [
                start,
                b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n',
                start,
                b'{"content":"Hel"},"logprobs":null,"finish_reason":null}]}\n\n',
                start,
                b'{"content":"lo"},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
                b"\n\n",
                b"data: [DONE]\n\n",
            ]
        )

    def test_usage_at_the_end_of_a_stream(self, app):
        *chunks, last, done = events(
            app.chat(stream=True, stream_options={"include_usage": True}).text
        )
        assert done == "[DONE]"
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
        assert [chunk["usage"] for chunk in chunks] == [None] * 3

    def test_usage_in_every_chunk(self, app):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last, _ = events(app.chat(stream=True, stream_options=options, n=2).text)
        counts: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
            counts[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
        # Each completion for itself, and nothing of it in the chunk with the role.
        assert counts == {0: [0, 1, 3], 1: [0, 1, 3]}
        assert last["usage"]["completion_tokens"] == 6

    def test_continuous_usage_needs_include_usage(self, app):
        options = {"continuous_usage_stats": True}
        *chunks, _ = events(app.chat(stream=True, stream_options=options).text)
        assert [chunk for chunk in chunks if "usage" in chunk] == []

    def test_several_completions(self, app):
        body = app.chat(n=3).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 9
        *chunks, _ = events(app.chat(n=2, stream=True).text)
        texts = {0: "", 1: ""}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == {0: "Hello", 1: "Hello"}

    def test_continuing_the_last_message(self, app):
        messages = [{"role": "assistant", "content": "Once"}]
        app.chat(messages=messages, continue_final_message=True)
        prompt, *_ = app.engine.requests[0]
        assert app.engine.tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|begin|>assistant\nOnce"
        )

    def test_variables_and_names_reach_the_template(self, app):
        app.chat(
            messages=[{"role": "user", "name": "Ada", "content": "Hi"}],
            chat_template_kwargs={"prefix": "So"},
        )
        prompt, *_ = app.engine.requests[0]
        assert app.engine.tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|begin|>user Ada\nHi<|end|><|begin|>assistant\nSo"
        )

    @pytest.mark.parametrize("label", ["user", "safety_identifier", "prompt_cache_key"])
    def test_labels_change_nothing(self, app, label):
        app.chat(**{label: "someone"})
        app.chat()
        assert app.engine.requests[0] == app.engine.requests[1]

    def test_documents_reach_a_template_that_shows_them(self, app):
        documents = [{"title": "One", "text": "fox"}, {"title": "Two", "text": "dog"}]
        template = "{% for one in documents %}{{ one.title }}: {{ one.text }} {% endfor %}"
        app.chat(documents=documents, chat_template=template)
        prompt, *_ = app.engine.requests[0]
        assert app.engine.tokenizer.decode(prompt).strip() == "One: fox Two: dog"
        error = error_of(app.chat(documents=documents))
        assert (error["param"], error["code"]) == ("documents", "unsupported_parameter")
        assert app.chat(documents=[]).status_code == 200

    def test_a_template_that_refuses(self, app):
        response = app.chat(messages=[{"role": "user", "content": "refuse me"}])
        assert response.status_code == 400
        assert error_of(response)["param"] == "messages"

    def test_a_model_without_a_tokenizer(self, make_app):
        response = make_app(tokenizer=None).chat()
        assert response.status_code == 400
        assert error_of(response)["code"] == "no_tokenizer"


class TestCompletions:
    def test_whole(self, app):
        body = app.complete(max_tokens=5, request_id="me").json()
        assert (body["id"], body["object"]) == ("cmpl-me", "text_completion")
        assert body["choices"] == [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]

    def test_token_ids_need_no_tokenizer(self, make_app):
        app = make_app(tokenizer=None)
        body = app.complete(prompt=[1, 2, 3], logprobs=1).json()
        assert app.engine.requests[0][0] == [1, 2, 3]
        tokens = body["choices"][0]["logprobs"]["tokens"]
        assert tokens == ["token_id:5", "token_id:6", "token_id:7"]

    def test_many_prompts(self, app):
        body = app.complete(prompt=["Hi", "the"], n=2).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert len(app.engine.requests) == 2
        *chunks, done = events(app.complete(prompt=[[1], [2], [3]], stream=True).text)
        texts = ["", "", ""]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert (texts, done) == (["Hello"] * 3, "[DONE]")

    def test_logprob_offsets_in_a_stream(self, app):
        *chunks, _ = events(app.complete(stream=True, logprobs=0).text)
        offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
        assert offsets == [[0], [1], [2]]

    def test_a_long_prompt_is_encoded_as_a_short_one(self, make_app):
        app = make_app(max_model_len=100_000)
        text = "the quick brown fox " * 500
        app.complete(prompt=text)
        assert app.engine.requests[0][0] == app.engine.tokenizer.encode(text)

    def test_special_tokens_can_be_left_out(self, app):
        app.complete(add_special_tokens=False, cache_salt="s", priority=4)
        assert app.engine.requests[0][2:] == (4, "s")

    def test_the_servers_default_of_max_tokens(self, make_app):
        app = make_app(sampling=SamplingSection(max_tokens=3))
        app.complete()
        assert app.engine.requests[0][1].max_tokens == 3

    def test_one_failing_prompt_ends_the_reply_and_aborts_the_others(self, make_app):
        failing = scripted("", [], finish_reason=FinishReason.error, error="it broke")
        response = make_app([failing]).complete(prompt=["Hi", "the"])
        assert response.status_code == 500
        assert error_of(response)["message"] == "it broke"


class TestOtherEndpoints:
    def test_models(self, app):
        card = {
            "id": "test-model",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "ostinato",
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


class TestHealth:
    def test_well(self, app):
        assert app.http.get("/health").json() == {"status": "ok"}
        assert app.http.get("/ready").json() == {"status": "ready"}

    def test_starting(self, app):
        app.service.admission.phase = "weights"
        for path in ("/health", "/ready"):
            response = app.http.get(path)
            assert response.status_code == 503
            assert response.json()["reason"] == "the engine is starting: weights"
        for response in (app.chat(), app.http.get("/v1/models")):
            assert response.status_code == 503
            assert error_of(response)["code"] == "starting"
            assert int(response.headers["retry-after"]) > 0

    def test_dead(self, app):
        app.engine.death_reason = "its process ended"
        assert app.http.get("/health").status_code == 503
        response = app.chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_dead"

    def test_restarting(self, app):
        app.engine.restart_reason = "its process died of SIGSEGV"
        for path, status in (("/health", "unhealthy"), ("/ready", "restarting")):
            response = app.http.get(path)
            assert (response.status_code, response.json()["status"]) == (503, status)
            assert "SIGSEGV" in response.json()["reason"]
        # It waits for the engine, which a script does not need.
        assert app.chat().status_code == 200

    def test_restarts_are_counted(self, app):
        app.engine.restarts = {"killed": 2}
        text = app.http.get("/metrics").text
        assert 'ostinato_engine_restarts_total{reason="killed"} 2.0' in text
        assert 'ostinato_engine_restarts_total{reason="hang"} 0.0' in text

    def test_ping_is_health(self, app):
        for age in (29.0, 31.0):
            app.engine.seconds_since_step = app.engine.seconds_overdue = age
            health, ping = app.http.get("/health"), app.http.get("/ping")
            assert (ping.status_code, ping.content) == (health.status_code, health.content)

    def test_frozen(self, app):
        app.engine.seconds_since_step = app.engine.seconds_overdue = 29.0
        for path in ("/health", "/live", "/ready"):
            assert app.http.get(path).status_code == 200
        app.engine.seconds_since_step = app.engine.seconds_overdue = 31.0
        for path, status in (("/health", "unhealthy"), ("/ready", "engine_silent")):
            response = app.http.get(path)
            assert (response.status_code, response.json()["status"]) == (503, status)
            assert "server.health_timeout_s=30" in response.json()["reason"]
        assert app.http.get("/live").status_code == 200  # no request waits for it
        app.engine.num_unfinished = 2
        response = app.http.get("/live")
        assert (response.status_code, response.json()["status"]) == (503, "stuck")
        assert "2 sequences wait" in response.json()["reason"]

    def test_a_long_step_is_no_hang(self, app):
        app.engine.seconds_since_step, app.engine.seconds_overdue = 300.0, 1.0
        app.engine.num_unfinished = 2
        for path in ("/health", "/live", "/ready"):
            assert app.http.get(path).status_code == 200

    def test_live_while_it_starts_and_restarts_but_not_when_dead(self, app):
        app.engine.num_unfinished = 2
        app.service.admission.phase = "weights"
        assert app.http.get("/live").status_code == 200
        app.service.admission.phase = None
        app.engine.restart_reason = "its process died of SIGSEGV"
        assert app.http.get("/live").status_code == 200
        app.engine.restart_reason = None
        app.engine.death_reason = "too many restarts"
        assert app.http.get("/live").status_code == 503

    def test_draining(self, app):
        app.service.admission.is_draining = True
        assert app.http.get("/health").status_code == 200
        assert app.http.get("/ready").json()["status"] == "shutting_down"
        response = app.complete()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert error_of(response)["code"] == "shutting_down"


async def asgi_post(app, path: str, body: dict, *, disconnect: asyncio.Event) -> list[dict]:
    """One POST by hand; the client is gone as soon as `disconnect` is set."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict] = []

    async def receive():
        if messages:
            return messages.pop()
        await disconnect.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if message.get("body"):
            disconnect.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "state": {},
        "extensions": {},
        "asgi": {"version": "3.0"},
    }
    await app(scope, receive, send)
    return sent


class TestDisconnect:
    def test_of_a_stream(self, make_app):
        app = make_app([HELLO[0], None])
        body = {"prompt": "Hi", "stream": True, "request_id": "me"}

        async def scenario() -> list[dict]:
            return await asyncio.wait_for(
                asgi_post(
                    create_app(app.service), "/v1/completions", body, disconnect=asyncio.Event()
                ),
                10,
            )

        sent = asyncio.run(scenario())
        assert b"Hel" in sent[1]["body"]
        assert app.engine.aborted == ["cmpl-me"]
        assert app.engine.num_unfinished == 0

    def test_of_a_reply_that_is_not_streamed(self, make_app):
        app = make_app([HELLO[0], None])
        body = {"prompt": [[1], [2]], "request_id": "me"}

        async def scenario() -> None:
            disconnect = asyncio.Event()
            asyncio.get_running_loop().call_later(0.05, disconnect.set)
            await asyncio.wait_for(
                asgi_post(create_app(app.service), "/v1/completions", body, disconnect=disconnect),
                10,
            )

        asyncio.run(scenario())
        assert sorted(app.engine.aborted) == ["cmpl-me-0", "cmpl-me-1"]


class TestMetrics:
    def samples(self, app) -> dict[str, float]:
        response = app.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            sample.name + json.dumps(sample.labels) * bool(sample.labels): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }

    def test_the_engines_snapshot(self, app):
        app.engine.stats = EngineStats(
            num_running=3,
            num_waiting=2,
            num_blocks=10,
            num_free_blocks=4,
            steps_by_kind={"captured": 7, "eager": 1},
            layers_by_program={"captured": 8},
            num_prompt_tokens=100,
            num_output_tokens=50,
            prefix_queries=40,
            prefix_hits=30,
            num_preemptions=1,
            late_compiles=[
                LateCompile("dynamo", "tokens=5,seqs=2", 2),
                LateCompile("c++", "idle", 1),
            ],
            step_seconds=1.5,
            model_seconds=1.25,
            device_seconds_by_kind={"captured": 1.125},
            host_gap_seconds=0.125,
            num_scheduled_tokens=60,
            num_padding_tokens=4,
            num_waiting_for_grammar=1,
            grammar_seconds=0.5,
            grammar_build_seconds=0.25,
            iteration_tokens=[0] * 3 + [2] + [0] * 11,
            num_evictions=5,
        )
        samples = self.samples(app)
        expected = {
            "ostinato_requests_running": 3,
            "ostinato_requests_waiting": 2,
            "ostinato_kv_cache_usage_ratio": 0.6,
            "ostinato_kv_cache_blocks": 10,
            "ostinato_engine_up": 1,
            "ostinato_engine_heartbeat_age_seconds": 0,
            "ostinato_prompt_tokens_total": 100,
            "ostinato_generation_tokens_total": 50,
            "ostinato_prefix_cache_queries_total": 40,
            "ostinato_prefix_cache_hits_total": 30,
            "ostinato_preemptions_total": 1,
            'ostinato_late_compiles_total{"shape": "tokens=5,seqs=2", "what": "dynamo"}': 2,
            'ostinato_late_compiles_total{"shape": "idle", "what": "c++"}': 1,
            'ostinato_late_compiles_total{"shape": "idle", "what": "dynamo"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "inductor"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "triton"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "flashinfer"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "cuda"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "build"}': 0,
            "ostinato_step_seconds_total": 1.5,
            "ostinato_model_seconds_total": 1.25,
            'ostinato_device_seconds_total{"kind": "captured"}': 1.125,
            'ostinato_device_seconds_total{"kind": "eager"}': 0,
            "ostinato_host_gap_seconds_total": 0.125,
            "ostinato_scheduled_tokens_total": 60,
            "ostinato_padding_tokens_total": 4,
            "ostinato_requests_waiting_for_grammar": 1,
            "ostinato_grammar_seconds_total": 0.5,
            "ostinato_grammar_build_seconds_total": 0.25,
            "ostinato_kv_cache_evictions_total": 5,
            'ostinato_iteration_tokens_bucket{"le": "4.0"}': 0,
            'ostinato_iteration_tokens_bucket{"le": "8.0"}': 2,
            'ostinato_iteration_tokens_bucket{"le": "+Inf"}': 2,
            "ostinato_iteration_tokens_sum": 60,
            'ostinato_steps_total{"kind": "captured"}': 7,
            'ostinato_steps_total{"kind": "compiled"}': 0,
            'ostinato_steps_total{"kind": "eager"}': 1,
            'ostinato_layers{"program": "captured"}': 8,
            'ostinato_layers{"program": "inductor"}': 0,
        }
        assert {name: samples[name] for name in expected} == expected

    def test_the_apis_own_timing(self, app):
        app.chat()
        app.complete(n=2, stream=True)
        samples = self.samples(app)
        expected = {
            "ostinato_time_to_first_token_seconds_count": 3,
            "ostinato_inter_token_latency_seconds_count": 6,
            "ostinato_e2e_request_latency_seconds_count": 2,
            "ostinato_request_generation_tokens_sum": 9,
            'ostinato_completions_total{"finish_reason": "stop"}': 3,
            'ostinato_completions_total{"finish_reason": "abort"}': 0,
        }
        assert {name: samples[name] for name in expected} == expected

    def test_refusals_by_status(self, app):
        app.chat(temperature=9)
        app.chat(messages=[])
        app.chat(model="x")
        samples = self.samples(app)
        assert samples['ostinato_refused_requests_total{"status": "400"}'] == 2
        assert samples['ostinato_refused_requests_total{"status": "404"}'] == 1

    def test_two_servers_do_not_share_figures(self, make_app):
        first, second = make_app(), make_app()
        first.chat()
        assert self.samples(second)["ostinato_e2e_request_latency_seconds_count"] == 0


def test_one_log_line_per_request_without_its_text(app, caplog):
    with caplog.at_level(logging.INFO, "ostinato.requests"):
        app.chat(request_id="me", messages=[{"role": "user", "content": "confidential"}])
    (line,) = [record.getMessage() for record in caplog.records if "me" in record.getMessage()]
    assert line.startswith("chatcmpl-me done prompt=")
    assert "cached=2 output=3 ttft=" in line
    assert "confidential" not in caplog.text
    assert "Hel" not in caplog.text


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
            assert named.json()["id"].endswith("-mine")  # the body is nearer
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

    def test_that_is_none(self, app):
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
        ("/v1/audio/transcriptions", "it needs audio models"),
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
