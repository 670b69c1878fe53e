"""Requests with videos through real forks, with videos from a local HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from litestar.testing import TestClient

from ostinato.api.http.api_keys import with_keys
from ostinato.api.openai.preparation import PreparedChat, prepare_chat_completion
from ostinato.api.preparation.preparation import Arrival, PreparationSettings
from ostinato.api.preparation.preparer import Preparer
from ostinato.api.server.app import create_app
from ostinato.api.service.service import Service
from ostinato.conf.images.images_schema import ImagesConfig
from ostinato.conf.schema import SamplingSection
from ostinato.conf.server_schema import ServerConfig
from ostinato.conf.video.video_schema import VideoConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.api.fake_client import HELLO, FakeClient
from tests.api.images.image_apps import Source, image_part, png, served, text_part
from tests.api.images.test_image_forks import image_server, local_fetcher
from tests.api.video.video_apps import (
    film,
    film_url,
    frames_url,
    save_video_model,
    video_part,
    video_spec,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("model")
    spec = video_spec(save_video_model(directory))
    model = served(directory, spec, image_cache_tokens=1 << 16, max_model_len=1 << 16)
    return Source(model, Tokenizer.from_path(directory))


@contextmanager
def preparing(source: Source, fetcher: Any = None, **settings: Any) -> Iterator[Preparer]:
    preparer = Preparer(source, PreparationSettings(**settings), fetcher)
    try:
        yield preparer
    finally:
        preparer.close()


@pytest.fixture(scope="module")
def preparer(source: Source) -> Iterator[Preparer]:
    with preparing(source, video=VideoConfig(max_frames=700, max_mib=100)) as one:
        yield one


def body_of(*parts: Any, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": list(parts)}]
    return json.dumps({"messages": messages, **fields}).encode()


async def prepared(preparer: Preparer, data: bytes) -> PreparedChat:
    assert preparer.run_inline(prepare_chat_completion, data, Arrival()) is None
    return await preparer.run_apart(prepare_chat_completion, data, Arrival())


def test_pairs_come_back_with_their_pixels(preparer: Preparer):
    for url in (frames_url(3), film_url(film(12))):
        data = body_of(text_part("a"), video_part(url), image_part(png(8, 4)))
        images = asyncio.run(prepared(preparer, data)).ready.generation.images
        assert [image.num_frames for image in images] == [2, 2, 1]
        assert [len(image.pixels) for image in images] == [2 * 768, 2 * 768, 96]
        assert (
            images[0].with_data(images[0].pixels) == images[0]
        )  # the digest is that of the pixels


def test_a_part_with_an_escaped_name(preparer: Preparer):
    """The body is not searched for such names, and the request gets a fork of its own anyway."""
    data = body_of(video_part(frames_url(4))).replace(b"video_url", b"vid\\u0065o_url")
    for padding in (b"", b" " * 5000):
        images = asyncio.run(prepared(preparer, data + padding)).ready.generation.images
        assert [image.num_frames for image in images] == [2, 2]


@pytest.mark.parametrize(
    "data",
    [b"", b"no video", film(9)[:700], film(9).replace(b"stbl", b"free"), b"RIFF\0\0\0\0AVI LIST"],
)
def test_a_refusal_crosses_the_fork(preparer: Preparer, data: bytes):
    with pytest.raises(InvalidRequestError) as refused:
        asyncio.run(prepared(preparer, body_of(video_part(film_url(data)))))
    assert (refused.value.param, refused.value.code) == ("messages", "invalid_video")


def test_urls_are_fetched_once_and_keep_their_place(source: Source):
    config = ImagesConfig(domains=["images.test"])
    files = {"/a": film(12), "/b": png(4, 4)}
    with (
        image_server(files) as (port, asked),
        preparing(source, local_fetcher(config), images=config) as preparer,
    ):
        base = f"http://images.test:{port}"
        image = {"type": "image_url", "image_url": {"url": f"{base}/b"}}
        parts = [video_part(f"{base}/a"), image, video_part(f"{base}/a")]
        data = body_of(*parts, media_io_kwargs={"video": {"num_frames": 4}})
        images = asyncio.run(prepared(preparer, data)).ready.generation.images
        assert [image.num_frames for image in images] == [2, 2, 1, 2, 2]
        assert sorted(asked) == ["/a", "/b"]
        data = body_of(image, video_part(f"{base}/b"))  # a PNG is no video
        with pytest.raises(InvalidRequestError, match="video 1"):
            asyncio.run(prepared(preparer, data))
        with pytest.raises(InvalidRequestError, match=r"video 1 from the host .* status 404"):
            asyncio.run(prepared(preparer, body_of(image, video_part(f"{base}/none"))))


def test_videos_do_not_hold_up_other_requests(preparer: Preparer):
    """If videos took the turns of images, the image would wait for at least nine of them."""
    fields = {"media_io_kwargs": {"video": {"num_frames": 300}}}
    large = film_url(film(300, 240, 240))
    asked = {
        "image": body_of(image_part(png(8, 8))),
        "text": body_of(text_part("a" * 5000)),
        "video": body_of(video_part(large), image_part(png(4, 4)), **fields),
    }

    async def work() -> list[str]:
        ended: list[str] = []

        async def run(name: str) -> None:
            await prepared(preparer, asked[name])
            ended.append(name)

        await asyncio.gather(*(run(name) for name in [*["video"] * 12, "image", "text"]))
        return ended

    ended = asyncio.run(work())
    assert sorted(ended) == ["image", "text", *["video"] * 12]
    assert max(ended.index("image"), ended.index("text")) < 6


def test_the_engine_gets_the_videos_of_an_http_request(source: Source):
    engine = FakeClient(HELLO, tokenizer=source.tokenizer)
    engine.model = source.model
    service = Service(
        engine, with_keys(ServerConfig()), SamplingSection(), video=VideoConfig(max_per_request=2)
    )
    service.admission.phase = None
    with ExitStack() as stack:
        stack.callback(service.close)
        http = stack.enter_context(TestClient(create_app(service)))
        content = [text_part("a"), video_part(frames_url(3)), image_part(png(4, 4))]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        (parts,) = engine.prepared
        assert parts is not None
        assert [image.num_tokens for image in parts.images] == [16, 16, 1]
        assert answer.json()["usage"]["prompt_tokens"] == len(engine.requests[0][0])
        counted = http.post("/tokenize", json=body)
        assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]
        body["messages"][0]["content"] = content * 3
        answer = http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_videos")


@pytest.mark.parametrize(
    "change",
    [
        {"media_io_kwargs": {"video": {"num_frames": 0}}},
        {"media_io_kwargs": {"video": {"num_frames": -1}}},
        {"media_io_kwargs": {"video": {"num_frames": 10**9}}},
        {"media_io_kwargs": {"video": {"fps": 0}}},
        {"media_io_kwargs": {"video": {"fps": 1e300}}},
        {"media_io_kwargs": {"video": {"fps": 1, "num_frames": 4}}},
        {"media_io_kwargs": {"audio": {}}},
        {"media_io_kwargs": [1]},
        {"mm_processor_kwargs": {"fps": 1}},
    ],
    ids=str,
)
def test_wrong_fields_are_answered_with_400(source: Source, change: dict[str, Any]):
    engine = FakeClient(HELLO, tokenizer=source.tokenizer)
    engine.model = source.model
    service = Service(engine, with_keys(ServerConfig()), SamplingSection())
    service.admission.phase = None
    content = [video_part(frames_url(2))]
    body = {"messages": [{"role": "user", "content": content}], **change}
    with ExitStack() as stack:
        stack.callback(service.close)
        http = stack.enter_context(TestClient(create_app(service)))
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
        raw = json.dumps(body).replace("1e+300", "NaN").encode()
        answer = http.post("/v1/chat/completions", content=raw)
        assert answer.status_code == 400
