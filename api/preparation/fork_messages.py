"""The messages between `Preparer` and the forks that prepare requests."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import msgspec

from ostinato.api.preparation.generation import Generation
from ostinato.api.preparation.preparation import Arrival, Grant, PreparationSettings
from ostinato.runtime.types.audio import PromptAudio, PromptSound
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
    "with_data",
)

T = TypeVar("T")
Input = PromptImage | PromptAudio | PromptSound
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
    fetched: list[tuple[str, int]] = []  # URL and size of each fetched medium


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An InvalidRequestError, as a fork sends it to the server's process."""

    message: str
    param: str | None
    code: str | None
    status: int


class ForkAnswer(NamedTuple):
    """The first byte of a fork's answer. It says what follows."""

    result = b"+"  # JSON; if the function returns bytes, these bytes
    # The length of the JSON, the JSON without pixels and features, and these of all media. Equal
    # ones are there once.
    media = b"m"
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
    inputs = _inputs(result)
    if not inputs:
        return ForkAnswer.result + msgspec.json.encode(result)
    encoded = msgspec.json.encode(_with_inputs(result, [one.without_data() for one in inputs]))
    data = {one.digest: one.data for one in inputs}
    return b"".join([ForkAnswer.media, _LENGTH.pack(len(encoded)), encoded, *data.values()])


def split_result(view: memoryview) -> tuple[memoryview, memoryview]:
    """The JSON and the rest of an answer that begins with `ForkAnswer.media`.

    Args:
        view: the answer without this first byte.
    """
    (length,) = _LENGTH.unpack_from(view)
    return view[_LENGTH.size : _LENGTH.size + length], view[_LENGTH.size + length :]


async def with_data(result: T, data: memoryview) -> T:
    """A copy of a result with the pixels and features of its media. Other tasks run meanwhile.

    The digests are computed again, because a damaged decoder could name those of the media of
    others, and embeddings are shared by digest.

    Args:
        result: as `encode_result` has encoded it.
        data: the pixels or features of all media, one after the other. Equal ones are there once.

    Raises:
        RuntimeError: the answer of the fork contradicts itself.
    """
    complete: list[Input] = []
    known: dict[bytes, Input] = {}
    begin = 0
    for one in _inputs(result):
        earlier = known.get(one.digest)
        if earlier is not None and earlier.shape == one.shape:
            complete.append(one.with_data(earlier.data))
            continue
        end = begin + one.num_bytes
        try:
            own = await asyncio.to_thread(one.with_checked_data, bytes(data[begin:end]))
        except ValueError as error:
            raise RuntimeError("the process that prepares requests sent a wrong digest") from error
        known[one.digest] = own
        complete.append(own)
        begin = end
    if begin != len(data):
        raise RuntimeError("the process that prepares requests sent data of another size")
    return cast("T", _with_inputs(result, complete))


def _inputs(result: Any) -> list[Input]:
    """What the engine encodes for a prepared request."""
    if isinstance(result, _HasWindows):
        return [window.audio for window in result.windows]
    if not isinstance(result, _HasChat):
        return []
    generation = result.ready.generation
    return [*generation.images, *generation.sounds]


def _with_inputs(result: Any, inputs: Sequence[Input]) -> Any:
    """A copy with other `_inputs`."""
    replace = msgspec.structs.replace
    if isinstance(result, _HasWindows):
        pairs = zip(result.windows, inputs, strict=True)
        return replace(
            cast("Any", result),
            windows=[replace(cast("Any", one), audio=own) for one, own in pairs],
        )
    ready = result.ready
    generation = replace(
        ready.generation,
        images=[one for one in inputs if isinstance(one, PromptImage)],
        sounds=[one for one in inputs if isinstance(one, PromptSound)],
    )
    return replace(result, ready=replace(ready, generation=generation))
