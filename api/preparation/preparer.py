"""Prepares requests: small ones on the event loop, others in forks of a process with the tokenizer.

The event loop prepares only requests of up to 4 KiB, so no request waits long for the preparation
of another. A fork has limits of processor time and memory, and ends when its client disconnects.

A fork costs 20 to 40 ms, several times the time of preparing 12 kB. So a few forks stay, and each
of them prepares many requests of up to 256 KiB, one after the other. A larger request, and a
request with a template of its own, gets a new fork, which ends after this request. So its memory
returns to the system, and a template cannot affect another request. At most 8 forks work at a time
for small requests, 2 for large requests, and 2 for templates of small requests. The forks for large
requests and templates have a lower priority.

A request with images gets a new fork too, because it needs much memory, and because decoders of
images have had faults that gave their process away. At most 4 of these forks work at a time, and 2
more for requests with videos, which can take a minute.

What a request has is known when its body is decoded, which a fork does. So each fork has a `Grant`,
and ends before it renders or decodes what its grant does not allow. Then the request gets a fork
with the grant that it needs, in the turns for this grant.

If media must be fetched, the first fork only says which. Then the event loop fetches
them, and a new fork prepares the request. At most 2 requests with fetched videos are between the
beginning of the fetch and the end of the preparation, because their videos are in memory meanwhile.

A request with audio, in a form or in a conversation, gets a new fork for the same reasons. At most
2 of these forks work at a time for requests up to 1 MiB, and 2 for larger ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec

from ostinato.api.base.errors import UnavailableError
from ostinato.api.preparation.fork_limits import LARGE_BYTES, first_grant, fork_limits
from ostinato.api.preparation.fork_messages import (
    ForkAnswer,
    ForkStart,
    Refusal,
    encode_job,
    split_result,
    with_data,
)
from ostinato.api.preparation.preparation import (
    Arrival,
    FetchNeededError,
    ForkNeededError,
    Grant,
    Preparation,
    PreparationSettings,
)
from ostinato.api.preparation.prompt_encoder import TextSource
from ostinato.api.preparation.turns import decoder_in_turns
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.forks.fork_server import ForkServer, JobError
from ostinato.runtime.media.prompt_media import FetchWanted, MediaLimits
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.sandbox import Fault

if TYPE_CHECKING:
    from ostinato.runtime.media.fetch_media import MediaFetcher

__all__ = ("Body", "Prepare", "Preparer")

_LOG = logging.getLogger("ostinato.api")
T = TypeVar("T")
Body = bytes | bytearray
Prepare = Callable[[Preparation, bytes, Arrival], T]
"""A function that prepares requests, from the table in `FORK_MODULE`.

Its result is sent from the fork to this process as JSON.
"""

FORK_MODULE = "ostinato.api.server.preparation_main"
# A body up to this size is prepared on the event loop. 1000 prompts of one letter take 10 to 20 ms,
# the longest of all that were measured.
_INLINE_BYTES = 4096
_SHORT_AUDIO_BYTES = 1 << 20
_NUM_TRIES = 3  # a job is tried this many times, unless it exceeds a limit of time or memory


class Preparer:
    """Prepares requests. All methods run on one event loop.

    Args:
        source: the model and its tokenizer; set when the engine has started.
        settings: the settings of the server.
        fetcher: fetches media; None = made when the first of them is fetched.
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
        self._template_turns = asyncio.Semaphore(2)  # small requests with templates
        self._image_turns = asyncio.Semaphore(4)
        self._video_turns = asyncio.Semaphore(2)
        self._audio_turns = asyncio.Semaphore(2)
        self._short_audio_turns = asyncio.Semaphore(2)  # requests up to `_SHORT_AUDIO_BYTES`
        self._fetcher = fetcher
        # Requests with videos that are fetched or were fetched. It is taken before the turns.
        self._video_fetches = asyncio.Semaphore(2)

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
                a medium cannot be fetched.
            UnavailableError: no process could prepare the request.
            RuntimeError: `prepare` raised an unexpected error. The text has its traceback.
        """
        granted = first_grant(data, _size(data, arrival), arrival, self._source.model)
        try:
            return await self._in_forks(prepare, data, arrival, granted)
        except FetchNeededError as error:
            wanted = error.wanted
        kinds = {one.kind for one in wanted.values()}
        if MediaKind.video in kinds:
            async with self._video_fetches:
                return await self._with_fetched(prepare, data, arrival, wanted, Grant.videos)
        granted = Grant.images if MediaKind.image in kinds else Grant.audio
        return await self._with_fetched(prepare, data, arrival, wanted, granted)

    async def _with_fetched(
        self,
        prepare: Prepare[T],
        data: Body,
        arrival: Arrival,
        wanted: Mapping[str, FetchWanted],
        granted: Grant,
    ) -> T:
        """The result of `prepare` with the media that it wants."""
        fetched = await (await self._fetches()).fetch(wanted)
        arrival = msgspec.structs.replace(arrival, fetched=fetched)
        return await self._in_forks(prepare, data, arrival, granted)

    async def _in_forks(
        self, prepare: Prepare[T], data: Body, arrival: Arrival, granted: Grant
    ) -> T:
        """The result of `prepare`, from a fork with the grant, or with a larger one if needed.

        Raises:
            FetchNeededError: media must be fetched first.
        """
        while True:
            try:
                async with self._turns_for(granted, _size(data, arrival) + _fetched(arrival)):
                    return await self._fork(prepare, data, arrival, granted)
            except ForkNeededError as error:
                if error.needed <= granted:
                    raise RuntimeError(
                        "the process that prepares requests asked for a grant that it has"
                    ) from error
                granted = error.needed

    def _turns_for(self, granted: Grant, size: int) -> asyncio.Semaphore:
        """The turns of forks with a grant for requests of `size` bytes, with what was fetched."""
        match granted:
            case Grant.text:
                return self._turns
            case Grant.template:
                return self._large_turns if size > LARGE_BYTES else self._template_turns
            case Grant.audio:
                is_short = size <= _SHORT_AUDIO_BYTES
                return self._short_audio_turns if is_short else self._audio_turns
            case Grant.images:
                return self._image_turns
            case Grant.videos:
                return self._video_turns

    async def _fetches(self) -> MediaFetcher:
        if self._fetcher is None:
            # The HTTP client takes a tenth of a second to import, so it is imported on a thread.
            self._fetcher = await asyncio.to_thread(_make_fetcher, self._settings.media)
        return self._fetcher

    def close(self) -> None:
        """End the fork server."""
        self._forks.close()

    async def _fork(self, prepare: Prepare[T], data: Body, arrival: Arrival, granted: Grant) -> T:
        size = _size(data, arrival)
        limits = fork_limits(granted, size, arrival, self._source.model, self._settings)
        job = encode_job(prepare.__name__, arrival, data, granted=granted)
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


def _fetched(arrival: Arrival) -> int:
    """Bytes of the media that were fetched."""
    return sum(map(len, arrival.fetched.values()))


def _make_fetcher(limits: MediaLimits) -> MediaFetcher:
    from ostinato.runtime.media.fetch_media import MediaFetcher

    return MediaFetcher(limits)


def _raise_for(error: JobError, *, is_last: bool) -> None:
    """Raise an error for the client. Returns if the job is to be tried again."""
    if error.reason.fault is Fault.job:
        part = error.part or "the body"
        # The name of a medium begins with that of its field.
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
    if kind == ForkAnswer.media:
        encoded, data = split_result(view)
        return await with_data(await _decoder(prepare)(encoded), data)
    if kind == ForkAnswer.refusal:
        refusal = msgspec.json.decode(view, type=Refusal)
        raise InvalidRequestError(
            refusal.message, param=refusal.param, code=refusal.code, status=refusal.status
        )
    if kind == ForkAnswer.own_fork:
        raise ForkNeededError(Grant(view[0]))
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
