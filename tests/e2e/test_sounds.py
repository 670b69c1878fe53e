"""Sounds in a real server: a client, offline use, crashes, fetching, and what is refused."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.media.sound_apps import audio_url, input_part, url_part
from tests.e2e.json_requests import CHAT, GREEDY, post, refused
from tests.e2e.server_process import ServerProcess
from tests.e2e.streams import run_streams
from tests.e2e.test_images import message
from tests.models.audio.sound_models import RATE, random_sound
from tests.runtime.audio.audio_files import encode
from tests.runtime.sound_engines import SoundModel, load_model, sound_llm


def wav(seed: int, seconds: float = 0.5) -> bytes:
    return encode(random_sound(seed, round(seconds * RATE)), RATE)


SPEECH, MUSIC = wav(1), wav(2, 2.3)
ASKED = message("hear", input_part(SPEECH), "what?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SoundModel:
    """A model whose windows last a second; sounds can have several."""
    return load_model(tmp_path_factory.mktemp("model"), "audioflamingo3")


@pytest.fixture(scope="module")
def server(model: SoundModel) -> Iterator[ServerProcess]:
    with ServerProcess(
        f"model.path={model.path}",
        "model.dtype=float32",
        "images.domains=[127.0.0.1]",
        "audio.max_per_request=2",
        "audio.max_seconds=20",
        "server.restart_backoff_s=0.01",
        "server.max_restarts=50",
    ) as process:
        yield process


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """The address of a web server that answers every request with a file."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(SPEECH)))
            self.end_headers()
            self.wfile.write(SPEECH)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(server: ServerProcess, messages: Any, **more: Any) -> str:
    reply = post(server, CHAT, messages=messages, **{**GREEDY, **more})
    return reply["choices"][0]["message"]["content"]


def test_the_official_client_gets_the_answer_of_the_engine(server, model):
    asked = message(input_part(MUSIC), "w?")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as client:
        name = client.models.list().data[0].id
        answers = []
        for messages in (ASKED, asked):
            reply = client.chat.completions.create(
                model=name,
                messages=messages,
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert reply.usage is not None
            counted = post(server, "/tokenize", messages=messages)
            assert counted["count"] == reply.usage.prompt_tokens
            # 12 embeddings, or 25 for each of two windows, and 7.
            number = 12 if messages is ASKED else 57
            assert counted["tokens"].count(model.processor.audio_token_id) == number
            answers.append(reply.choices[0].message.content)
    with sound_llm(model) as llm:
        sampling = llm.default_sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.chat([ASKED, asked], sampling, use_progress=False)
    assert answers == [one.outputs[0].text for one in outputs]


def test_the_samples_matter_and_equal_windows_are_computed_once(server):
    before = server.metrics()["ostinato_inputs_encoded_total"]
    first = ask(server, message(url_part(wav(5)), "b"))
    assert ask(server, message(url_part(wav(6)), "b")) != first
    assert ask(server, message(input_part(wav(5)), "b")) == first
    metrics = server.metrics()
    assert metrics["ostinato_inputs_encoded_total"] == before + 2
    assert metrics["ostinato_requests_waiting_for_encodings"] == 0


def test_fetched_sounds(server, files):
    def part(url: str) -> dict[str, Any]:
        return {"type": "audio_url", "audio_url": {"url": url}}

    expected = ask(server, message(url_part(SPEECH), "b"))
    assert ask(server, message(part(f"{files}/a.wav"), "b")) == expected
    for url in (
        f"{files.replace('127.0.0.1', 'localhost')}/a.wav",
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:9/a.wav",
        "file:///etc/passwd",
    ):
        error = refused(server, CHAT, messages=message(part(url)))
        assert (error["param"], error["code"]) == ("messages", "invalid_audio_url")


def test_what_is_refused(server):
    for messages in (
        message(*[input_part(SPEECH)] * 3),
        message(input_part(b"no sound")),
        message(input_part(b"")),
        message(input_part(SPEECH, "pcm16")),
        message(input_part(wav(1, 0.01))),
        message(input_part(wav(1, 21))),
        message({"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}),
        message({"type": "audio_url", "audio_url": {"url": "data:audio/wav,abc"}}),
        message({"type": "audio_url", "audio_url": {"file": "a.wav"}}),
        message({"type": "audio", "audio": audio_url(SPEECH)}),
        message({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}),
        message("<sound>"),
        message("<sound>", input_part(SPEECH)),
        [{"role": "system", "content": [input_part(SPEECH)]}, *message("a")],
    ):
        assert refused(server, CHAT, messages=messages)["type"] == "invalid_request_error"
    for field in ({"truncate_prompt_tokens": 4}, {"prompt_logprobs": 1}, {"echo": True}):
        (name,) = field
        assert refused(server, CHAT, messages=ASKED, **field)["param"] == name
    for field in ({"audio": {"voice": "a", "format": "wav"}}, {"modalities": ["audio"]}):
        (name,) = field
        assert refused(server, CHAT, messages=ASKED, **field)["param"] == name
    body = {"input": [{"role": "user", "content": [input_part(SPEECH)]}]}
    assert "input_audio" in refused(server, "/v1/responses", **body)["message"]
    body = {"messages": ASKED, "max_tokens": 4}
    assert "input_audio" in refused(server, "/v1/messages", **body)["message"]


def test_a_server_without_the_encoder_takes_no_sounds(tmp_path):
    path = load_model(tmp_path, "qwen2_audio").path
    with ServerProcess(f"model.path={path}", "audio.max_per_request=0") as server:
        error = refused(server, CHAT, messages=ASKED)
        assert (error["param"], error["code"]) == ("messages", "unsupported_parameter")
        assert "takes no sounds (audio.max_per_request is 0)" in error["message"]
        assert ask(server, message("a b"))


def test_streams_survive_the_death_of_the_engine(server):
    requests = [
        (
            CHAT,
            {
                "messages": message(input_part(wav(number % 3, 0.4)), f"b {number}"),
                "max_tokens": 100,
                "ignore_eos": True,
                "temperature": 0.9,
                "seed": number,
                "n": 1 + number % 2,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        for number in range(6)
    ]

    expected = run_streams(server, requests)
    assert run_streams(server, requests, kill_at=200) == expected
