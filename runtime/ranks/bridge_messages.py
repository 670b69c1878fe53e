"""Messages of the bridges: the processes that connect the ranks of an engine on several machines.

Each `BridgeMessage` is msgpack.

- Rank 0 and the bridge on its machine exchange `StartBridge`, `Listening`, `UseEnds`, `Look` and
  `DumpStacks` over a Unix socket. Each message has its length before it.
- Two machines exchange `Hello`, `OpenLinks`, `ToRank`, `FromRank`, `Piece` and `Hidden`, and `Look`
  and `DumpStacks` that the bridge passes on. The ZeroMQ connection is encrypted
  (runtime/secure_connection.py). Four of these messages have a second part. In `ToRank` and
  `FromRank` it is a rank's message, in `Piece` it is values of a tensor-parallel group, and in
  `Hidden` it is hidden states.

Imports no torch.
"""

from __future__ import annotations

import msgspec

from ostinato.conf.engine_config import EngineConfig
from ostinato.ops.parallel.exchange import Exchange
from ostinato.runtime.ranks.link_ends import RankLayout, RelayEnds

__all__ = (
    "BridgeMessage",
    "DumpStacks",
    "FromRank",
    "Hello",
    "Hidden",
    "Listening",
    "Look",
    "OpenLinks",
    "Piece",
    "StartBridge",
    "StartRankHost",
    "ToRank",
    "UseEnds",
    "bridge_decoder",
    "encode",
    "encode_framed",
)

_LENGTH_BYTES = 4  # as `Frames` reads


class StartRankHost(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the ranks that a machine runs for an engine, as one line of JSON."""

    config: EngineConfig  # the engine's; `device` is the engine's part of this machine
    machine: int  # 1 to machines - 1
    address: str  # where the bridge of rank 0 listens
    token: str
    name: str  # the engine's name in logs
    log_level: str
    log_format: str


class StartBridge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The settings of the bridge of rank 0. The descriptors of the ranks' sockets come with it."""

    layout: RankLayout
    host: str  # the address at which it listens; empty = that of the default route
    token: str
    silence_s: float  # a machine that sends nothing for so many seconds counts as lost


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Says that the bridge of rank 0 can be reached, or why it cannot."""

    address: str
    error: str = ""


class UseEnds(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The links of the first machine have been made. Their descriptors come with this message."""

    ends: RelayEnds


class Look(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Says whether steps run from now on.

    While they run, the other machines report the state of their ranks.
    """

    is_on: bool


class DumpStacks(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Asks the other machines to let their ranks write stacks, and to send the stacks."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The first message of a machine that joins; the bridge answers with a `Hello` of machine 0."""

    machine: int
    name: str


class OpenLinks(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Tells another machine to make the links of its ranks, which then wait for `StartRank`."""

    slot_bytes: int  # bytes of a slot of each handoff
    exchange: Exchange  # nccl = each rank has a GPU


class ToRank(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """The second part is a message of rank 0 to another rank."""

    rank: int


class FromRank(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """The second part is a message of another rank to rank 0."""

    rank: int


class Piece(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    """The next values that a rank shares with its tensor-parallel group, in the second part."""

    stage: int
    place: int  # index of the rank in its group
    machines: list[int]  # the machines that get the values


class Hidden(msgspec.Struct, frozen=True, array_like=True, tag=11, gc=False):
    """The hidden states of the next step; the second part has their values."""

    stage: int  # the stage that computed them
    place: int  # index of the rank in its group
    machines: list[int]  # the machine that gets them; always one


BridgeMessage = (
    StartBridge
    | Listening
    | UseEnds
    | Look
    | DumpStacks
    | Hello
    | OpenLinks
    | ToRank
    | FromRank
    | Piece
    | Hidden
)

encode = msgspec.msgpack.Encoder().encode
bridge_decoder = msgspec.msgpack.Decoder(BridgeMessage)


def encode_framed(message: BridgeMessage) -> bytes:
    """A message with its length before it, as `Frames` reads it."""
    data = encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data
