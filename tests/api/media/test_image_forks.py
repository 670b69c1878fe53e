"""Requests with images through real forks, with images from a local HTTP server."""

from __future__ import annotations

import asyncio
import http.server
import io
import ipaddress
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import PIL.Image
import pytest
from litestar.testing import TestClient

from ostinato.api.http.api_keys import with_keys
from ostinato.api.openai.preparation import PreparedChat, prepare_chat_completion
from ostinato.api.preparation.fork_messages import (
    encode_job,
    encode_result,
    read_job,
    split_result,
    with_data,
)
from ostinato.api.preparation.preparation import Arrival, Grant, PreparationSettings
from ostinato.api.preparation.preparer import Preparer
from ostinato.api.server.app import create_app
from ostinato.api.service.service import Service
from ostinato.conf.schema import SamplingSection
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.fetch_media import MediaFetcher
from ostinato.runtime.media.prompt_media import MediaLimits
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.api.fake_client import HELLO, FakeClient
from tests.api.media.image_apps import (
    PARTS_TEMPLATE,
    Source,
    image_part,
    image_spec,
    png,
    save_model,
    served,
    text_part,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("model")
    spec = image_spec(save_model(directory, PARTS_TEMPLATE), max_pixels=1 << 22)
    model = served(directory, spec, media_cache_tokens=1 << 20, max_model_len=1 << 20)
    return Source(model, Tokenizer.from_path(directory))


@contextmanager
def preparing(source: Source, fetcher: Any = None, **images: Any) -> Iterator[Preparer]:
    settings = PreparationSettings(images=ImagesConfig(**images))
    preparer = Preparer(source, settings, fetcher)
    try:
        yield preparer
    finally:
        preparer.close()


@pytest.fixture(scope="module")
def preparer(source: Source) -> Iterator[Preparer]:
    with preparing(source) as one:
        yield one


def body_of(*parts: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()


def prepared(preparer: Preparer, data: bytes) -> PreparedChat:
    async def work() -> PreparedChat:
        assert preparer.run_inline(prepare_chat_completion, data, Arrival()) is None
        return await preparer.run_apart(prepare_chat_completion, data, Arrival())

    return asyncio.run(work())


def test_small_and_large_images_come_back_with_their_pixels(preparer: Preparer):
    noise = PIL.Image.effect_noise((700, 500), 90).convert("RGB")
    small, large = png(8, 4, 77), png_of(noise)
    assert len(small) < 4096
    assert len(large) > 256 << 10
    for parts in ([image_part(small)], [text_part("a"), image_part(large), image_part(small)]):
        images = prepared(preparer, body_of(*parts)).ready.generation.images
        assert len(images) == len(parts) - (parts[0]["type"] == "text")
        for image in images:
            assert len(image.pixels) == image.height * image.width * 3
        assert images[-1].pixels == bytes((77, 7, 9)) * 32
    # A request without images uses a shared fork as before.
    assert prepared(preparer, body_of(text_part("a" * 5000))).ready.generation.images == []


def png_of(image: PIL.Image.Image) -> bytes:
    target = io.BytesIO()
    image.save(target, "PNG")
    return target.getvalue()


def test_a_refusal_crosses_the_fork(preparer: Preparer):
    with pytest.raises(InvalidRequestError) as refused:
        prepared(preparer, body_of(image_part(b"no image")))
    assert (refused.value.param, refused.value.code) == ("messages", "invalid_image")


@contextmanager
def image_server(files: dict[str, bytes]) -> Iterator[tuple[int, list[str]]]:
    """A server in a thread; yields its port and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            data = files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Writes nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()
            thread.join()


async def local(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def local_fetcher(config: ImagesConfig) -> MediaFetcher:
    limits = MediaLimits(config, VideoConfig(), AudioConfig())
    return MediaFetcher(limits, local, lambda one: one == ipaddress.ip_address("127.0.0.1"))


def test_urls_are_fetched_once_and_keep_their_place(source: Source):
    config = ImagesConfig(domains=["images.test"])
    with (
        image_server({"/a": png(8, 4), "/b": png(4, 4)}) as (port, asked),
        preparing(source, local_fetcher(config), domains=config.domains) as preparer,
    ):
        base = f"http://images.test:{port}"
        parts = [
            {"type": "image_url", "image_url": {"url": base + path}} for path in ("/a", "/b", "/a")
        ]
        images = prepared(preparer, body_of(*parts)).ready.generation.images
        assert [image.num_tokens for image in images] == [2, 1, 2]
        assert sorted(asked) == ["/a", "/b"]
        parts[1]["image_url"]["url"] = base + "/none"
        with pytest.raises(InvalidRequestError, match=r"image 2 from the host .* status 404"):
            prepared(preparer, body_of(*parts))
        data = body_of({"type": "image_url", "image_url": f"http://localhost:{port}/a"})
        with pytest.raises(InvalidRequestError, match=r"image 1 is at the host 'localhost'"):
            prepared(preparer, data)


def test_the_engine_gets_the_images_of_an_http_request(source: Source):
    engine = FakeClient(HELLO, tokenizer=source.tokenizer)
    engine.model = source.model
    service = Service(
        engine, with_keys(ServerConfig()), SamplingSection(), images=ImagesConfig(max_per_request=2)
    )
    service.admission.phase = None
    with ExitStack() as stack:
        stack.callback(service.close)
        http = stack.enter_context(TestClient(create_app(service)))
        content = [text_part("a"), image_part(png(8, 4)), image_part(png(4, 4))]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        (parts,) = engine.prepared
        assert parts is not None
        assert [image.num_tokens for image in parts.images] == [2, 1]
        tokens = engine.requests[0][0]
        assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
        body["messages"][0]["content"] = content * 2
        answer = http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_images")


def test_messages_of_forks_are_read_as_they_were_written(preparer: Preparer):
    arrival = Arrival(request_id="r", fetched={"u": b"one\n", "v": b"", "w": b"\n+"})
    job, data = read_job(b"".join(encode_job("f", arrival, b'{"a": 1}\n', granted=Grant.videos)))
    assert (job.arrival, job.function, data) == (arrival, "f", b'{"a": 1}\n')
    assert job.granted is Grant.videos
    one = prepared(preparer, body_of(image_part(png(8, 4)), image_part(png(4, 4))))
    answer = bytearray(encode_result(one))
    encoded, pixels = split_result(memoryview(answer)[1:])
    assert len(pixels) == 48 * 3
    bare = msgspec.json.decode(encoded, type=PreparedChat)
    assert [image.pixels for image in bare.ready.generation.images] == [b"", b""]
    assert asyncio.run(with_data(bare, pixels)) == one
    # Equal images are sent once, and share their pixels in memory.
    again = prepared(preparer, body_of(*[image_part(png(8, 4))] * 3, image_part(png(4, 4))))
    encoded_again, pixels_again = split_result(memoryview(encode_result(again))[1:])
    assert len(pixels_again) == 48 * 3
    bare_again = msgspec.json.decode(encoded_again, type=PreparedChat)
    shared = asyncio.run(with_data(bare_again, pixels_again))
    assert shared == again
    images = shared.ready.generation.images
    assert images[0].pixels is images[1].pixels is images[2].pixels
    pixels[0] ^= 1
    with pytest.raises(RuntimeError, match="wrong digest"):  # embeddings are shared by digest
        asyncio.run(with_data(bare, pixels))
