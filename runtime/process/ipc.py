"""What crosses the border between the API process and the engine process: msgpack over ZeroMQ."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.types.engine_info import EngineStats, ServedModel
from ostinato.runtime.types.outputs import SequenceOutput
from ostinato.runtime.types.request import Request

__all__ = (
    "AbortRequests",
    "AddRequest",
    "Call",
    "CallName",
    "CallReply",
    "ClientMessage",
    "EngineFailed",
    "EngineMessage",
    "EngineReady",
    "Inspect",
    "Inspected",
    "Phase",
    "Shutdown",
    "StepBegins",
    "StepNews",
    "client_decoder",
    "encoder",
    "engine_decoder",
)


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    request: Request


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    request_ids: list[str]


class CallName(StrEnum):
    """What may be asked of an engine besides requests."""

    reset_prefix_cache = "reset_prefix_cache"  # forget cached blocks, which nobody may be using
    start_profile = "start_profile"
    stop_profile = "stop_profile"


class Call(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A question, answered between two steps with a `CallReply`."""

    call_id: int
    name: CallName


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """End the process; what is running is aborted."""


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag=20, gc=False):
    """Somebody looks: answer with `Inspected` between two steps."""


ClientMessage = AddRequest | AbortRequests | Call | Shutdown | Inspect


class Phase(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A phase of the start is done."""

    name: str
    seconds: float


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    model: ServedModel
    stats: EngineStats


class StepNews(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """One message per step; also the heartbeat of an idle engine, without outputs."""

    outputs: list[SequenceOutput]
    stats: EngineStats | None
    # Positions that requests without an output have come to: chunks of a prompt, a beam search.
    progress: dict[str, int] = {}


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The engine ends; `at_start` tells a mistake of configuration from a fault in a step."""

    message: str
    at_start: bool


class StepBegins(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Before a step that admits requests or may take long: what it is, if it should be the last."""

    request_ids: list[str]  # that take part for the first time
    seconds: float  # that it should take by the step-cost table; 0 = not known, or not long


class Inspected(msgspec.Struct, frozen=True, array_like=True, tag=20, gc=False):
    state: EngineState


class CallReply(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """What came of a `Call`: a result, or with `is_refused` the reason why not."""

    call_id: int
    text: str
    is_refused: bool = False


EngineMessage = Phase | EngineReady | StepNews | EngineFailed | StepBegins | Inspected | CallReply

encoder = msgspec.msgpack.Encoder
client_decoder = msgspec.msgpack.Decoder(ClientMessage)
engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
