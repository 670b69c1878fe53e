"""What the endpoints for audio refuse, and what other endpoints refuse on a model for audio."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.types.engine_info import ServedTask
from tests.api.audio.audio_apps import (
    LONG,
    SHORT,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    WhisperEngine,
    post,
    refused,
    serving,
    wav,
)
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("field", "value", "code", "said"),
    [
        ("temperature", "2.5", "invalid_value", "[0, 2]"),
        ("temperature", "warm", "invalid_value", "temperature='warm'"),
        ("temperature", "nan", "invalid_value", "[0, 2]"),
        ("top_p", "0", "invalid_value", "(0, 1]"),
        ("max_completion_tokens", "0", "invalid_value", ">= 1"),
        ("max_completion_tokens", "500", "context_length_exceeded", "at most 444"),
        ("response_format", "xml", "invalid_value", "verbose_json"),
        ("response_format", "diarized_json", "unsupported_parameter", "verbose_json"),
        ("timestamp_granularities[]", "word", "unsupported_parameter", "segment"),
        ("timestamp_granularities[]", "segment", "invalid_value", "verbose_json"),
        ("chunking_strategy", '{"type": "server_vad"}', "unsupported_parameter", "auto"),
        ("chunking_strategy[type]", "server_vad", "unsupported_parameter", "auto"),
        ("known_speaker_names[]", "Ann", "unsupported_parameter", "speakers"),
        ("hotwords", "Ostinato", "unsupported_parameter", "prompt"),
        ("n", "2", "unsupported_parameter", "several transcripts"),
        ("use_beam_search", "true", "unsupported_parameter", "beam search"),
        ("max_tokens", "5", "unsupported_parameter", "max_completion_tokens"),
        ("langauge", "en", "unknown_parameter", "language"),
        ("stream", "perhaps", "invalid_value", "stream"),
    ],
)
def test_what_is_refused(server, field, value, code, said):
    error = refused(server, **{field: value})
    assert error["param"] == field.partition("[t")[0].removesuffix("[]") or error["param"] == field
    assert error["code"] == code
    assert said in error["message"]


def test_values_without_effect_are_accepted(server):
    fields = {"n": "1", "use_beam_search": "false", "chunking_strategy": "auto", "language": ""}
    assert post(server, stream="false", stream_include_usage="true", **fields).status_code == 200


def test_contradictions_are_refused(server):
    for form in ("srt", "vtt", "verbose_json"):
        assert refused(server, response_format=form, stream="true")["param"] == "stream"
        assert refused(server, response_format=form, **{"include[]": "logprobs"})
    assert refused(server, language=["en", "de"])["param"] == "language"


def test_refused_files(server):
    cases = [(b"", "invalid_audio"), (b"no audio at all", "invalid_audio")]
    cases += [(SHORT[:30], "invalid_audio"), (bytes((25 << 20) + 1), "audio_too_large")]
    for data, code in cases:
        error = refused(server, file=data)
        assert (error["param"], error["code"]) == ("file", code)
    reply = httpx.post(server.url + TRANSCRIPTIONS, files={"model": (None, "whisper")})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "missing_field")
    reply = httpx.post(server.url + TRANSCRIPTIONS, files={"file": (None, "speech.wav")})
    assert "-F file=@speech.wav" in reply.json()["error"]["message"]
    reply = httpx.post(server.url + TRANSCRIPTIONS, json={"file": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_limits_are_those_of_the_settings(files):
    config = AudioConfig(max_mib=0.5, max_seconds=10)
    with serving(WhisperEngine(files), audio=config) as server:
        assert refused(server, file=wav(11))["code"] == "audio_too_long"
        assert refused(server, file=wav(20))["code"] == "audio_too_large"
        reply = post(server, file=bytes(2 << 20))
        assert reply.status_code == 413
        assert "audio.max_mib=0.5 MiB" in reply.json()["error"]["message"]
        large = {"prompt": "a" * (9 << 20)}
        reply = httpx.post(f"{server.url}/v1/completions", json=large)
        assert "server.max_body_mib=8 MiB" in reply.json()["error"]["message"]


def test_an_unknown_model_is_a_404(server):
    reply = post(server, model="whisper-1")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "whisper"


def test_endpoints_of_text_name_those_of_audio(server):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in [
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {**chat, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/invocations", chat),
    ]:
        reply = httpx.post(server.url + path, json=body)
        assert reply.status_code == 400, path
        assert TRANSCRIPTIONS in reply.json()["error"]["message"], path
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "The fox"}).json()["tokens"]
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "The fox" in text


def test_a_text_model_names_its_endpoints(files):
    engine = WhisperEngine(files, tasks=(ServedTask.generate,), audio=None)
    with serving(engine) as server:
        for path in (TRANSCRIPTIONS, TRANSLATIONS):
            for file in (SHORT, LONG):
                error = refused(server, path, file=file)
                assert error["code"] == "unsupported_task"
                assert "/v1/chat/completions" in error["message"]


def test_keys_and_a_full_queue(files):
    config = ServerConfig(api_keys=["secret"], max_queued_requests=1)
    with serving(WhisperEngine(files), server=config) as server:
        assert post(server).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        options: dict[str, Any] = {"files": {"file": ("a.wav", SHORT)}, "headers": headers}
        assert httpx.post(server.url + TRANSCRIPTIONS, timeout=240, **options).status_code == 200
        server.engine.num_queued = 1
        assert httpx.post(server.url + TRANSCRIPTIONS, timeout=240, **options).status_code == 429


def test_audio_beyond_that_of_the_requests_in_progress(files):
    """`LONG` has three windows and `SHORT` one. Together they have more than allowed."""
    window = 4 * files.spec.num_bins * files.spec.num_frames
    config = ServerConfig(max_media_mib=3.5 * window / (1 << 20))
    engine = WhisperEngine(files)
    engine.waits = True
    with serving(engine, server=config) as server:
        admission = server.service.admission
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(post, server, file=LONG)
            wait_until(lambda: admission.num_media_bytes == 3 * window)
            reply = post(server)
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "queue_full"
            assert "server.max_media_mib" in reply.json()["error"]["message"]
            engine.released.set()
            assert running.result(60).status_code == 200
        wait_until(lambda: admission.num_media_bytes == 0)
        assert post(server).status_code == 200
        assert post(server, file=wav(130)).status_code == 200  # alone, it can have any size
