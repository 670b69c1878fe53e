"""Videos in a real server: a client, offline use, crashes, fetching, and what is refused."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from ostinato import SamplingParams
from tests.api.media.video_apps import film, film_url, frames_url, video_part
from tests.e2e.json_requests import CHAT, GREEDY, post, refused
from tests.e2e.server_process import ServerProcess
from tests.e2e.streams import run_streams
from tests.e2e.test_images import CAT, message, part
from tests.runtime.image_engines import ImageModel, image_llm, make_image_model
from tests.runtime.video.video_files import encode

RUN = film(30, 24, 16)  # 3 seconds
ASKED = message("w95 w96", video_part(film_url(RUN)), "w97", part(CAT), "w98")
EIGHT = {"media_io_kwargs": {"video": {"num_frames": 8}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return make_image_model("qwen2.5-vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: ImageModel) -> Iterator[ServerProcess]:
    with ServerProcess(
        f"model.path={model.path}",
        "model.dtype=float32",
        "images.domains=[127.0.0.1]",
        "video.max_per_request=2",
        "video.max_frames=12",
        "server.restart_backoff_s=0.01",
        "server.max_restarts=50",
    ) as process:
        yield process


@pytest.fixture(scope="module")
def films() -> Iterator[str]:
    """The address of a web server that answers every request with the film."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(RUN)))
            self.end_headers()
            self.wfile.write(RUN)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def random_film(seed: int) -> str:
    """The URL of a film of 6 frames of random pixels, all of which are used."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 16, 24, 3), np.uint8)
    return film_url(encode(pixels, "mov-mjpeg", fps=2))


def ask(server: ServerProcess, messages: Any, **more: Any) -> str:
    reply = post(server, CHAT, messages=messages, **{**GREEDY, **more})
    return reply["choices"][0]["message"]["content"]


def offline(model: ImageModel, *overrides: str) -> str:
    """The answer to `ASKED` of an engine without a server."""
    with image_llm(model, *overrides) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (answer,) = llm.chat(ASKED, sampling, use_progress=False)
    return answer.outputs[0].text


def test_the_official_client_gets_the_answer_of_the_engine(server, model):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as client:
        name = client.models.list().data[0].id
        lengths = []
        for asked in ({}, EIGHT):
            reply = client.chat.completions.create(
                model=name,
                messages=ASKED,
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True, **asked},
            )
            assert reply.usage is not None
            lengths.append(reply.usage.prompt_tokens)
            counted = post(server, "/tokenize", messages=ASKED, **asked)["count"]
            assert counted == reply.usage.prompt_tokens
            if not asked:
                assert reply.choices[0].message.content == offline(model)
    # 2 frames a second are 6 frames and 3 pairs. A pair of 24 x 16 pixels has 6 embeddings.
    assert lengths[1] - lengths[0] == 6


def test_a_model_that_reads_times(tmp_path_factory):
    model = make_image_model("qwen3-vl", tmp_path_factory.mktemp("model"))
    with ServerProcess(f"model.path={model.path}", "model.dtype=float32") as server:
        assert ask(server, ASKED) == offline(model)


def test_the_pixels_matter_and_equal_pairs_are_computed_once(server):
    def asked(seed: int) -> list[dict[str, Any]]:
        return message("w95", video_part(random_film(seed)), "w96")

    before = server.metrics()["ostinato_inputs_encoded_total"]
    first = ask(server, asked(5))
    assert ask(server, asked(6)) != first
    assert ask(server, asked(5)) == first
    metrics = server.metrics()
    assert metrics["ostinato_inputs_encoded_total"] == before + 6
    assert metrics["ostinato_requests_waiting_for_encodings"] == 0


def test_fetched_videos(server, films):
    expected = ask(server, message("w95", video_part(film_url(RUN)), "w96"))
    assert ask(server, message("w95", video_part(f"{films}/run.mp4"), "w96")) == expected
    for url in (
        f"{films.replace('127.0.0.1', 'localhost')}/run.mp4",
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:9/run.mp4",
        "file:///etc/passwd",
    ):
        error = refused(server, CHAT, messages=message(video_part(url)))
        assert (error["param"], error["code"]) == ("messages", "invalid_video_url")


def test_what_is_refused(server):
    for messages in (
        message(*[video_part(film_url(RUN))] * 3),
        message(video_part(film_url(b"no video"))),
        message(video_part(film_url(RUN[:500]))),
        message(video_part("data:video/mp4;base64,A")),
        message(video_part("data:video/jpeg;base64,AAAA,AAAA")),
        message(video_part(film_url(CAT))),
        message(video_part(frames_url(13))),
        message("<|video_pad|>"),
        message("<|video_pad|>", video_part(film_url(RUN))),
        message({"type": "video_url", "video_url": {"file": "run.mp4"}}),
        message({"type": "video", "video": film_url(RUN)}),
        [{"role": "system", "content": [video_part(film_url(RUN))]}, *message("w95")],
    ):
        assert refused(server, CHAT, messages=messages)["type"] == "invalid_request_error"
    for video in (
        {"num_frames": 0},
        {"num_frames": 13},
        {"num_frames": 10**9},
        {"fps": -1},
        {"x": 1},
    ):
        error = refused(server, CHAT, messages=ASKED, media_io_kwargs={"video": video})
        assert error["type"] == "invalid_request_error"
    for field in ({"truncate_prompt_tokens": 4}, {"prompt_logprobs": 1}, {"echo": True}):
        (name,) = field
        assert refused(server, CHAT, messages=ASKED, **field)["param"] == name
    part = {"type": "input_video", "video_url": film_url(RUN)}
    body = {"input": [{"role": "user", "content": [part]}]}
    assert refused(server, "/v1/responses", **body)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen2.5-vl", ["video.max_per_request=0"]),
        ("qwen2-vl", ["images.max_per_request=0"]),
        ("llava", []),
    ],
)
def test_models_that_take_no_videos(tmp_path, name: str, overrides: list[str]):
    model = make_image_model(name, tmp_path)
    with ServerProcess(f"model.path={model.path}", *overrides) as server:
        asked = message("w95", video_part(film_url(RUN)))
        error = refused(server, CHAT, messages=asked)
        assert (error["param"], error["code"]) in (
            ("messages", "unsupported_parameter"),
            ("messages", "too_many_videos"),
        )
        assert ask(server, message("w95 w96"))


def test_streams_survive_the_death_of_the_engine(server):
    requests = [
        (
            CHAT,
            {
                "messages": message("w95", video_part(random_film(number % 3)), f"w{96 + number}"),
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
