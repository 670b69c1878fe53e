"""Messages between the API process and another machine that runs engines for it.

They are msgpack over an encrypted ZeroMQ connection (runtime/secure_connection.py), one for each
machine. `FromEngine` and `ToEngine` carry the messages of an engine process
(runtime/process/ipc.py) as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The versions that must be the same on all machines, because logits can depend on them."""
    made = made_by()
    return {"ostinato": version("ostinato"), "sources": made["sources"], "torch": made["torch"]}


class Join(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first message of a machine."""

    name: str  # the machine's name
    software: dict[str, str]


class Started(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An engine process was started."""

    engine: int
    pid: int


class FromEngine(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A message from an engine process."""

    engine: int
    data: bytes


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """An engine process has ended. All its messages were sent before."""

    engine: int
    return_code: int  # negative for a signal
    flight: bytes  # the file of its flight recorder; empty = there is none


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Sent several times a second while engines run on the machine."""

    cpu_seconds: dict[int, float]  # engine -> processor time so far
    stopped: list[int]  # engines whose process is stopped, as by SIGSTOP


NodeReport = Join | Started | FromEngine | Ended | Beat


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The machine has joined."""

    clock: float  # time.monotonic() of the sender


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The machine cannot join; the message is one line."""

    reason: str


class Spawn(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Start an engine process, or ranks of an engine whose first rank is on another machine."""

    engine: int  # the number of this process in later messages; no other process gets it
    # `StartEngine` or `StartRankHost` as JSON. The machine puts the device settings of `place` and
    # its own address into it.
    start: bytes
    place: int  # the part of the machine that the process gets, 0 to num_places - 1
    num_places: int  # number of equal parts of the machine
    is_rank_host: bool  # `start` is a `StartRankHost`


class ToEngine(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """A message for an engine process."""

    engine: int
    parts: Sequence[bytes]


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Send SIGKILL to an engine process."""

    engine: int


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The server ends."""


LeaderOrder = Welcome | Refused | Spawn | ToEngine | Kill | Leave

encode = msgspec.msgpack.Encoder().encode
order_decoder = msgspec.msgpack.Decoder(LeaderOrder)
report_decoder = msgspec.msgpack.Decoder(NodeReport)
