"""Transcriptions in a real server: clients, equal answers, shared work, crashes, refusals."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.audio.audio_apps import TRANSCRIPTIONS, TRANSLATIONS, wav
from tests.e2e.server_process import HTTP, ServerProcess
from tests.models.audio.whisper_checkpoints import load_whisper, make_whisper
from tests.waiting import repeat_if_late

SHORT, OTHER, LONG = wav(3, seed=1), wav(3, seed=2), wav(65, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        f"model.path={checkpoint}",
        "model.name=whisper",
        "model.dtype=float32",
        "model.max_model_len=448",
        "server.restart_backoff_s=0.01",
        "server.max_restarts=50",
    ) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as one:
        yield one


def post(server: ServerProcess, file: bytes = SHORT, path: str = TRANSCRIPTIONS, **fields: Any):
    files = {"file": ("speech.wav", file)}
    return HTTP.post(server.url + path, files=files, data=fields, timeout=300)


def text_of(server: ServerProcess, file: bytes = SHORT, **fields: Any) -> str:
    reply = post(server, file, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["text"]


def expected_text(checkpoint: Path, file: bytes, task: str) -> str:
    """The greedy text of transformers for a file of one window."""
    import io
    import wave

    import numpy as np
    import torch

    model, processor = load_whisper(checkpoint)
    with wave.open(io.BytesIO(file)) as opened:
        raw = opened.readframes(opened.getnframes())
    samples = np.frombuffer(raw, "<i2").astype(np.float32) / 32768
    features = processor.feature_extractor(samples, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        token_ids = model.generate(
            features.input_features,
            language="de",
            task=task,
            return_timestamps=False,
            do_sample=False,
            num_beams=1,
            max_length=448,
        )[0]
    return processor.tokenizer.decode(token_ids, skip_special_tokens=True).strip()


def test_the_text_is_that_of_transformers(server, checkpoint):
    for path, task in ((TRANSCRIPTIONS, "transcribe"), (TRANSLATIONS, "translate")):
        expected = expected_text(checkpoint, SHORT, task)
        assert text_of(server, path=path, language="de") == expected
    assert text_of(server, OTHER, language="de") != text_of(server, language="de")


def test_openais_client_gets_every_format(server, client):
    create = client.audio.transcriptions.create
    text = create(file=LONG, model="whisper", language="en").text
    assert text
    plain = create(file=LONG, model="whisper", language="en", response_format="text")
    assert plain == f"{text}\n"
    with create(file=LONG, model="whisper", language="en", stream=True) as stream:
        *deltas, done = list(stream)
    assert "".join(event.delta for event in deltas) == done.text == text
    assert done.usage.output_tokens > 3
    verbose = create(file=LONG, model="whisper", response_format="verbose_json")
    assert verbose.duration == 65
    assert verbose.language in ("english", "german", "french", "japanese")
    assert verbose.text == "".join(one.text for one in verbose.segments).strip()
    times = [time for one in verbose.segments for time in (one.start, one.end)]
    assert times == sorted(times)
    assert times[-1] <= 65
    assert all(0 < one.no_speech_prob < 1 for one in verbose.segments)
    srt = create(file=LONG, model="whisper", response_format="srt")
    assert srt.count(" --> ") == len(verbose.segments)
    vtt = create(file=LONG, model="whisper", response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n")
    assert vtt.count(" --> ") == len(verbose.segments)
    assert client.audio.translations.create(file=SHORT, model="whisper").text


def test_curl(server, tmp_path):
    (tmp_path / "speech.wav").write_bytes(SHORT)
    command = ["curl", "-sS", server.url + TRANSCRIPTIONS, "-F", "file=@speech.wav"]
    command += ["-F", "response_format=text", "-F", "language=german"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True)
    assert told.stdout == text_of(server, language="de") + "\n"


def test_the_language_is_detected_and_the_answer_is_that_of_the_language(server):
    verbose = post(server, response_format="verbose_json").json()
    given = post(server, response_format="verbose_json", language=verbose["language"]).json()
    for one in (verbose, given):
        for segment in one["segments"]:
            segment["no_speech_prob"] = pytest.approx(segment["no_speech_prob"])
    assert given == verbose


def test_seeds_and_prompts_have_an_effect(server):
    sampled = {"temperature": "1", "language": "en"}
    first = text_of(server, seed="1", **sampled)
    assert text_of(server, seed="1", **sampled) == first
    assert text_of(server, seed="2", **sampled) != first
    plain = text_of(server, language="en")
    assert text_of(server, language="en", prompt="The fox and the dog.") != plain
    assert text_of(server, language="en", max_completion_tokens="2") != plain


def test_answers_do_not_depend_on_the_other_requests(server):
    files = [wav(2 + number % 3, seed=50 + number) for number in range(6)] + [LONG]
    alone = [text_of(server, file, language="en") for file in files]

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as one:
            replies = await asyncio.gather(
                *(
                    one.post(
                        TRANSCRIPTIONS, files={"file": ("a.wav", file)}, data={"language": "en"}
                    )
                    for file in files * 3
                )
            )
        return [reply.json()["text"] for reply in replies]

    assert asyncio.run(together()) == alone * 3


def test_what_is_refused(server):
    for fields in ({"language": "xx"}, {"temperature": "9"}, {"n": "2"}, {"file_name": "a"}):
        assert post(server, **fields).status_code == 400
    for file in (b"", b"no audio", SHORT[:40]):
        assert post(server, file).json()["error"]["code"] == "invalid_audio"
    for path, body in [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ]:
        reply = HTTP.post(server.url + path, json=body)
        assert reply.status_code == 400
        assert TRANSCRIPTIONS in reply.json()["error"]["message"]


def test_streams_survive_the_death_of_the_engine(server):
    requests = [
        (
            LONG if number % 2 else wav(3, seed=number),
            {"stream": "true", "language": "de", "temperature": "0.9", "seed": str(number)},
        )
        for number in range(6)
    ]
    lines: list[list[str]] = []
    was_killed = False

    async def one(client: httpx.AsyncClient, number: int, kill_at: int | None) -> None:
        nonlocal was_killed
        file, fields = requests[number]
        sent = {"file": ("a.wav", file)}
        async with client.stream("POST", TRANSCRIPTIONS, files=sent, data=fields) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line:
                    lines[number].append(line)
                    if sum(map(len, lines)) == kill_at:
                        was_killed = server.kill_busy_engine()

    async def run(kill_at: int | None) -> list[tuple[str, int]]:
        lines[:] = [[] for _ in requests]
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            await asyncio.gather(*(one(client, n, kill_at) for n in range(len(requests))))
        told = []
        for each in lines:
            *deltas, done = [json.loads(line.removeprefix("data: ")) for line in each]
            assert "".join(event["delta"] for event in deltas) == done["text"]
            told.append((done["text"], done["usage"]["output_tokens"]))
        return told

    expected = asyncio.run(run(None))
    total = sum(map(len, lines))

    def attempt() -> list[tuple[str, int]] | None:
        told = asyncio.run(run(total // 3))
        return told if was_killed else None

    assert repeat_if_late(attempt) == expected
