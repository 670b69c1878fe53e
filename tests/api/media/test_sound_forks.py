"""Requests with sounds through real forks, with sounds from a local HTTP server."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from litestar.testing import TestClient

from ostinato.api.http.api_keys import with_keys
from ostinato.api.openai.preparation import PreparedChat, prepare_chat_completion
from ostinato.api.preparation.fork_limits import LARGE_BYTES
from ostinato.api.preparation.fork_messages import encode_result, split_result, with_data
from ostinato.api.preparation.preparation import Arrival, PreparationSettings
from ostinato.api.preparation.preparer import Preparer
from ostinato.api.server.app import create_app
from ostinato.api.service.service import Service
from ostinato.conf.schema import SamplingSection
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.fetch_media import MediaFetcher
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.api.fake_client import HELLO, FakeClient
from tests.api.media.image_apps import Source, image_part, png, text_part
from tests.api.media.sound_apps import (
    input_part,
    noise,
    save_sound_model,
    served_sounds,
    sound_spec,
    url_part,
    wav,
)
from tests.api.media.test_image_forks import image_server, local
from tests.runtime.audio.audio_files import RATE, encode


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A model that takes sounds of 10 minutes, in windows of 30 seconds."""
    directory = tmp_path_factory.mktemp("model")
    spec = sound_spec(save_sound_model(directory), window_s=30, num_bins=128, max_windows=20)
    room = {"media_cache_tokens": 30_000, "max_model_len": 1 << 16}
    return Source(served_sounds(directory, spec, **room), Tokenizer.from_path(directory))


@contextmanager
def preparing(source: Source, fetcher: Any = None, **settings: Any) -> Iterator[Preparer]:
    preparer = Preparer(source, PreparationSettings(**settings), fetcher)
    try:
        yield preparer
    finally:
        preparer.close()


@pytest.fixture(scope="module")
def preparer(source: Source) -> Iterator[Preparer]:
    with preparing(source) as one:
        yield one


def body_of(*parts: Any, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": list(parts)}]
    return json.dumps({"messages": messages, **fields}).encode()


def prepared(preparer: Preparer, data: bytes) -> PreparedChat:
    async def work() -> PreparedChat:
        assert preparer.run_inline(prepare_chat_completion, data, Arrival()) is None
        return await preparer.run_apart(prepare_chat_completion, data, Arrival())

    return asyncio.run(work())


def test_windows_come_back_with_their_features(preparer: Preparer):
    small = wav(0.1)
    assert len(body_of(input_part(small))) > 4096  # such a body is not prepared inline anyway
    for parts in ([input_part(small)], [text_part("a"), url_part(wav(31)), input_part(small)]):
        sounds = prepared(preparer, body_of(*parts)).ready.generation.sounds
        assert sounds[-1].num_tokens == 2
        assert [one.num_tokens for one in sounds[:-1]] == ([750, 25] if len(parts) > 1 else [])
        for one in sounds:
            assert len(one.features) == one.num_bytes
            assert one.with_checked_data(one.features) == one
    # A request without sounds uses a shared fork as before.
    assert prepared(preparer, body_of(text_part("a" * 5000))).ready.generation.sounds == []


def test_a_sound_is_not_decoded_on_the_event_loop(preparer: Preparer):
    tiny = wav(0.05)
    data = body_of(input_part(tiny))
    assert len(data) < 4096
    assert prepared(preparer, data).ready.generation.sounds[0].num_tokens == 1


def test_a_part_with_an_escaped_name(preparer: Preparer):
    """The fork that decodes the body finds the sound, whatever the bytes of the body are."""
    data = body_of(input_part(wav(0.4))).replace(b"input_audio", b"input\\u005faudio")
    for padding in (b"", b" " * LARGE_BYTES):
        sounds = prepared(preparer, data + padding).ready.generation.sounds
        assert [one.num_tokens for one in sounds] == [10]


def test_the_longest_sound(preparer: Preparer):
    """Memory suffices. Its windows are equal, so they are sent once."""
    whole = encode(np.tile(noise(1.0), 600), RATE)
    sounds = prepared(preparer, body_of(input_part(whole))).ready.generation.sounds
    assert [one.num_tokens for one in sounds] == [750] * 20
    assert len({id(one.features) for one in sounds}) == 1
    with pytest.raises(InvalidRequestError) as refused:
        prepared(preparer, body_of(input_part(whole), input_part(whole), input_part(wav(1))))
    assert refused.value.code == "too_many_embeddings"


def test_messages_of_forks_are_read_as_they_were_written(preparer: Preparer):
    one = prepared(preparer, body_of(input_part(wav(31)), url_part(wav(31)), input_part(wav(2))))
    answer = bytearray(encode_result(one))
    encoded, data = split_result(memoryview(answer)[1:])
    assert len(encoded) < 30_000
    # Equal windows are there once.
    assert len(data) == 128 * 4 * (3000 + 101 + 201)
    bare = msgspec.json.decode(encoded, type=PreparedChat)
    assert [window.features for window in bare.ready.generation.sounds] == [b""] * 5
    assert asyncio.run(with_data(bare, data)) == one
    data[0] ^= 1
    with pytest.raises(RuntimeError, match="wrong digest"):  # embeddings are shared by digest
        asyncio.run(with_data(bare, data))
    data[0] ^= 1
    with pytest.raises(RuntimeError, match="another size"):
        asyncio.run(with_data(bare, memoryview(bytes(data) + b"1")))


@pytest.mark.parametrize(
    "data", [b"", b"no sound", wav(3)[:-40_000], wav(1 / 16_000), b"RIFF\0\0\0\0WAVE"]
)
def test_a_refusal_crosses_the_fork(preparer: Preparer, data: bytes):
    with pytest.raises(InvalidRequestError) as refused:
        prepared(preparer, body_of(input_part(data)))
    assert (refused.value.param, refused.value.code) == ("messages", "invalid_audio")


def test_urls_are_fetched_once_and_keep_their_place(source: Source):
    config = ImagesConfig(domains=["media.test"])
    audio = AudioConfig(max_mib=0.05)
    with preparing(source) as without:
        limits = PreparationSettings(images=config, audio=audio).media
        part = {"type": "audio_url", "audio_url": {"url": "https://media.test/a"}}
        with pytest.raises(InvalidRequestError, match=r"sound 1 is at the host 'media\.test'"):
            prepared(without, body_of(part))
    fetcher = MediaFetcher(limits, local, lambda one: one == ipaddress.ip_address("127.0.0.1"))
    files = {"/a": wav(0.4), "/b": wav(0.8), "/large": bytes(60_000)}
    with (
        image_server(files) as (port, asked),
        preparing(source, fetcher, images=config, audio=audio) as preparer,
    ):

        def part_of(path: str) -> dict[str, Any]:
            return {"type": "audio_url", "audio_url": {"url": f"http://media.test:{port}{path}"}}

        parts = [part_of("/a"), part_of("/b"), text_part("c"), part_of("/a")]
        sounds = prepared(preparer, body_of(*parts)).ready.generation.sounds
        assert [one.num_tokens for one in sounds] == [10, 20, 10]
        assert sorted(asked) == ["/a", "/b"]
        host = "sound 2 from the host 'media.test'"
        for path, code, text in (
            ("/none", "invalid_audio_url", f"{host} was answered with the status 404"),
            ("/large", "audio_too_large", f"{host} has 60000 bytes, and audio.max_mib"),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                prepared(preparer, body_of(part_of("/a"), part_of(path)))
            assert text in str(refused.value)
            assert refused.value.code == code


@contextmanager
def served_app(source: Source, **config: Any) -> Iterator[tuple[TestClient[Any], FakeClient]]:
    engine = FakeClient(HELLO, tokenizer=source.tokenizer)
    engine.model = source.model
    service = Service(engine, with_keys(ServerConfig()), SamplingSection(), **config)
    service.admission.phase = None
    with ExitStack() as stack:
        stack.callback(service.close)
        yield stack.enter_context(TestClient(create_app(service))), engine


def test_the_engine_gets_the_sounds_of_an_http_request(source: Source):
    with served_app(source, audio=AudioConfig(max_per_request=2)) as (http, engine):
        content = [text_part("a"), input_part(wav(0.4)), url_part(wav(31))]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        (parts,) = engine.prepared
        assert parts is not None
        assert [one.num_tokens for one in parts.sounds] == [10, 750, 25]
        assert parts.images == []
        assert answer.json()["usage"]["prompt_tokens"] == len(engine.requests[0][0])
        counted = http.post("/tokenize", json=body)
        assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]
        body["messages"][0]["content"] = content * 2
        answer = http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_sounds")
        for path, asked in (
            ("/v1/responses", {"input": [{"role": "user", "content": content[1:2]}]}),
            ("/v1/messages", {**body, "max_tokens": 4}),
        ):
            answer = http.post(path, json=asked)
            assert answer.status_code == 400
            assert "input_audio" in answer.json()["error"]["message"]
        image = {"messages": [{"role": "user", "content": [image_part(png(4, 4))]}]}
        answer = http.post("/v1/chat/completions", json=image)
        assert "takes no images; send text and sounds only" in answer.json()["error"]["message"]
