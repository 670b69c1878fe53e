"""The messages between `Preparer` and the forks that prepare requests."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import msgspec

from ostinato.api.preparation.generation import Generation
from ostinato.api.preparation.preparation import Arrival, Grant, PreparationSettings
from ostinato.runtime.types.audio import PromptAudio
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import PromptImage

__all__ = (
    "ForkAnswer",
    "ForkJob",
    "ForkStart",
    "Refusal",
    "encode_job",
    "encode_result",
    "read_job",
    "split_result",
    "with_features",
    "with_pixels",
)

T = TypeVar("T")
Input = TypeVar("Input", PromptImage, PromptAudio)
_LENGTH = struct.Struct("<Q")


class ForkStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the fork server."""

    model: ServedModel
    chat_template: str | None
    settings: PreparationSettings


class ForkJob(msgspec.Struct, frozen=True, kw_only=True):
    """A request to prepare. In the message, a newline, what was fetched and the body follow."""

    function: str
    arrival: Arrival  # without `fetched`
    granted: Grant  # `Grant.text`: the fork prepares further requests
    fetched: list[tuple[str, int]] = []  # URL and size of each fetched image or video


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An InvalidRequestError, as a fork sends it to the server's process."""

    message: str
    param: str | None
    code: str | None
    status: int


class ForkAnswer(NamedTuple):
    """The first byte of a fork's answer. It says what follows."""

    result = b"+"  # JSON; if the function returns bytes, these bytes
    # The length of the JSON, the JSON without pixels, and the pixels of all images. Equal ones are
    # there once.
    images = b"i"
    audio = b"a"  # the same with the features of all windows of audio instead of pixels
    refusal = b"-"  # a `Refusal`
    own_fork = b"1"  # one byte: the number of the `Grant` that the request needs
    fetch = b"f"  # a JSON object: URL to fetch -> `FetchWanted`
    failure = b"!"  # the traceback of an unexpected error


class _Chat(Protocol):
    """The part of a prepared chat request that has its prompt."""

    @property
    def generation(self) -> Generation: ...


@runtime_checkable
class _HasChat(Protocol):
    """A prepared request of a chat API."""

    @property
    def ready(self) -> _Chat: ...


class _Window(Protocol):
    """The part of a window that has its spectrogram."""

    @property
    def audio(self) -> PromptAudio: ...


@runtime_checkable
class _HasWindows(Protocol):
    """A prepared request with audio."""

    @property
    def windows(self) -> list[_Window]: ...


def encode_job(
    function: str, arrival: Arrival, data: bytes | bytearray, *, granted: Grant
) -> list[bytes | bytearray]:
    """The parts of a job's bytes, for `read_job`."""
    fetched = arrival.fetched
    job = ForkJob(
        function=function,
        arrival=msgspec.structs.replace(arrival, fetched={}),
        granted=granted,
        fetched=[(url, len(body)) for url, body in fetched.items()],
    )
    return [msgspec.json.encode(job) + b"\n", *fetched.values(), data]


def read_job(job: bytes) -> tuple[ForkJob, bytes]:
    """The job, with what was fetched in its arrival, and the body."""
    begin = job.index(b"\n") + 1
    ordered = msgspec.json.decode(job[: begin - 1], type=ForkJob)
    fetched: dict[str, bytes] = {}
    for url, size in ordered.fetched:
        fetched[url] = job[begin : begin + size]
        begin += size
    arrival = msgspec.structs.replace(ordered.arrival, fetched=fetched)
    return msgspec.structs.replace(ordered, arrival=arrival), job[begin:]


def encode_result(result: Any) -> bytes:
    """The answer of a fork for the result of its function, for `split_result`.

    JSON needs a third more bytes for pixels, and decoding them would block the event loop. The same
    is true of the features of audio.
    """
    if isinstance(result, bytes):
        return ForkAnswer.result + result
    if isinstance(result, _HasWindows):
        windows = result.windows
        audio = [one.audio.without_data() for one in windows]
        encoded = msgspec.json.encode(_with_audio(result, audio))
        features = {one.audio.digest: one.audio.features for one in windows}
        return b"".join([ForkAnswer.audio, _LENGTH.pack(len(encoded)), encoded, *features.values()])
    images = _images(result)
    if not images:
        return ForkAnswer.result + msgspec.json.encode(result)
    bare = [image.without_data() for image in images]
    encoded = msgspec.json.encode(_with_images(result, bare))
    pixels = {image.digest: image.pixels for image in images}
    return b"".join([ForkAnswer.images, _LENGTH.pack(len(encoded)), encoded, *pixels.values()])


def split_result(view: memoryview) -> tuple[memoryview, memoryview]:
    """The JSON and the rest of an answer that begins with `ForkAnswer.images` or `.audio`.

    Args:
        view: the answer without this first byte.
    """
    (length,) = _LENGTH.unpack_from(view)
    return view[_LENGTH.size : _LENGTH.size + length], view[_LENGTH.size + length :]


async def with_pixels(result: T, pixels: memoryview) -> T:
    """A copy of a result with the pixels of its images. Other tasks run meanwhile.

    The digests are computed again, because a damaged decoder could name those of the images of
    others, and embeddings are shared by digest.

    Args:
        result: as `encode_result` has encoded it.
        pixels: the pixels of all images, one after the other. Equal ones are there once.

    Raises:
        RuntimeError: the answer of the fork contradicts itself.
    """
    return cast("T", _with_images(result, await _completed(_images(result), pixels)))


async def with_features(result: T, features: memoryview) -> T:
    """A copy of a result with the features of its windows of audio. Other tasks run meanwhile.

    The digests are computed again; see `with_pixels`.

    Args:
        result: as `encode_result` has encoded it.
        features: the features of all windows, one after the other. Equal ones are there once.

    Raises:
        RuntimeError: the answer of the fork contradicts itself.
    """
    bare = [window.audio for window in cast("_HasWindows", result).windows]
    return cast("T", _with_audio(result, await _completed(bare, features)))


async def _completed(bare: Sequence[Input], data: memoryview) -> list[Input]:
    """Images or audio with their data. Equal ones share it."""
    complete: list[Input] = []
    known: dict[bytes, Input] = {}
    begin = 0
    for one in bare:
        earlier = known.get(one.digest)
        if earlier is not None and earlier.shape == one.shape:
            complete.append(cast("Input", one.with_data(earlier.data)))
            continue
        end = begin + one.num_bytes
        try:
            own = await asyncio.to_thread(one.with_checked_data, bytes(data[begin:end]))
        except ValueError as error:
            raise RuntimeError("the process that prepares requests sent a wrong digest") from error
        known[one.digest] = cast("Input", own)
        complete.append(known[one.digest])
        begin = end
    if begin != len(data):
        raise RuntimeError("the process that prepares requests sent data of another size")
    return complete


def _with_audio(result: Any, audio: list[PromptAudio]) -> Any:
    replace = msgspec.structs.replace
    pairs = zip(result.windows, audio, strict=True)
    return replace(result, windows=[replace(window, audio=own) for window, own in pairs])


def _images(result: Any) -> list[PromptImage]:
    return result.ready.generation.images if isinstance(result, _HasChat) else []


def _with_images(result: Any, images: list[PromptImage]) -> Any:
    replace = msgspec.structs.replace
    ready = result.ready
    generation = replace(ready.generation, images=images)
    return replace(result, ready=replace(ready, generation=generation))
