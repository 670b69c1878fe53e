"""Images in a real server: the dialects, offline use, crashes, fetching, and what is refused."""

from __future__ import annotations

import base64
import http.server
import io
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from tests.e2e.json_requests import CHAT, GREEDY, post, refused
from tests.e2e.server_process import ServerProcess
from tests.e2e.streams import run_streams
from tests.runtime.image_engines import ImageModel, image_llm, make_image_model, picture

CAT, DOG = picture(1), picture(2, width=64, height=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return make_image_model("qwen2.5-vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """The address of a web server that has `cat.png`, and a redirect to it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_cat = self.path == "/cat.png"
            self.send_response(200 if is_cat else 302)
            self.send_header("Location", "/cat.png")
            self.send_header("Content-Length", str(len(CAT) if is_cat else 0))
            self.end_headers()
            self.wfile.write(CAT if is_cat else b"")

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def server(model: ImageModel) -> Iterator[ServerProcess]:
    with ServerProcess(
        f"model.path={model.path}",
        "model.dtype=float32",
        "images.domains=[127.0.0.1]",
        "images.max_per_request=3",
        "server.restart_backoff_s=0.01",
        "server.max_restarts=50",
    ) as process:
        yield process


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def message(*parts: str | dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of one message with texts and images."""
    content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    return [{"role": "user", "content": content}]


ASKED = message("w95 w96", part(CAT), "w97", part(DOG), "w98")


@pytest.fixture(scope="module")
def expected(model: ImageModel) -> str:
    """The answer to `ASKED` of an engine without a server."""
    from ostinato import SamplingParams

    with image_llm(model) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=12)
        (answer,) = llm.chat(ASKED, sampling, use_progress=False)
        pictures = [
            {**one, "type": "image_pil", "image_pil": Image.open(io.BytesIO(data))}
            for one, data in (({}, CAT), ({}, DOG))
        ]
        (same,) = llm.chat(
            message("w95 w96", pictures[0], "w97", pictures[1], "w98"), sampling, use_progress=False
        )
    assert answer.outputs[0].text == same.outputs[0].text
    return answer.outputs[0].text


def ask(server: ServerProcess, messages: Any, **more: Any) -> str:
    reply = post(server, CHAT, messages=messages, **{**GREEDY, **more})
    return reply["choices"][0]["message"]["content"]


def test_the_clients_of_all_dialects_get_the_same_answer(server, expected):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as client:
        name = client.models.list().data[0].id
        reply = client.chat.completions.create(
            model=name,
            messages=ASKED,
            max_tokens=12,
            temperature=0,
        )
        assert reply.choices[0].message.content == expected
        assert reply.usage is not None
        assert reply.usage.prompt_tokens > 20  # the embeddings of both images, and the texts
        tokens = post(server, "/tokenize", messages=ASKED)
        assert tokens["count"] == reply.usage.prompt_tokens
        response = client.responses.create(
            model=name,
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "w95 w96"},
                        {"type": "input_image", "image_url": data_url(CAT), "detail": "auto"},
                        {"type": "input_text", "text": "w97"},
                        {"type": "input_image", "image_url": data_url(DOG), "detail": "auto"},
                        {"type": "input_text", "text": "w98"},
                    ],
                }
            ],
            max_output_tokens=12,
            temperature=0,
        )
        assert response.output_text == expected
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=200) as claude:
        sources = [
            {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
            for data in (CAT, DOG)
        ]
        answer = claude.messages.create(
            model=name,
            max_tokens=12,
            extra_body={"temperature": 0},
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "w95 w96"},
                        {"type": "image", "source": sources[0]},
                        {"type": "text", "text": "w97"},
                        {"type": "image", "source": sources[1]},
                        {"type": "text", "text": "w98"},
                    ],
                }
            ],
        )
        assert answer.content[0].text == expected


def test_the_pixels_matter_and_equal_ones_are_computed_once(server):
    before = server.metrics()["ostinato_inputs_encoded_total"]
    new = picture(77)
    first = ask(server, message("w95", part(new), "w96"))
    assert ask(server, message("w95", part(picture(78)), "w96")) != first
    assert ask(server, message("w95", part(new), "w96")) == first
    metrics = server.metrics()
    assert metrics["ostinato_inputs_encoded_total"] == before + 2
    assert metrics["ostinato_requests_waiting_for_encodings"] == 0


def test_fetched_images(server, files):
    expected = ask(server, message("w95", part(CAT), "w96"))

    def fetched(url: str) -> list[dict[str, Any]]:
        return message("w95", {"type": "image_url", "image_url": {"url": url}}, "w96")

    assert ask(server, fetched(f"{files}/cat.png")) == expected
    for url in (
        f"{files}/other.png",
        f"{files.replace('127.0.0.1', 'localhost')}/cat.png",
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:9/cat.png",
        "file:///etc/passwd",
    ):
        assert refused(server, CHAT, messages=fetched(url))["param"] == "messages"


def test_what_is_refused(server):
    out = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(out, "PNG")
    for messages in (
        message("w95", *[part(CAT)] * 4),
        message(part(b"<svg xmlns='http://www.w3.org/2000/svg'/>")),
        message(part(CAT[:60])),
        message(part(out.getvalue())),
        message("<|image_pad|>"),
        message("<|image_pad|>", part(CAT)),
        message({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}),
        [{"role": "system", "content": [part(CAT)]}, *message("w95")],
    ):
        assert refused(server, CHAT, messages=messages)["type"] == "invalid_request_error"
    for field in ({"truncate_prompt_tokens": 4}, {"prompt_logprobs": 1}, {"echo": True}):
        (name,) = field
        assert refused(server, CHAT, messages=ASKED, **field)["param"] == name


def test_a_model_without_a_tower_refuses_images(model):
    with ServerProcess(f"model.path={model.path}", "images.max_per_request=0") as server:
        assert refused(server, CHAT, messages=ASKED)["code"] == "unsupported_parameter"
        assert ask(server, message("w95 w96"))


def test_streams_survive_the_death_of_the_engine(server):
    requests = [
        (
            CHAT,
            {
                "messages": message("w95", part(picture(number % 3)), f"w{96 + number}"),
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
