"""Prepares requests: small ones on the event loop, others in forks of a process with the tokenizer.

The event loop prepares only requests that take a few milliseconds, so no request waits long for the
preparation of another. A fork has limits of processor time and memory, and ends when its client
disconnects.

A fork costs 20 to 40 ms, several times the time of preparing 12 kB. So a few forks stay, and each
of them prepares many requests of up to 256 KiB, one after the other. A larger request, and a
request with a template of its own, gets a new fork, which ends after this request. So its memory
returns to the system, and a template cannot affect another request. At most 8 forks work at a time
for small requests, 2 for large requests, and 2 for templates. The forks for large requests and
templates have a lower priority.

A request with images gets a new fork too, because it needs much memory, and because decoders of
images have had faults that gave their process away. At most 4 of these forks work at a time, and 2
more for requests with videos, which can take a minute. If images or videos must be fetched, the
first fork only says which. Then the event loop fetches them, and a new fork prepares the request.

A form has audio and gets a new fork for the same reasons. At most 2 of these forks work at a time
for forms up to 1 MiB, and 2 for larger ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec

from ostinato.api.base.errors import UnavailableError
from ostinato.api.preparation.fork_messages import (
    ForkAnswer,
    ForkStart,
    Refusal,
    encode_job,
    split_result,
    with_features,
    with_pixels,
)
from ostinato.api.preparation.preparation import (
    Arrival,
    FetchNeededError,
    ForkNeededError,
    Preparation,
    PreparationSettings,
)
from ostinato.api.preparation.prompt_encoder import TextSource
from ostinato.api.preparation.turns import decoder_in_turns
from ostinato.models.vision.video_spec import FRAMES_OF_PAIR
from ostinato.runtime.audio.audio_inputs import max_audio_memory
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.forks.fork_server import ForkServer, JobError, JobLimits
from ostinato.runtime.images.prompt_media import FetchWanted, MediaLimits
from ostinato.runtime.sandbox import Fault
from ostinato.runtime.video.video_inputs import max_video_memory

if TYPE_CHECKING:
    from ostinato.runtime.images.fetch_media import MediaFetcher

__all__ = ("Body", "Prepare", "Preparer")

_LOG = logging.getLogger("ostinato.api")
T = TypeVar("T")
Body = bytes | bytearray
Prepare = Callable[[Preparation, bytes, Arrival], T]
"""A function that prepares requests, from the table in `FORK_MODULE`.

Its result is sent from the fork to this process as JSON.
"""

FORK_MODULE = "ostinato.api.server.preparation_main"
# A body up to this size is prepared on the event loop. This takes about 5 ms at most.
_INLINE_BYTES = 4096
_LARGE_BYTES = 256 << 10
_SHORT_AUDIO_BYTES = 1 << 20
_NICENESS = 10  # the niceness of forks for large requests and for templates
# These begin a key or a type of every part with an image (image, image_url) or a video (video_url).
_IMAGE_KEY = b'"image'
_VIDEO_KEY = b'"video'
_NUM_TRIES = 3  # a job is tried this many times, unless it exceeds a limit of time or memory
# The memory for a body: its values, its text in several encodings, and its tokens.
_LEAST_MEMORY = 512 << 20
_MEMORY_PER_BYTE = 160
# The memory for one pixel of an image as it is sent: decoded, converted and rotated, 4 bytes each.
_MEMORY_PER_PIXEL = 16
# The memory for one pixel of a prepared image: several copies of 3 bytes.
_MEMORY_PER_PREPARED_PIXEL = 16
# A fork has so many copies of a form at once, and so many of its features.
_COPIES_OF_FORM = 6
_COPIES_OF_FEATURES = 2


class Preparer:
    """Prepares requests. All methods run on one event loop.

    Args:
        source: the model and its tokenizer; set when the engine has started.
        settings: the settings of the server.
        fetcher: fetches images and videos; None = made when the first of them is fetched.
    """

    def __init__(
        self,
        source: TextSource,
        settings: PreparationSettings,
        fetcher: MediaFetcher | None = None,
    ) -> None:
        self._source = source
        self._settings = settings
        self._inline = Preparation(source, settings)
        self._forks = ForkServer(FORK_MODULE, self._fork_start)
        self._turns = asyncio.Semaphore(8)
        self._large_turns = asyncio.Semaphore(2)
        self._own_turns = asyncio.Semaphore(2)  # small requests that need forks of their own
        self._image_turns = asyncio.Semaphore(4)  # both, if the model takes images
        self._video_turns = asyncio.Semaphore(2)
        self._audio_turns = asyncio.Semaphore(2)
        self._short_audio_turns = asyncio.Semaphore(2)  # files up to `_SHORT_AUDIO_BYTES`
        self._fetcher = fetcher

    def launch(self) -> None:
        """Launch the fork server, which takes half a second for its imports.

        If it cannot be launched, `start` tries again.
        """
        _try(self._forks.launch)

    def start(self) -> None:
        """Have the fork server load the tokenizer. Called when the model is known.

        If the fork server cannot be started, the next request that needs it tries again.
        """
        _try(self._forks.start)

    def run_inline(self, prepare: Prepare[T], data: Body, arrival: Arrival) -> T | None:
        """The result of `prepare` for a small request; None = the request needs a fork.

        Raises:
            InvalidRequestError: `prepare` refuses the request.
        """
        if _size(data, arrival) > _INLINE_BYTES:
            return None
        try:
            return prepare(self._inline, bytes(data), arrival)
        except (ForkNeededError, FetchNeededError):
            return None

    async def run_apart(self, prepare: Prepare[T], data: Body, arrival: Arrival) -> T:
        """The result of `prepare` in a fork. Media are fetched. Cancelling the call ends the work.

        Raises:
            InvalidRequestError: `prepare` refuses the request, it takes too much time or memory, or
                an image or a video cannot be fetched.
            UnavailableError: no process could prepare the request.
            RuntimeError: `prepare` raised an unexpected error. The text has its traceback.
        """
        try:
            return await self._in_forks(prepare, data, arrival)
        except FetchNeededError as error:
            wanted = error.wanted
        fetched = await (await self._fetches()).fetch(wanted)
        arrival = msgspec.structs.replace(arrival, fetched=fetched)
        return await self._in_forks(prepare, data, arrival)

    async def _in_forks(self, prepare: Prepare[T], data: Body, arrival: Arrival) -> T:
        """The result of `prepare`, from a shared fork or a fork of its own.

        Raises:
            FetchNeededError: images or videos must be fetched first.
        """
        if arrival.content_type:
            is_short = len(data) <= _SHORT_AUDIO_BYTES
            async with self._short_audio_turns if is_short else self._audio_turns:
                limits = JobLimits(self._audio_memory(data), niceness=_NICENESS)
                return await self._fork(prepare, data, arrival, limits)
        size, spec = _size(data, arrival), self._source.model.images
        turns = self._large_turns
        # A request with media does not visit a shared fork first, which would refuse it.
        has_videos = spec is not None and spec.video is not None and _VIDEO_KEY in data
        has_images = spec is not None and (_IMAGE_KEY in data or bool(arrival.fetched))
        if size <= _LARGE_BYTES and not has_images and not has_videos:
            turns = self._own_turns
            with contextlib.suppress(ForkNeededError):
                async with self._turns:
                    limits = JobLimits(_memory(size), is_shared=True)
                    return await self._fork(prepare, data, arrival, limits)
        if spec is not None:
            turns = self._video_turns if has_videos else self._image_turns
        async with turns:
            memory = _memory(size) + self._media_memory(arrival, has_videos=has_videos)
            limits = JobLimits(memory, niceness=_NICENESS)
            return await self._fork(prepare, data, arrival, limits)

    def _media_memory(self, arrival: Arrival, *, has_videos: bool) -> int:
        """Bytes of memory for the media of a request; 0 if the model takes none."""
        model = self._source.model
        spec = model.images
        if spec is None:
            return 0
        prepared = model.image_cache_tokens + spec.max_tokens  # one image is prepared before a 400
        pixels = prepared * spec.unit**2
        decoding = _MEMORY_PER_PIXEL * self._settings.images.max_pixels
        if has_videos:
            pixels *= FRAMES_OF_PAIR
            images, video = self._settings.media
            decoding = max(decoding, max_video_memory(images, video))
        fetched = sum(map(len, arrival.fetched.values()))
        return decoding + _MEMORY_PER_PREPARED_PIXEL * pixels + 3 * fetched

    def _audio_memory(self, data: Body) -> int:
        """Bytes of memory for a form with audio."""
        spec = self._source.model.audio
        decoded = 0 if spec is None else max_audio_memory(spec, self._settings.audio)
        return _LEAST_MEMORY + _COPIES_OF_FORM * len(data) + _COPIES_OF_FEATURES * decoded

    async def _fetches(self) -> MediaFetcher:
        if self._fetcher is None:
            # The HTTP client takes a tenth of a second to import, so it is imported on a thread.
            self._fetcher = await asyncio.to_thread(_make_fetcher, self._settings.media)
        return self._fetcher

    def close(self) -> None:
        """End the fork server."""
        self._forks.close()

    async def _fork(
        self, prepare: Prepare[T], data: Body, arrival: Arrival, limits: JobLimits
    ) -> T:
        job = encode_job(prepare.__name__, arrival, data, is_shared=limits.is_shared)
        for number in range(_NUM_TRIES):
            try:
                answer = await self._forks.call(job, limits)
            except JobError as error:
                _raise_for(error, is_last=number + 1 == _NUM_TRIES)
            else:
                return await _read_answer(prepare, answer)
        raise AssertionError("the last try has a result or raises")

    def _fork_start(self) -> bytes:
        """The first message of the fork server."""
        tokenizer = self._source.tokenizer
        template = None if tokenizer is None else tokenizer.chat_template
        start = ForkStart(
            model=self._source.model,
            chat_template=None if template is None else template.source,
            settings=self._settings,
        )
        return msgspec.json.encode(start)


def _try(start: Callable[[], None]) -> None:
    """Start a process; log why it cannot be started."""
    try:
        start()
    except JobError as error:
        _LOG.warning("the process that prepares requests %s", error.reason.text)


def _size(data: Body, arrival: Arrival) -> int:
    stored = arrival.stored_messages
    return len(data) + (0 if stored is None else memoryview(stored).nbytes)


def _memory(size: int) -> int:
    """Bytes of memory for the preparation of a body of `size` bytes."""
    return _LEAST_MEMORY + _MEMORY_PER_BYTE * size


def _make_fetcher(limits: MediaLimits) -> MediaFetcher:
    from ostinato.runtime.images.fetch_media import MediaFetcher

    return MediaFetcher(limits)


def _raise_for(error: JobError, *, is_last: bool) -> None:
    """Raise an error for the client. Returns if the job is to be tried again."""
    if error.reason.fault is Fault.job:
        part = error.part or "the body"
        # The name of an image or a video begins with that of its field.
        param = None if part == "the body" else part.partition(":")[0]
        raise InvalidRequestError(
            f"{part} takes {error.reason.text}; make it simpler or shorter",
            param=param,
            code="invalid_value" if param == "chat_template" else "request_too_large",
        ) from error
    _LOG.warning("the process that prepares a request %s", error.reason.text)
    if is_last:
        raise UnavailableError(
            f"the request cannot be prepared now: the process for it {error.reason.text}; try"
            " again later",
            code="helper_process",
        ) from error


async def _read_answer(prepare: Prepare[T], answer: bytes | bytearray) -> T:
    kind, view = answer[:1], memoryview(answer)[1:]
    if kind == ForkAnswer.result:
        return await _decoder(prepare)(view)
    if kind == ForkAnswer.images:
        encoded, pixels = split_result(view)
        return await with_pixels(await _decoder(prepare)(encoded), pixels)
    if kind == ForkAnswer.audio:
        encoded, features = split_result(view)
        return await with_features(await _decoder(prepare)(encoded), features)
    if kind == ForkAnswer.refusal:
        refusal = msgspec.json.decode(view, type=Refusal)
        raise InvalidRequestError(
            refusal.message, param=refusal.param, code=refusal.code, status=refusal.status
        )
    if kind == ForkAnswer.own_fork:
        raise ForkNeededError
    if kind == ForkAnswer.fetch:
        raise FetchNeededError(msgspec.json.decode(view, type=dict[str, FetchWanted]))
    raise RuntimeError(f"preparing a request failed:\n{str(view, 'utf-8')}")


@cache
def _decoder(prepare: Prepare[Any]) -> Callable[[memoryview], Awaitable[Any]]:
    """The decoder of a function's results, chosen by the annotation of its return value."""
    result = get_type_hints(prepare)["return"]
    return _unchanged if result is bytes else decoder_in_turns(result)


async def _unchanged(view: memoryview) -> bytes:
    return bytes(view)
