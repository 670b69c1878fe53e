"""Transcriptions through a server with real forks, with OpenAI's client and curl."""

from __future__ import annotations

import json
import logging
import socket
import subprocess

import httpx
import pytest

from ostinato.runtime.errors import EngineError
from tests.api.audio.audio_apps import (
    BOUNDARY,
    LONG,
    NO_SPEECH,
    SHORT,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    WhisperEngine,
    WhisperFiles,
    form_body,
    post,
    prompts,
    refused,
    serving,
    wav,
)
from tests.waiting import wait_until

TEXT = "window 0 of it."
LONG_TEXT = "window 0 of it. window 1 of it. window 2 of it."


def test_openais_client_gets_every_format(server, client):
    create = client.audio.transcriptions.create
    reply = create(file=("speech.wav", SHORT), model="whisper")
    assert reply.text == TEXT
    assert (reply.usage.type, reply.usage.seconds) == ("duration", 2)
    assert create(file=SHORT, model="whisper", response_format="text") == f"{TEXT}\n"
    srt = create(file=LONG, model="whisper", response_format="srt")
    assert srt.startswith("1\n00:00:00,000 --> 00:00:02,000\nwindow")
    vtt = create(file=LONG, model="whisper", response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nwindow")
    verbose = create(
        file=LONG,
        model="whisper",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        temperature=0.25,
    )
    assert (verbose.task, verbose.language, verbose.duration) == ("transcribe", "german", 70)
    segments = verbose.segments
    assert verbose.text == "".join(one.text for one in segments).strip()
    assert [one.id for one in segments] == list(range(9))
    assert all(one.start <= one.end for one in segments)
    assert [one.start for one in segments] == sorted(one.start for one in segments)
    assert segments[-1].end == 70
    assert [one.no_speech_prob for one in segments] == pytest.approx([NO_SPEECH] * 9)
    assert {(one.temperature, one.avg_logprob) for one in segments} == {(0.25, -0.5)}
    assert len({one.seek for one in segments}) == 3


def test_a_stream_has_the_text_of_the_windows_in_order(server, client):
    with client.audio.transcriptions.create(
        file=LONG, model="whisper", stream=True, include=["logprobs"], language="en"
    ) as stream:
        events = list(stream)
    *deltas, done = events
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text == LONG_TEXT
    assert len(deltas) > 6
    usage = done.usage
    prompt = len(prompts(server)[0])
    assert usage.input_token_details.audio_tokens == 3 * 1500
    assert usage.input_token_details.text_tokens == 3 * prompt
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    shown = [one for event in deltas for one in event.logprobs or ()]
    assert [one.to_dict() for one in shown] == [one.to_dict() for one in done.logprobs]
    assert b"".join(bytes(one.bytes) for one in shown).decode() == f" {LONG_TEXT}"
    assert {one.logprob for one in shown} == {-0.5}


def test_the_first_window_is_streamed_before_it_ends(server):
    server.engine.waits = True
    with httpx.stream(
        "POST",
        server.url + TRANSCRIPTIONS,
        files={"file": ("a.wav", LONG)},
        data={"stream": "true", "language": "en"},
        timeout=240,
    ) as reply:
        lines = (line for line in reply.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["delta"]
        server.engine.released.set()
        rest = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert rest[-1]["text"] == LONG_TEXT


def test_windows_run_at_the_same_time_but_not_too_many(server):
    server.engine.pause_s = 0.005
    reply = post(server, file=wav(250, seed=3), language="en")
    assert reply.json()["text"].count("window") == 9
    assert server.engine.most == 2 * server.engine.model.audio_windows


def test_the_language_is_given_or_detected_once(server):
    spec = server.engine.spec
    assert post(server, file=LONG).status_code == 200
    assert server.engine.order == [(0, True), (0, False), (1, False), (2, False)]
    expected = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    assert prompts(server) == [expected] * 3
    probe = server.engine.requests[0][1]
    assert set(probe.allowed_token_ids) == set(spec.languages.values())
    assert (probe.temperature, probe.max_tokens) == (0.0, 1)
    for given in ("fr", "French", " FRENCH "):
        server.engine.order.clear()
        server.engine.requests.clear()
        assert post(server, language=given).status_code == 200
        assert [one[1] for one in server.engine.order] == [False]
        assert prompts(server)[0][1] == "<|fr|>"
    error = refused(server, language="es")
    assert (error["param"], error["code"]) == ("language", "invalid_value")
    assert "de, en, fr, ja" in error["message"]


def test_verbose_json_asks_for_the_probability_of_no_speech_beside_each_window(server):
    reply = post(server, file=LONG, response_format="verbose_json")
    assert reply.status_code == 200
    order = server.engine.order
    assert sorted(order) == sorted((number, kind) for number in range(3) for kind in (True, False))
    assert order[0] == (0, True)
    later = [
        one[1] for one in server.engine.requests[1:] if one[0] == [server.engine.spec.start_id]
    ]
    assert len(later) == 2
    assert {one.allowed_token_ids for one in later} == {None}
    assert {one.logprob_token_ids for one in later} == {(server.engine.spec.no_speech_id,)}


def test_translations(server, client):
    reply = client.audio.translations.create(file=SHORT, model="whisper", prompt="Hello.")
    assert reply.text == TEXT
    assert prompts(server)[0][-3:] == ["<|de|>", "<|translate|>", "<|notimestamps|>"]
    assert "usage" not in post(server, TRANSLATIONS).json()
    verbose = client.audio.translations.create(
        file=SHORT, model="whisper", response_format="verbose_json"
    )
    assert verbose.language == "english"
    assert "window 0" in verbose.text
    assert post(server, TRANSLATIONS, response_format="verbose_json").json()["task"] == "translate"
    assert refused(server, TRANSLATIONS, **{"include[]": "logprobs"})["param"] == "include[]"


def test_the_prompt_comes_before_every_window(server):
    text = "The fox looks at the dog."
    assert post(server, file=LONG, prompt=text, language="en").status_code == 200
    expected = server.engine.tokenizer.encode(f" {text}", add_special_tokens=False)
    spec = server.engine.spec
    for prompt, *_ in server.engine.requests:
        assert prompt[: len(expected) + 2] == [
            spec.start_of_previous_id, *expected, spec.start_id
        ]  # fmt: skip
    server.engine.requests.clear()
    assert post(server, prompt="word " * 3000, language="en").status_code == 200
    assert len(server.engine.requests[0][0]) == 448 // 2 + 4
    error = refused(server, prompt="a <|endoftext|> b")
    assert error["param"] == "prompt"
    assert "<|endoftext|>" in error["message"]


def test_parameters_reach_the_engine(server):
    fields = {
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "7",
        "min_p": "0.1",
        "seed": "-3",
        "frequency_penalty": "0.25",
        "presence_penalty": "-1",
        "repetition_penalty": "1.5",
        "max_completion_tokens": "5",
        "priority": "-2",
        "cache_salt": "mine",
    }
    assert post(server, language="en", **fields).status_code == 200
    ((prompt, sampling, priority, salt),) = server.engine.requests
    assert (priority, salt) == (-2, "mine")
    assert sampling.max_tokens == 5
    for name, value in fields.items():
        if hasattr(sampling, name):
            assert getattr(sampling, name) == float(value), name
    assert sampling.transcript.first_timestamp_id is None
    server.engine.requests.clear()
    assert post(server, language="en", response_format="srt").status_code == 200
    ((prompt, sampling, *_),) = server.engine.requests
    assert sampling.transcript.first_timestamp_id == server.engine.spec.first_timestamp_id
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 448 - len(prompt))


def test_curl(server, tmp_path):
    (tmp_path / "speech.wav").write_bytes(SHORT)
    command = ["curl", "-sS", server.url + TRANSCRIPTIONS, "-F", "file=@speech.wav"]
    command += ["-F", "model=whisper", "-F", "response_format=text"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True)
    assert told.stdout == f"{TEXT}\n"


def test_an_english_model(tmp_path):
    english = WhisperFiles(tmp_path, multilingual=False)
    with serving(WhisperEngine(english)) as server:
        assert post(server).json()["text"] == TEXT
        assert prompts(server) == [["<|startoftranscript|>", "<|notimestamps|>"]]
        assert post(server, language="English").status_code == 200
        assert refused(server, language="de")["param"] == "language"
        assert refused(server, TRANSLATIONS)["code"] == "unsupported_task"
        verbose = post(server, response_format="verbose_json").json()
        assert verbose["language"] == "english"
        assert verbose["segments"][0]["no_speech_prob"] == pytest.approx(NO_SPEECH)


def test_a_client_that_leaves_ends_all_windows(server):
    engine = server.engine
    for fields in ({"language": "en"}, {"stream": "true", "language": "en"}):
        engine.aborted.clear()
        engine.waits = True
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        with socket.create_connection(server.address) as connection:
            body = form_body(fields, LONG)
            head = f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: engine.num_unfinished == 3)
        wait_until(lambda: not engine.num_unfinished and not server.service.runner.num_open)
        assert len(engine.aborted) == 3


def test_failures_of_the_engine(server, caplog):
    caplog.set_level(logging.INFO, logger="ostinato.requests")
    for name in ("error", "probe_error"):
        server.engine.error = server.engine.probe_error = None
        setattr(server.engine, name, EngineError("the engine gave this request up"))
        reply = post(server)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "engine_error"
        with httpx.stream(
            "POST",
            server.url + TRANSCRIPTIONS,
            files={"file": ("a.wav", SHORT)},
            data={"stream": "true"},
            timeout=240,
        ) as stream:
            (line,) = [one for one in stream.iter_lines() if one]
        assert json.loads(line.removeprefix("data: "))["error"]["code"] == "engine_error"
        assert server.service.runner.num_open == 0
    lines = [one.getMessage() for one in caplog.records if one.name == "ostinato.requests"]
    assert len(lines) == 4
    assert all("error 500" in line for line in lines)


def test_one_request_is_one_line_of_the_log_and_counts_once(server, caplog):
    def count() -> float:
        text = httpx.get(f"{server.url}/metrics").text
        name = "ostinato_e2e_request_latency_seconds_count"
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    caplog.set_level(logging.INFO, logger="ostinato.requests")
    before = count()
    reply = httpx.post(
        server.url + TRANSCRIPTIONS,
        files={"file": ("a.wav", LONG)},
        headers={"x-request-id": "mine", "x-trace": "1"},
        timeout=240,
    )
    assert reply.headers["x-request-id"] == "mine"
    assert len(reply.json()["trace"]["completions"]) == 3
    assert count() == before + 1
    (line,) = [one.getMessage() for one in caplog.records if one.name == "ostinato.requests"]
    assert "mine" in line
    assert "done" in line
    assert TRANSCRIPTIONS in line
