"""What crosses the border between the API process and the engine process: msgpack over ZeroMQ."""

from __future__ import annotations

import msgspec

from ostinato.runtime.engine_state import EngineState
from ostinato.runtime.types import EngineStats, Request, SequenceOutput, ServedModel

__all__ = (
    "AbortRequests",
    "AddRequest",
    "ClientMessage",
    "EngineFailed",
    "EngineMessage",
    "EngineReady",
    "Inspect",
    "Inspected",
    "Phase",
    "ResetPrefixCache",
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


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Forget cached blocks as soon as no sequence uses any."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """End the process; what is running is aborted."""


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag=20, gc=False):
    """Somebody looks: answer with `Inspected` between two steps."""


ClientMessage = AddRequest | AbortRequests | ResetPrefixCache | Shutdown | Inspect


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


EngineMessage = Phase | EngineReady | StepNews | EngineFailed | StepBegins | Inspected

encoder = msgspec.msgpack.Encoder
client_decoder = msgspec.msgpack.Decoder(ClientMessage)
engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
