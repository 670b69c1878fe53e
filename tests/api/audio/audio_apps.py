"""Audio, an engine that transcribes by a script, and servers that the tests of audio share."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import math
import threading
import time
import wave
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import uvicorn

from ostinato.api.http.api_keys import with_keys
from ostinato.api.http.http_protocol import HttpProtocol, ReceiveLimits
from ostinato.api.server.app import create_app
from ostinato.api.service.service import Service
from ostinato.conf.schema import SamplingSection
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.models.audio.audio_fields import read_audio_spec
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.runtime.client.requests import ALONE, PreparedParts, RequestShare, make_requests
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.audio import PromptAudio
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.outputs import FinishReason, RequestOutput, TokenLogprobs
from ostinato.runtime.types.params import SamplingParams
from tests.api.fake_client import FakeClient
from tests.models.audio.whisper_checkpoints import make_whisper

NO_SPEECH = 0.125  # the engine's probability that a window has no speech
RATE = 16_000

BOUNDARY = "a-boundary"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def wav(seconds: float, seed: int = 0) -> bytes:
    """A file with noise of random loudness. Its windows differ from those of other seeds."""
    generator = np.random.default_rng(seed)
    count = round(seconds * RATE)
    loud = np.repeat(generator.random(count // 800 + 1), 800)[:count]
    samples = (generator.standard_normal(count) * loud * 3000).astype("<i2")
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return target.getvalue()


def form_body(fields: Mapping[str, str], file: bytes | None, end: str = "--") -> bytes:
    """A body of multipart/form-data with `BOUNDARY`."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if file is not None:
        head = 'Content-Disposition: form-data; name="file"; filename="speech.wav"'
        parts += [f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode(), file, b"\r\n"]
    return b"".join([*parts, f"--{BOUNDARY}{end}\r\n".encode()])


LONG = wav(70, seed=1)  # three windows
SHORT = wav(1.5, seed=2)


class WhisperFiles:
    """A checkpoint's directory and what a server reads from it."""

    def __init__(self, directory: Path, *, multilingual: bool = True) -> None:
        make_whisper(directory, multilingual=multilingual, layers=1)
        self.tokenizer = Tokenizer.from_path(directory)
        self.spec: AudioSpec = read_audio_spec(
            directory,
            json.loads((directory / "config.json").read_text()),
            json.loads((directory / "generation_config.json").read_text()),
            token_id=self.tokenizer.token_id,
        )
        self.model = ServedModel(
            name="whisper",
            max_model_len=448,
            vocab_size=self.spec.first_timestamp_id + 1501,
            eos_token_ids=(self.spec.end_id,),
            tokenizer=str(directory),
            tasks=(ServedTask.transcribe,),
            audio=self.spec,
            audio_windows=2,
        )


Script = Callable[["WhisperEngine", int, list[int]], list[int]]


def words_of(engine: WhisperEngine, number: int, prompt: list[int]) -> list[int]:
    """The text " window N of it." With timestamps, it is two segments and a text after them."""
    text = engine.tokenizer.encode(f" window {number} of it.", add_special_tokens=False)
    first = engine.spec.first_timestamp_id
    if prompt[-1] == engine.spec.no_timestamps_id:
        # A model can write a timestamp although the prompt says not to.
        return [*text[:3], first + 7, *text[3:]]
    half = len(text) // 2
    return [first, *text[:half], first + 100, first + 100, *text[half:], first + 400, *text]


class WhisperEngine(FakeClient):
    """Gives each window the tokens of `script`, one in each output.

    Windows are numbered in the order in which their audio first came.

    Args:
        files: the model.
        script: returns the output of a window, without the end token.
        language: what a probe detects.

    Attributes:
        audio: the audio of each window that came so far.
        order: for each prompt, its window, and whether it was a probe.
        most: most prompts that ran at once.
        pause_s: seconds before each output.
        waits: prompts of windows do not end before `released` is set.
        on_loop: called by each prompt, on the event loop of the server.
    """

    def __init__(
        self, files: WhisperFiles, script: Script = words_of, language: str = "de", **model: object
    ) -> None:
        super().__init__((), tokenizer=files.tokenizer)
        values = {name: getattr(files.model, name) for name in files.model.__struct_fields__}
        self.model = ServedModel(**(values | model))
        self.spec = files.spec
        self.tokenizer: Tokenizer = files.tokenizer
        self.write = script
        self.language = language
        self.audio: list[PromptAudio] = []
        self.order: list[tuple[int, bool]] = []
        self.most = 0
        self.pause_s = 0.0
        self.waits = False
        self.error: Exception | None = None  # raised for prompts of windows
        self.probe_error: Exception | None = None
        self.on_loop: Callable[[], Awaitable[None]] | None = None

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        share: RequestShare = ALONE,
        trace: bool = False,
        deadline: float | None = None,
        prepared: PreparedParts | None = None,
        adapter: ServedAdapter | None = None,
    ) -> AsyncIterator[RequestOutput]:
        assert prepared is not None
        # The checks of the engine's client, and of the ledger.
        (request,) = make_requests(
            request_id, prompt_token_ids, sampling, self.model, parts=prepared, adapter=adapter
        )
        audio = request.audio
        assert audio is not None
        assert audio.digest.hex() in request.all_cache_keys
        assert len(audio.features) == 4 * audio.num_bins * audio.num_frames
        self.requests.append((prompt_token_ids, sampling, priority, cache_salt))
        self.deadlines.append(deadline)
        if audio not in self.audio:
            self.audio.append(audio)
        number = self.audio.index(audio)
        is_probe = sampling.transcript is None
        self.order.append((number, is_probe))
        if self.on_loop is not None:
            await self.on_loop()
        self.num_unfinished += 1
        self.most = max(self.most, self.num_unfinished)
        ended = False
        try:
            error = self.probe_error if is_probe else self.error
            if error is not None:
                raise error
            token_ids = self._probed(sampling) if is_probe else [
                *self.write(self, number, prompt_token_ids), self.spec.end_id
            ]  # fmt: skip
            token_ids = token_ids[: sampling.max_tokens]
            for count, token_id in enumerate(token_ids, 1):
                await asyncio.sleep(self.pause_s)
                while count == len(token_ids) and self.waits and not is_probe:
                    await asyncio.sleep(0.01)
                    if self.released.is_set():
                        break
                finish = FinishReason.stop if token_id == self.spec.end_id else FinishReason.length
                yield RequestOutput(
                    request_id=request_id,
                    index=0,
                    text_delta="",
                    new_token_ids=[token_id],
                    logprobs=_logprobs(sampling),
                    finish_reason=finish if count == len(token_ids) else None,
                    num_output_tokens=count,
                )
            ended = True
        finally:
            self.num_unfinished -= 1
            if not ended:
                self.aborted.append(request_id)

    def _probed(self, sampling: SamplingParams) -> list[int]:
        if sampling.allowed_token_ids is None:
            return [self.spec.end_id]
        wanted = self.spec.languages[self.language]
        assert wanted in sampling.allowed_token_ids
        return [wanted]


def _logprobs(sampling: SamplingParams) -> list[TokenLogprobs] | None:
    if sampling.logprobs is None:
        return None
    ids = list(sampling.logprob_token_ids or ())
    return [TokenLogprobs(-0.5, 1, ids, [math.log(NO_SPEECH)] * len(ids))]


class AudioServer:
    """A server in a thread of this process."""

    def __init__(self, engine: WhisperEngine, service: Service, url: str) -> None:
        self.engine = engine
        self.service = service
        self.url = url

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0


@contextmanager
def serving(
    engine: FakeClient, *, server: ServerConfig | None = None, audio: AudioConfig | None = None
) -> Iterator[AudioServer]:
    """Serve until the block ends, with the protocol of a real server."""
    config = with_keys(server or ServerConfig())
    service = Service(engine, config, SamplingSection(), audio=audio)
    service.admission.phase = None
    limits = ReceiveLimits.of(config, 100)
    http = uvicorn.Server(
        uvicorn.Config(
            create_app(service),
            http=functools.partial(  # pyright: ignore[reportArgumentType]
                HttpProtocol, limits=limits, count_refusal=service.metrics.count_refusal
            ),
            host="127.0.0.1",
            port=0,
            ws="none",
            log_config=None,
            lifespan="off",
        )
    )
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        while not http.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = http.servers[0].sockets[0].getsockname()[1]
        yield AudioServer(engine, service, f"http://127.0.0.1:{port}")
    finally:
        http.should_exit = True
        thread.join()
        service.close()


def post(server: AudioServer, path: str = TRANSCRIPTIONS, file: bytes = SHORT, **fields: Any):
    return httpx.post(
        server.url + path, files={"file": ("speech.wav", file)}, data=fields, timeout=240
    )


def refused(server: AudioServer, path: str = TRANSCRIPTIONS, **fields: Any) -> dict[str, Any]:
    reply = post(server, path, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == "invalid_request_error"
    return error


def prompts(server: AudioServer) -> list[list[str]]:
    """The prompts of windows, as tokens."""
    tokenizer = server.engine.tokenizer
    return [
        list(map(tokenizer.token, prompt))
        for (prompt, *_), (_, is_probe) in zip(
            server.engine.requests, server.engine.order, strict=True
        )
        if not is_probe
    ]
