"""Messages between the API process and another machine that runs engines for it.

They are msgpack over one ZeroMQ connection for each machine, which is encrypted
(node_connection.py). They carry the messages of an engine process as bytes
(runtime/process/ipc.py).
"""

from __future__ import annotations

from importlib.metadata import version

import msgspec

from ostinato.graphs.bundle import made_by

__all__ = (
    "Beat",
    "Ended",
    "FromEngine",
    "Join",
    "Kill",
    "LeaderOrder",
    "Leave",
    "NodeReport",
    "Refused",
    "Spawn",
    "Started",
    "ToEngine",
    "Welcome",
    "encode",
    "order_decoder",
    "report_decoder",
    "software",
)


def software() -> dict[str, str]:
    """What must be the same on all machines, because the bits of answers depend on it."""
    made = made_by()
    return {"ostinato": version("ostinato"), "sources": made["sources"], "torch": made["torch"]}


class Join(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first message of a machine."""

    name: str  # of the machine
    software: dict[str, str]


class Started(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An engine process was started."""

    engine: int
    pid: int


class FromEngine(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A message of an engine process."""

    engine: int
    data: bytes


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """An engine process has ended. All its messages were sent before."""

    engine: int
    return_code: int  # negative for a signal
    flight: bytes  # the file of its flight recorder; empty = there is none


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Sent while engines run."""

    cpu_seconds: dict[int, float]  # engine -> processor time so far
    stopped: list[int]  # engines whose process is stopped, as by SIGSTOP


NodeReport = Join | Started | FromEngine | Ended | Beat


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The machine has joined."""

    clock: float  # time.monotonic() of the sender


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The machine cannot join; one line that says why."""

    reason: str


class Spawn(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Start an engine process."""

    engine: int  # its number in further messages; no other process gets the same
    start: bytes  # `StartEngine` as one line of JSON; it does not know of parts of a machine
    place: int  # which part of the machine it gets, 0 to num_places - 1
    num_places: int  # equal parts that the machine has


class ToEngine(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """A message for an engine process."""

    engine: int
    data: bytes


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Send SIGKILL to an engine process."""

    engine: int


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The server ends."""


LeaderOrder = Welcome | Refused | Spawn | ToEngine | Kill | Leave

encode = msgspec.msgpack.Encoder().encode
order_decoder = msgspec.msgpack.Decoder(LeaderOrder)
report_decoder = msgspec.msgpack.Decoder(NodeReport)
