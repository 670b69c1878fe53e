"""Embeddings, scores and rankings over HTTP, with a scripted engine."""

from __future__ import annotations

import base64
import logging
import math
import struct

import pytest

from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.types.engine_info import ServedTask
from ostinato.runtime.types.outputs import FinishReason, TimelineEvent
from ostinato.runtime.types.params import PoolingKind
from tests.api.fake_client import scripted
from tests.api.otlp_receiver import otlp_receiver

EMBEDS = {"tasks": (ServedTask.generate, ServedTask.embed), "embedding_size": 2}
PAIR = {"query": "fox", "documents": ["dog"]}
DONE = (scripted("", [], finish_reason=FinishReason.stop),)


@pytest.fixture
def app(make_app):
    return make_app(DONE, **EMBEDS)


def embed(app, **fields):
    return app.http.post("/v1/embeddings", json={"input": [10, 20], **fields})


def refusal(response):
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


def test_an_answer_in_the_openai_shape(app):
    body = embed(app, input=[[100, 2, 3], [0]], request_id="mine").json()
    assert (body["id"], body["object"], body["model"]) == ("embd-mine", "list", "test-model")
    assert [(one["object"], one["index"]) for one in body["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    assert body["data"][0]["embedding"] == pytest.approx([math.cos(0.1), math.sin(0.1)])
    assert body["usage"] == {
        "prompt_tokens": 4,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_base64_is_the_same_numbers(app):
    floats = embed(app).json()["data"][0]["embedding"]
    packed = embed(app, encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<2f", base64.b64decode(packed))) == floats


def test_every_field_reaches_the_engine(app):
    embed(
        app,
        pooling="mean",
        normalize=False,
        dimensions=1,
        truncate_prompt_tokens=1,
        truncation_side="left",
        priority=3,
        cache_salt="salt",
    )
    ((ids, params, priority, salt),) = app.engine.pooled
    assert (ids, priority, salt) == ([20], 3, "salt")
    assert (params.kind, params.normalize, params.dimensions) == (PoolingKind.mean, False, 1)


def test_texts_are_tokenised_and_cut(app, tokenizer):
    text = "the quick brown fox jumps over the lazy dog"
    ids = tokenizer.encode(text)
    embed(app, input=text)
    embed(app, input=text, truncate_prompt_tokens=3)
    embed(app, input=text, truncate_prompt_tokens=3, truncation_side="left")
    embed(app, input=[text * 9], truncate_prompt_tokens=-1)
    sent = [one[0] for one in app.engine.pooled]
    assert sent[:3] == [ids, ids[:3], ids[-3:]]
    assert len(sent[3]) == app.engine.model.max_model_len


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"input": []}, (400, "input", "invalid_value")),
        ({"input": ["a", [1]]}, (400, "input", "invalid_value")),
        ({"input": [1000]}, (400, "input", "invalid_value")),
        ({"input": [1] * 65}, (400, "input", "context_length_exceeded")),
        ({"dimensions": 3}, (400, "dimensions", "invalid_value")),
        ({"encoding_format": "hex"}, (400, "encoding_format", "invalid_value")),
        ({"truncate_prompt_tokens": 0}, (400, "truncate_prompt_tokens", "invalid_value")),
        ({"model": "other"}, (404, "model", "model_not_found")),
        ({"pooling": "max"}, (400, "pooling", "invalid_value")),
        ({"images": []}, (400, "images", "unknown_parameter")),
    ],
)
def test_refusals_name_the_field(app, fields, expected):
    assert refusal(embed(app, **fields)) == expected
    assert app.engine.pooled == []


def test_one_bad_input_and_nothing_is_run(app):
    assert refusal(embed(app, input=[[1], [2000]]))[1] == "input"
    assert app.engine.pooled == []


def test_a_score_is_the_cosine_of_two_texts(app, tokenizer):
    response = app.http.post("/v1/score", json={"text_1": "fox", "text_2": ["fox", "dog", "fox"]})
    body = response.json()
    scores = [one["score"] for one in body["data"]]
    fox, dog = (tokenizer.encode(text)[0] / 1000 for text in ("fox", "dog"))
    assert scores == pytest.approx([1.0, math.cos(fox - dog), 1.0])
    assert len(app.engine.pooled) == 2  # the same text is computed once
    assert body["usage"]["prompt_tokens"] == sum(len(one[0]) for one in app.engine.pooled)
    other = app.http.post("/score", json={"queries": ["fox"], "documents": ["fox", "dog", "fox"]})
    assert [one["score"] for one in other.json()["data"]] == scores


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "documents": ["b"]}, "text_1"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": "fox " * 99}, "text_2"),
    ],
)
def test_texts_that_make_no_pairs(app, fields, param):
    assert refusal(app.http.post("/v1/score", json=fields))[:2] == (400, param)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_a_ranking_is_best_first(app, path):
    documents = ["dog", "fox", "lazy"]
    body = app.http.post(path, json={"query": "fox", "documents": documents}).json()
    scores = [one["relevance_score"] for one in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert body["results"][0]["index"] == 1
    assert [one["document"]["text"] for one in body["results"]] == [
        documents[one["index"]] for one in body["results"]
    ]
    short = app.http.post(
        path, json={"query": "fox", "documents": documents, "top_n": 1, "return_documents": False}
    ).json()
    assert short["results"] == [{"index": 1, "relevance_score": pytest.approx(1.0)}]


def test_who_can_do_what(make_app):
    encoder = make_app(DONE, tasks=(ServedTask.embed,), embedding_size=2, num_segments=2)
    responses = encoder.http.post("/v1/responses", json={"input": "Hi"})
    for response in (encoder.chat(), encoder.complete(), responses):
        assert refusal(response) == (400, "model", "unsupported_task")
        assert "use /v1/embeddings" in response.json()["error"]["message"]
    assert embed(encoder).status_code == 200
    assert refusal(embed(encoder, input=[1000])) == (400, "input", "invalid_value")
    judge = make_app(DONE, tasks=(ServedTask.classify,), num_labels=3, num_segments=2)
    assert refusal(embed(judge)) == (400, "model", "unsupported_task")
    response = judge.http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert "has 3 labels" in response.json()["error"]["message"]


def test_a_pair_is_cut_to_the_limit(make_app):
    judge = make_app(DONE, tasks=(ServedTask.classify,), num_labels=1, num_segments=2)
    long = "the quick brown fox jumps over the lazy dog " * 9
    for query, document in ((long, "dog"), ("fox", long), (long, long)):
        body = {"query": query, "documents": [document], "truncate_prompt_tokens": 8}
        assert judge.http.post("/v1/rerank", json=body).status_code == 200
    assert [len(one[0]) for one in judge.engine.pooled] == [8, 8, 8]
    body["truncate_prompt_tokens"] = -1
    assert judge.http.post("/v1/rerank", json=body).status_code == 200
    assert len(judge.engine.pooled[-1][0]) == judge.engine.model.max_model_len


def test_failures_are_answers(make_app):
    failed = make_app((scripted("", [], finish_reason=FinishReason.error, error="no"),), **EMBEDS)
    assert embed(failed).status_code == 500
    dead = make_app(DONE, **EMBEDS)
    dead.engine.death_reason = "it was shot"
    assert embed(dead).status_code == 503


def test_metrics_and_load(app):
    embed(app, input=[[1], [2]])
    assert "ostinato_pooled_inputs_total 2.0" in app.http.get("/metrics").text
    assert app.http.get("/load").json() == {"server_load": 0}


RUN = scripted(
    "",
    [],
    scheduled_time=1.0,
    finish_reason=FinishReason.stop,
    events=[TimelineEvent("prefill", 1.0, 0.002, 0, 2, 4, "eager", 3)],
)


@pytest.mark.parametrize(
    ("path", "body", "num_texts"),
    [
        ("/v1/embeddings", {"input": [[1], [2], [3]]}, 3),
        ("/v1/score", {"text_1": "fox", "text_2": ["dog", "lazy"]}, 3),
        ("/v1/rerank", {"query": "fox", "documents": ["dog"]}, 2),
    ],
)
def test_a_timeline_of_each_text(make_app, path, body, num_texts):
    app = make_app((RUN,), **EMBEDS)
    trace = app.http.post(path, json=body, headers={"x-trace": "1"}).json()["trace"]
    assert app.engine.traced == [True] * num_texts
    assert [one["prompt"] for one in trace["completions"]] == list(range(num_texts))
    for one in trace["completions"]:
        assert [event["event"] for event in one["events"]] == ["prefill", "finished"]
    assert trace["preparation_ms"] <= trace["total_ms"]
    assert "trace" not in app.http.post(path, json=body).json()
    assert app.engine.traced[num_texts:] == [False] * num_texts
    refused = app.http.post(path, json=body, headers={"x-trace": "yes"})
    assert refusal(refused)[:2] == (400, "x-trace")


def test_one_log_line_and_one_span_for_all_texts(make_app, caplog):
    pytest.importorskip("opentelemetry.sdk")
    with (
        otlp_receiver() as (endpoint, bodies),
        caplog.at_level(logging.INFO, "ostinato.requests"),
    ):
        app = make_app((RUN,), server=ServerConfig(otlp_endpoint=endpoint), **EMBEDS)
        embed(app, input=[[1], [2]], request_id="mine")
        slow = {"x-request-timeout-ms": "20"}
        app.engine.script = (None,)
        assert app.http.post("/v1/rerank", json=PAIR, headers=slow).status_code == 504
        app.service.close()
    done, late = (one.getMessage() for one in caplog.records)
    words = dict(word.split("=") for word in done.split()[2:])
    assert done.startswith("embd-mine done ")
    assert (words["prompt"], words["vectors"], words["finish"]) == ("2", "2", "stop")
    assert words["endpoint"] == "/v1/embeddings"
    assert "output" not in words
    assert " error 504 " in late
    assert b"embd-mine" in b"".join(bodies)
    assert "ostinato_request_queue_seconds_count 2.0" in app.http.get("/metrics").text


def test_what_the_operator_asks(app, tokenizer, tmp_path):
    assert app.http.post("/reset_prefix_cache").json() == {"success": True}
    assert app.engine.resets == 1
    assert refusal(app.http.post("/start_profile")) == (409, None, "call_refused")
    assert app.http.post("/stop_profile").json() == {"trace_file": "/traces/engine.json.gz"}
    facts = app.http.get("/tokenizer_info").json()
    assert facts["vocab_size"] == tokenizer.vocab_size
    assert facts["chat_template"] == tokenizer.chat_template.source


def test_the_servers_limits_hold_here_too(make_app):
    limited = make_app(DONE, server=ServerConfig(max_prompt_tokens=2), **EMBEDS)
    assert refusal(embed(limited, input=[1, 2, 3])) == (400, "input", "prompt_too_long")
    assert embed(limited, input=[[1, 2], [3]]).status_code == 200
    waiting = make_app((None,), **EMBEDS)
    headers = {"x-request-timeout-ms": "2000"}
    response = waiting.http.post("/v1/embeddings", json={"input": [1]}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "deadline passed before its answer" in response.json()["error"]["message"]
    assert len(waiting.engine.aborted) == 1
    headers = {"x-request-timeout-ms": "soon"}
    response = waiting.http.post("/v1/embeddings", json={"input": [1]}, headers=headers)
    assert refusal(response)[:2] == (400, "x-request-timeout-ms")
