"""Forms in real forks: hostile bodies, and what they cost other requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import msgspec
import pytest

from ostinato.api.audio.preparation import PreparedTranscript, prepare_transcription
from ostinato.api.preparation.fork_messages import encode_result, split_result, with_data
from ostinato.api.preparation.preparation import Arrival, PreparationSettings
from ostinato.api.preparation.preparer import Preparer
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.runtime.errors import InvalidRequestError
from tests.api.audio.audio_apps import (
    BOUNDARY,
    TRANSCRIPTIONS,
    AudioServer,
    WhisperEngine,
    WhisperFiles,
    form_body,
    serving,
    wav,
)

KIND = f"multipart/form-data; boundary={BOUNDARY}"
LARGE = (25 << 20) - 4096


@pytest.fixture(scope="module")
def preparer(files: WhisperFiles) -> Iterator[Preparer]:
    source = WhisperEngine(files)
    one = Preparer(source, PreparationSettings(audio=AudioConfig(max_seconds=100)))
    try:
        yield one
    finally:
        one.close()


def prepared(preparer: Preparer, data: bytes, kind: str = KIND) -> PreparedTranscript:
    async def work() -> PreparedTranscript:
        arrival = Arrival(request_id="r", content_type=kind)
        assert preparer.run_inline(prepare_transcription, data, arrival) is None
        return await preparer.run_apart(prepare_transcription, data, arrival)

    return asyncio.run(work())


def test_windows_come_back_with_their_features(preparer: Preparer):
    one = prepared(preparer, form_body({"language": "de", "prompt": "Hi"}, wav(70, seed=1)))
    assert (one.seconds, one.language, len(one.windows)) == (70, "de", 3)
    assert one.windows[0].begin_s == 0
    assert one.windows[-1].end_s == 70
    for before, after in zip(one.windows, one.windows[1:], strict=False):
        assert before.end_s == after.begin_s
    sizes = {len(window.audio.features) for window in one.windows}
    assert sizes == {80 * 3000 * 4}
    assert len({window.audio.digest for window in one.windows}) == 3
    # A small form is not prepared on the event loop, and not in a shared fork.
    assert prepared(preparer, form_body({}, wav(0.05))).seconds == pytest.approx(0.05)


def test_messages_of_forks_are_read_as_they_were_written(preparer: Preparer):
    one = prepared(preparer, form_body({}, wav(40)))
    answer = bytearray(encode_result(one))
    encoded, features = split_result(memoryview(answer)[1:])
    assert len(encoded) < 5000
    bare = msgspec.json.decode(encoded, type=PreparedTranscript)
    assert [window.audio.features for window in bare.windows] == [b"", b""]
    assert asyncio.run(with_data(bare, features)) == one
    features[0] ^= 1
    with pytest.raises(
        RuntimeError, match="wrong digest"
    ):  # the encoder's work is shared by digest
        asyncio.run(with_data(bare, features))
    features[0] ^= 1
    with pytest.raises(RuntimeError, match="another size"):
        asyncio.run(with_data(bare, memoryview(bytes(features) + b"1")))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_form"),
        (form_body({}, b"x" * LARGE), "invalid_audio"),
        (form_body({}, b"x" * LARGE)[:-9], "invalid_form"),
        (form_body({}, b"RIFF" + b"\0" * LARGE), "invalid_audio"),
        (form_body({}, b"ID3" + b"\xff\xfb\x90\x00" * (LARGE // 4)), None),
        (form_body({}, wav(101)), "audio_too_long"),
        (form_body({f"a{number}": "" for number in range(200_000)}, b""), "invalid_form"),
    ],
    ids=["empty", "noise", "cut", "zeros", "mp3", "long", "fields"],
)
def test_hostile_bodies_are_refused(preparer: Preparer, data: bytes, code: str | None):
    with pytest.raises(InvalidRequestError) as refused:
        prepared(preparer, data)
    assert refused.value.status == 400
    assert code is None or refused.value.code == code


@contextmanager
def longest_turn(server: AudioServer) -> Iterator[list[float]]:
    """Yields a list that gets the most processor time that the event loop used between two ticks.

    Processor time, because other processes can take any time of a busy machine.
    """
    found: list[float] = []
    loops: list[asyncio.AbstractEventLoop] = []
    ended = threading.Event()

    async def tick() -> None:
        before, longest = time.thread_time(), 0.0
        while not ended.is_set():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        found.append(longest)

    async def note_loop() -> None:
        loops.append(asyncio.get_running_loop())

    # A request runs on the server's loop, so a hook in the engine's order of calls can find it.
    server.engine.on_loop = note_loop
    httpx.post(server.url + TRANSCRIPTIONS, files={"file": ("a.wav", wav(1))}, timeout=240)
    (loop, *_) = loops
    server.engine.on_loop = None
    future = asyncio.run_coroutine_threadsafe(tick(), loop)
    try:
        yield found
    finally:
        ended.set()
        future.result(60)


def test_other_requests_do_not_wait_for_audio(files: WhisperFiles):
    long = wav(240, seed=5)  # 8 MB
    noise = b"x" * LARGE
    with serving(WhisperEngine(files)) as server, longest_turn(server) as longest:

        def send(file: bytes, **fields: str) -> int:
            body = {"language": "en", **fields}
            sent = {"file": ("a.wav", file)}
            reply = httpx.post(server.url + TRANSCRIPTIONS, files=sent, data=body, timeout=200)
            return reply.status_code

        with ThreadPoolExecutor(4) as pool:
            first = [pool.submit(send, long, response_format="verbose_json")]
            first += [pool.submit(send, long, stream="true")]
            second = [pool.submit(send, noise) for _ in range(2)]
        assert [one.result() for one in first] == [200, 200]
        assert [one.result() for one in second] == [400, 400]
    assert longest[0] < 0.1, longest
