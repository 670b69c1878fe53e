"""Messages between the API process and an engine process: msgpack over a ZeroMQ socket."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from ostinato.conf.engine_config import EngineConfig
from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.engine_info import EngineStats, ServedModel
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.outputs import SequenceOutput
from ostinato.runtime.types.request import Request

__all__ = (
    "AbortRequests",
    "AddRequest",
    "ClientMessage",
    "EngineFailed",
    "EngineMessage",
    "EngineOutputs",
    "EngineReady",
    "GetState",
    "LastParts",
    "LoadAdapter",
    "Phase",
    "RanksWanted",
    "Shutdown",
    "StartEngine",
    "State",
    "StepStarted",
    "UtilityCall",
    "UtilityName",
    "UtilityReply",
    "attach_data",
    "client_decoder",
    "detach_data",
    "encoder",
    "engine_decoder",
    "first_decoder",
    "with_repetition",
    "without_repetition",
)


class StartEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an engine process, sent as one line of JSON to its standard input.

    It has only those settings of the server that the process needs, and no secrets.
    """

    config: EngineConfig
    name: str  # the name of the process in its log
    log_level: str
    log_format: str  # text | json
    flight_recorder_steps: int  # steps that the flight recorder keeps; 0 = no recorder
    profile_dir: str  # where profiles are written; empty = profiling is refused
    # The time.monotonic() of the client's machine minus that of the engine's machine, in seconds.
    clock_offset_s: float = 0.0


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Queue a request.

    A grammar, images or sounds can take megabytes, and all completions of a prompt have the same.
    So a request is sent without its grammar if this is the grammar that was sent last, and without
    its images and sounds if these are the ones that were sent last.
    """

    request: Request
    repeats_grammar: bool = False  # the request has the grammar that was sent last
    repeats_media: bool = False  # the request has the images and sounds that were sent last


class LastParts(NamedTuple):
    """The large parts of requests that crossed a connection last."""

    grammar: str = ""  # empty = none
    # Never changed; of the last request.
    images: list[PromptImage] = []  # noqa: RUF012
    sounds: list[PromptSound] = []  # noqa: RUF012

    def after(self, request: Request) -> LastParts:
        """The parts when a request has crossed the connection."""
        return LastParts(request.grammar or self.grammar, request.images, request.sounds)

    def has_media(self, request: Request) -> bool:
        """Whether a request has images or sounds, and these crossed the connection last."""
        same = request.images == self.images and request.sounds == self.sounds
        return bool(request.images or request.sounds) and same


def without_repetition(message: ClientMessage, last: LastParts) -> tuple[ClientMessage, LastParts]:
    """Remove repeated parts from a message. `with_repetition` puts them back.

    Args:
        message: the message.
        last: the parts that were sent before.

    Returns:
        The message to send, and `last` for the next call.
    """
    if not isinstance(message, AddRequest):
        return message, last
    request = message.request
    repeats_grammar = bool(request.grammar) and request.grammar == last.grammar
    repeats_media = last.has_media(request)
    if not (repeats_grammar or repeats_media):
        return message, last.after(request)
    bare = msgspec.structs.replace(
        request,
        grammar="" if repeats_grammar else request.grammar,
        images=[] if repeats_media else request.images,
        sounds=[] if repeats_media else request.sounds,
    )
    return AddRequest(bare, repeats_grammar, repeats_media), last.after(request)


def with_repetition(message: ClientMessage, last: LastParts) -> tuple[ClientMessage, LastParts]:
    """Undo `without_repetition` on the receiving side.

    Args:
        message: the received message.
        last: the parts that were received before.

    Returns:
        The message with all its parts, and `last` for the next call.
    """
    if not isinstance(message, AddRequest):
        return message, last
    request = message.request
    if message.repeats_grammar or message.repeats_media:
        request = msgspec.structs.replace(
            request,
            grammar=last.grammar if message.repeats_grammar else request.grammar,
            images=last.images if message.repeats_media else request.images,
            sounds=last.sounds if message.repeats_media else request.sounds,
        )
        message = AddRequest(request)
    return message, last.after(request)


def detach_data(message: ClientMessage) -> tuple[ClientMessage, list[bytes]]:
    """Take pixels and features out of a message. `attach_data` puts them back.

    They are sent as parts of their own, because encoding them would copy them twice on the event
    loop. Equal ones are sent once.

    Returns:
        The message to encode, and the other parts.
    """
    if not isinstance(message, AddRequest) or not message.request.encoded_inputs:
        return message, []
    data = {one.digest: one.data for one in message.request.encoded_inputs}
    bare = msgspec.structs.replace(message, request=message.request.without_data())
    return bare, list(data.values())


def attach_data(message: ClientMessage, data: Sequence[bytes]) -> ClientMessage:
    """Undo `detach_data` on the receiving side.

    Args:
        message: the decoded first part.
        data: the other parts.
    """
    if not isinstance(message, AddRequest) or not data:
        return message
    request = message.request
    digests = dict.fromkeys(one.digest for one in request.encoded_inputs)
    found = dict(zip(digests, data, strict=True))
    replace = msgspec.structs.replace
    audio = request.audio
    if audio is not None:
        audio = audio.with_data(found[audio.digest])
    images = [image.with_data(found[image.digest]) for image in request.images]
    sounds = [sound.with_data(found[sound.digest]) for sound in request.sounds]
    return replace(message, request=replace(request, images=images, audio=audio, sounds=sounds))


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """End requests."""

    request_ids: list[str]


class UtilityName(StrEnum):
    """The names of utility calls."""

    reset_prefix_cache = "reset_prefix_cache"  # refused while sequences hold blocks
    start_profile = "start_profile"
    stop_profile = "stop_profile"


class UtilityCall(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Asks the engine to execute a utility between two steps and to send a `UtilityReply`."""

    call_id: int
    name: UtilityName


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Asks the engine to load an adapter into a slot. Its former content is replaced.

    Other messages are handled meanwhile. When the load has ended, the engine sends a
    `UtilityReply`, which is refused if the adapter cannot be loaded.
    """

    call_id: int
    slot: int
    path: str  # the directory of the adapter's files, on the engine's machine
    digest: str  # `ServedAdapter.digest`


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Asks the engine to abort all requests and end its process."""


class GetState(msgspec.Struct, frozen=True, array_like=True, tag=20, gc=False):
    """Asks the engine to send a `State` between two steps."""


ClientMessage = AddRequest | AbortRequests | UtilityCall | LoadAdapter | Shutdown | GetState


class Phase(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A phase of the start has finished."""

    name: str
    seconds: float


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The engine has started and serves."""

    model: ServedModel
    stats: EngineStats


class EngineOutputs(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The outputs of a step. An idle engine sends it without outputs, as its heartbeat."""

    outputs: list[SequenceOutput]
    stats: EngineStats | None
    # Request id -> positions computed so far, for requests whose steps gave no output: prompts in
    # chunks, beam searches.
    progress: dict[str, int] = {}


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The engine process ends because of an error."""

    message: str  # one line
    at_start: bool  # the engine was not ready yet
    # If a rank's process ended or hung: killed, crash, exit or hang. A lost machine counts as
    # killed. Any other error: error.
    reason: str = "error"


class StepStarted(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Sent before a step that admits requests, or that computes prompts for more than 0.25 s.

    The 0.25 s are compared with the prediction. Before a step that only decodes, the message is not
    sent. It is sent before a utility call too. If the engine dies in an announced step, the client
    has the ids of the requests that were running. The watchdog gives the step more time if
    `seconds` is large.
    """

    request_ids: list[str]  # requests that take part in a step for the first time
    seconds: float  # predicted by the step-cost table; 0 = not known


class State(msgspec.Struct, frozen=True, array_like=True, tag=20, gc=False):
    """The answer to `GetState`."""

    state: EngineState


class UtilityReply(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The result of a `UtilityCall` or a `LoadAdapter`.

    With `is_refused` the text is the reason for the refusal.
    """

    call_id: int
    text: str
    is_refused: bool = False


class RanksWanted(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The first message of an engine with ranks on other machines. Says where these ranks join."""

    address: str
    token: str


EngineMessage = (
    Phase | EngineReady | EngineOutputs | EngineFailed | StepStarted | State | UtilityReply
)

encoder = msgspec.msgpack.Encoder
client_decoder = msgspec.msgpack.Decoder(ClientMessage)
engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
first_decoder = msgspec.msgpack.Decoder(EngineMessage | RanksWanted)
