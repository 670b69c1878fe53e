"""Requests with videos through real forks, with videos from a local HTTP server."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from litestar.testing import TestClient

from ostinato.api.http.api_keys import with_keys
from ostinato.api.openai.preparation import PreparedChat, prepare_chat_completion
from ostinato.api.preparation.fork_limits import LARGE_BYTES
from ostinato.api.preparation.preparation import Arrival, PreparationSettings
from ostinato.api.preparation.preparer import Preparer
from ostinato.api.server.app import create_app
from ostinato.api.service.service import Service
from ostinato.conf.schema import SamplingSection
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.server_schema import ServerConfig, ToolParserName
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.fetch_media import MediaFetcher
from ostinato.runtime.media.prompt_media import FetchWanted, MediaLimits
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.api.fake_client import HELLO, FakeClient
from tests.api.media.image_apps import Source, image_part, png, served, text_part
from tests.api.media.test_image_forks import image_server, local, local_fetcher
from tests.api.media.video_apps import (
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
    model = served(directory, spec, media_cache_tokens=1 << 16, max_model_len=1 << 16)
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
        assert images[0].with_checked_data(images[0].pixels) == images[0]


def escaped(data: bytes) -> bytes:
    """The same body, in which the bytes `"video_url"` do not occur."""
    return data.replace(b"video_url", b"vid\\u0065o_url")


def test_a_part_with_an_escaped_name(preparer: Preparer):
    """The fork that decodes the body finds the video, whatever the bytes of the body are."""
    data = escaped(body_of(video_part(frames_url(4))))
    for padding in (b"", b" " * 5000, b" " * LARGE_BYTES):
        images = asyncio.run(prepared(preparer, data + padding)).ready.generation.images
        assert [image.num_frames for image in images] == [2, 2]


def test_a_video_in_a_large_body(preparer: Preparer):
    """Memory suffices for a file that is almost as large as the setting allows."""
    data = film(12)
    size = 64 << 20
    data += struct.pack(">I4s", size, b"free") + bytes(size - 8)
    images = asyncio.run(prepared(preparer, body_of(video_part(film_url(data))))).ready
    assert [image.num_frames for image in images.generation.images] == [2, 2]


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


@pytest.mark.parametrize("is_escaped", [False, True])
def test_videos_do_not_hold_up_other_requests(source: Source, is_escaped: bool):
    """If others took the turns of videos, or videos those of others, they would wait for most."""
    fields = {"media_io_kwargs": {"video": {"num_frames": 300}}}
    large = body_of(
        video_part(film_url(film(300, 240, 240))), text_part("a"), image_part(png(4, 4)), **fields
    )
    schema = {"type": "object", "properties": {"video_id": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    others = {
        "image": body_of(image_part(png(8, 8))),
        "still": body_of(text_part("video still"), image_part(png(8, 8))),
        "text": body_of(text_part("a" * 5000)),
        "tool": body_of(text_part("a" * 5000), tools=[tool]),
        "large": body_of(text_part("a " * LARGE_BYTES), tools=[tool], max_tokens=1),
    }
    asked = {"video": escaped(large) if is_escaped else large, **others}
    refused: list[tuple[str, str | None]] = []

    async def work(preparer: Preparer) -> list[str]:
        ended: list[str] = []

        async def run(name: str) -> None:
            try:
                await prepared(preparer, asked[name])
            except InvalidRequestError as error:
                refused.append((name, error.code))
            ended.append(name)

        await asyncio.gather(*(run(name) for name in [*["video"] * 12, *others]))
        return ended

    settings = {"video": VideoConfig(max_frames=700), "tool_parser": ToolParserName.hermes}
    with preparing(source, **settings) as preparer:
        ended = asyncio.run(work(preparer))
    assert sorted(ended) == sorted([*others, *["video"] * 12])
    assert refused == [("large", "context_length_exceeded")]
    assert max(map(ended.index, others)) < 8


def test_few_requests_have_fetched_videos_at_a_time(source: Source):
    """Their videos are in memory from the fetch to the end of the preparation."""
    config = ImagesConfig(domains=["images.test"])
    held = most = 0
    refused: list[tuple[str, str | None]] = []

    class Counting(MediaFetcher):
        async def fetch(self, wanted: Mapping[str, FetchWanted]) -> dict[str, bytes]:
            nonlocal held, most
            if any(one.kind is MediaKind.video for one in wanted.values()):
                held += 1
                most = max(most, held)
            return await super().fetch(wanted)

    async def work(preparer: Preparer, base: str) -> None:
        async def run(path: str) -> None:
            nonlocal held
            name = "image" if path == "/b" else "video"
            part = {"type": f"{name}_url", f"{name}_url": {"url": base + path}}
            try:
                await prepared(preparer, body_of(part))
            except InvalidRequestError as error:
                refused.append((path, error.code))
            held -= name == "video"

        await asyncio.gather(*map(run, ["/a", "/none"] * 4 + ["/b"] * 2))

    limits = MediaLimits(config, VideoConfig(), AudioConfig())
    fetcher = Counting(limits, local, lambda one: one == ipaddress.ip_address("127.0.0.1"))
    with (
        image_server({"/a": film(12), "/b": png(4, 4)}) as (port, _),
        preparing(source, fetcher, images=config) as preparer,
    ):
        asyncio.run(work(preparer, f"http://images.test:{port}"))
    assert (held, most) == (0, 2)
    assert refused == [("/none", "invalid_video_url")] * 4


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
