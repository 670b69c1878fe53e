"""A real server of a real encoder, with the official client; and vectors of the bundled model."""

from __future__ import annotations

import base64
import concurrent.futures
import gzip
import json
import math
import struct

import openai
import pytest
import torch
import transformers

from ostinato.api.pooling.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from tests.e2e.number_fields import Endpoint, check_numbers, places
from tests.e2e.server_process import HTTP, ServerProcess
from tests.models.minilm import minilm_directory
from tests.waiting import repeat_if_late, wait_until

TEXTS = ["A block table maps positions to blocks.", "The cat sat on the mat.", "ok"]


@pytest.fixture(scope="module")
def encoder():
    with ServerProcess(
        f"model.path={minilm_directory()}",
        "model.name=minilm",
        "model.max_model_len=256",
        "graphs.mode=captured",
        "graphs.bundle=false",
    ) as server:
        yield server


def cosine(first, second):
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    return dot / math.sqrt(sum(a * a for a in first) * sum(b * b for b in second))


def test_the_official_client_gets_the_vectors_of_transformers(encoder):
    model = transformers.AutoModel.from_pretrained(minilm_directory()).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_directory())
    client = openai.OpenAI(base_url=f"{encoder.url}/v1", api_key="none")
    # The client asks for base64 by default.
    reply = client.embeddings.create(model="minilm", input=TEXTS)
    assert reply.usage.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in TEXTS)
    for text, one in zip(TEXTS, reply.data, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert cosine(one.embedding, states.mean(0).tolist()) >= 0.9999
    floats = client.embeddings.create(
        model="minilm", input=TEXTS[0], encoding_format="float", dimensions=50
    )
    assert len(floats.data[0].embedding) == 50
    with pytest.raises(openai.BadRequestError, match="minilm does not generate text"):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "?"}])


def test_the_layers_are_captured(encoder):
    layers = HTTP.get(f"{encoder.url}/version", timeout=250).json()["layers"]
    assert layers == {"captured": 6, "fx": 0, "inductor": 0, "eager": 0}
    encoder.wait_for_line("layers: 6 captured")


def test_the_timeline_of_texts(encoder):
    reply = HTTP.post(
        f"{encoder.url}/v1/embeddings",
        json={"input": TEXTS, "request_id": "traced"},
        headers={"x-trace": "1"},
        timeout=250,
    ).json()
    trace = reply["trace"]
    assert len(trace["completions"]) == len(TEXTS)
    for one in trace["completions"]:
        assert [event["event"] for event in one["events"]] == ["scheduled", "prefill", "finished"]
        assert 0 <= one["queue_ms"] <= one["events"][-1]["at_ms"] <= trace["total_ms"]
    sizes = [one["events"][1]["tokens"] for one in trace["completions"]]
    assert sum(sizes) == reply["usage"]["prompt_tokens"]
    assert encoder.log_of("embd-traced").startswith("embd-traced done prompt=")


def test_many_at_once(encoder):
    texts = [f"{text} {n}" for n in range(20) for text in TEXTS]

    def ask(text):
        body = {"input": text, "encoding_format": "base64"}
        response = HTTP.post(f"{encoder.url}/v1/embeddings", json=body)
        return response.json()["data"][0]["embedding"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        alone = list(pool.map(ask, texts))
    body = {"input": texts, "encoding_format": "base64"}
    response = HTTP.post(f"{encoder.url}/v1/embeddings", json=body).json()
    together = [one["embedding"] for one in response["data"]]
    for one, other in zip(alone, together, strict=True):
        vectors = [struct.unpack("<384f", base64.b64decode(data)) for data in (one, other)]
        assert cosine(*vectors) > 0.99999
    assert encoder.metrics()["ostinato_requests_running"] == 0


def test_a_ranking(encoder):
    documents = ["Stocks fell on Monday.", "Kittens sleep all day.", "A plan for the sea."]
    body = {"query": "What do young cats do?", "documents": documents}
    results = HTTP.post(f"{encoder.url}/v1/rerank", json=body).json()["results"]
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] > results[1]["relevance_score"] + 0.2


def test_the_bundled_model_gives_vectors_and_answers(server):
    body = {"input": ["Once upon a time", "word " * 300], "pooling": "mean"}
    reply = HTTP.post(f"{server.url}/v1/embeddings", json=body).json()
    assert [len(one["embedding"]) for one in reply["data"]] == [256, 256]
    response = HTTP.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 3})
    assert response.json()["usage"]["completion_tokens"] == 3


def test_a_client_that_goes_away_frees_its_blocks(server):
    body = {"input": [[5 + n] + [7] * 500 for n in range(1000)], "pooling": "mean"}
    with server.held_engine():
        with server.sent("/v1/embeddings", body, "left"):
            pass
        assert " disconnected " in server.log_of("embd-left ")
    HTTP.post(f"{server.url}/v1/embeddings", json={"input": "ok"}).raise_for_status()
    # The log line may come before the last chunk of inputs has left the engine.
    wait_until(lambda: server.load() == 0)


def test_a_profile(server):
    assert HTTP.post(f"{server.url}/stop_profile").status_code == 409
    assert HTTP.post(f"{server.url}/start_profile").status_code == 200
    assert HTTP.post(f"{server.url}/start_profile").status_code == 409
    HTTP.post(f"{server.url}/v1/embeddings", json={"input": "ok"}).raise_for_status()
    file = HTTP.post(f"{server.url}/stop_profile").json()["trace_file"]
    with gzip.open(file) as stream:
        names = {event.get("name", "") for event in json.load(stream)["traceEvents"]}
    assert any("ostinato::paged_attention" in name for name in names), sorted(names)[:40]


def test_the_tokenizer_and_the_cache(server):
    facts = HTTP.get(f"{server.url}/tokenizer_info").json()
    assert facts["eos_token"]
    assert "messages" in facts["chat_template"]
    assert HTTP.post(f"{server.url}/reset_prefix_cache").json() == {"success": True}


@pytest.mark.slow
def test_vectors_survive_their_engine(server):
    """The engine is killed during a request. The request waits for the restarted engine."""
    inputs = [[5 + n] + [7] * 500 for n in range(200)]
    body = {"input": inputs, "pooling": "mean", "encoding_format": "base64"}
    url = f"{server.url}/v1/embeddings"

    def attempt() -> list[dict] | None:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reply = pool.submit(HTTP.post, url, json=body)
            wait_until(lambda: server.metrics()["ostinato_requests_running"] or reply.done())
            was_killed = server.kill_busy_engine()
            return reply.result().json()["data"] if was_killed else None

    disturbed = repeat_if_late(attempt)
    undisturbed = HTTP.post(url, json=body, timeout=240).json()["data"]
    assert disturbed == undisturbed


def test_numbers_of_any_size(server):
    texts = {"documents": ["a", "b"]}
    endpoints = [
        Endpoint("/v1/embeddings", EmbeddingRequest, {"input": "ok"}),
        Endpoint("/v1/score", ScoreRequest, {"queries": "q", **texts}),
        Endpoint("/v1/rerank", RerankRequest, {"query": "q", **texts}),
    ]
    where = [place for one in endpoints for place in places(one)]
    assert "truncate_prompt_tokens" in {place.name for place in where}
    check_numbers(server.url, where, max_examples=40)
