"""The ranks of an engine on a further machine: `python -m ...rank_host_main ADDRESS < start.json`.

`run rank` starts it when the ranks of an engine are divided among machines. It starts the ranks of
this machine, joins the bridge of rank 0 (bridge_main.py) and passes on what the ranks send and
exchange. When the connection or the standard input closes, the ranks and this process end. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import replace

import msgspec
import zmq

from ostinato.ops.parallel.exchange import Exchange
from ostinato.runtime.host_resources import available_cores, free_host_memory
from ostinato.runtime.process.ipc import EngineFailed
from ostinato.runtime.process.log_format import configure_logging
from ostinato.runtime.process.parent_death import end_with_standard_input
from ostinato.runtime.ranks.bridge_messages import (
    BridgeMessage,
    DumpStacks,
    FromRank,
    Hello,
    Hidden,
    Look,
    OpenLinks,
    Piece,
    StartRankHost,
    ToRank,
    bridge_decoder,
    encode,
)
from ostinato.runtime.ranks.link_ends import RankLayout, close_all, create_links
from ostinato.runtime.ranks.messages import (
    Frames,
    RankEnded,
    RankMessage,
    RankSeen,
    RankStack,
    StartRank,
    encode_frame,
    leader_decoder,
)
from ostinato.runtime.ranks.rank_process import LocalRank, RankLog
from ostinato.runtime.ranks.rank_share import divide_device
from ostinato.runtime.ranks.relay import Events, Relay, StreamEnd
from ostinato.runtime.secure_connection import configure_client

__all__ = ("main",)

_LOG = logging.getLogger(__name__)
_JOIN_S = 60.0  # how long to wait for the bridge's answer
_LOOK_S = 0.1  # between two looks at the ranks while steps run
_STACK_S = 0.2  # how long ranks get to write their stacks
_END_S = 2.0  # how long a rank whose socket is closed gets to end
_MOST_MESSAGES = 64
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Host:
    """The ranks of this machine and the connection to the bridge. One thread uses it."""

    def __init__(self, start: StartRankHost) -> None:
        parallel = start.config.parallel
        self._start = start
        self._layout = RankLayout(parallel.tensor, parallel.pipeline, parallel.machines_per_engine)
        self._name = socket.gethostname()
        # Free memory is read once, before the ranks take any of it.
        self._free_bytes = free_host_memory().free_bytes
        self._device = start.config.device  # the part of each rank, once the links are opened
        level = "warning" if start.log_level == "info" else start.log_level
        log = RankLog(level, start.log_format, f"{start.name} ")
        here = self._layout.ranks_of(start.machine)
        self._ranks = {number: LocalRank(number, log) for number in here}
        self._ends: dict[int, StreamEnd] = {}
        self._relay: Relay | None = None
        self._looks = False
        self._stacks_until: float | None = None
        self._started: set[int] = set()  # ranks to which a `StartRank` was passed on
        self._has_joined = self._is_lost = False
        self._events = Events()
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        configure_client(self._dealer, start.token, parallel.rank_timeout_s)
        self._monitor = self._dealer.get_monitor_socket(_LOST)
        self._events.add(self._dealer, self._on_messages)
        self._events.add(self._monitor, self._on_lost)

    def run(self) -> str:
        """Pass messages on until the bridge is gone; returns why it could not be joined, or ""."""
        self._dealer.connect(self._start.address)
        self._send(Hello(self._start.machine, self._name))
        deadline = time.monotonic() + _JOIN_S
        while True:
            is_timed = self._looks or self._stacks_until is not None or not self._has_joined
            self._events.wait(_LOOK_S if is_timed else None)
            if not self._has_joined and time.monotonic() > deadline:
                return (
                    f"machine {self._name} cannot reach rank 0 at {self._start.address}; check "
                    "parallel.host, and that a firewall lets the machine connect to it"
                )
            if self._is_lost:
                return ""
            if self._looks:
                self._report_activities()
            self._report_stacks()

    def kill(self) -> None:
        """End the ranks."""
        for rank in self._ranks.values():
            rank.kill()

    def _send(self, message: BridgeMessage, values: bytes | None = None) -> None:
        parts = [encode(message)] if values is None else [encode(message), values]
        self._dealer.send_multipart(parts)  # a queue without a limit: it never waits

    def _send_values(self, message: Piece | Hidden, values: bytes) -> None:
        self._send(message, values)

    def _report(self, rank: int, message: RankMessage) -> None:
        self._send(FromRank(rank), encode_frame(message)[4:])

    def _on_lost(self, ready: int) -> None:
        self._monitor.recv_multipart()
        self._is_lost = True

    def _on_messages(self, ready: int) -> None:
        for _ in range(_MOST_MESSAGES):
            try:
                head, *values = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(bridge_decoder.decode(head), values[0] if values else b"")

    def _handle(self, message: BridgeMessage, values: bytes) -> None:
        if isinstance(message, Piece):
            assert self._relay is not None, "the links were opened"
            self._relay.put_piece(message, values)
        elif isinstance(message, Hidden):
            assert self._relay is not None, "the links were opened"
            self._relay.put_hidden(message, values)
        elif isinstance(message, ToRank):
            self._to_rank(message.rank, values)
        elif isinstance(message, OpenLinks):
            self._open_links(message)
        elif isinstance(message, Look):
            self._looks = message.is_on
        elif isinstance(message, DumpStacks):
            for rank in self._ranks.values():
                with contextlib.suppress(ProcessLookupError):
                    rank.request_stack()
            self._stacks_until = time.monotonic() + _STACK_S
        elif isinstance(message, Hello):
            self._has_joined = True

    def _open_links(self, message: OpenLinks) -> None:
        exchange, num_here = message.exchange, self._layout.ranks_per_machine
        self._device = divide_device(
            self._start.config.device,
            num_here,
            cores=available_cores(),
            free_bytes=None if exchange is Exchange.nccl else self._free_bytes,
        )
        links = create_links(self._layout, self._start.machine, message.slot_bytes, exchange)
        self._relay = Relay(links.relay, self._events, self._send_values)
        for rank, passed in zip(self._ranks.values(), links.ranks, strict=True):
            with contextlib.suppress(ConnectionError):  # it has ended, which is noticed below
                socket.send_fds(rank.socket, [b"\0"], passed)
            frames = Frames()

            def on_data(data: bytes, number: int = rank.number, frames: Frames = frames) -> None:
                for frame in frames.add(data):
                    self._send(FromRank(number), frame)

            def on_end(rank: LocalRank = rank) -> None:
                self._on_rank_end(rank)

            self._ends[rank.number] = StreamEnd(rank.socket, self._events, on_data, on_end)
        close_all(links.ranks)

    def _to_rank(self, rank: int, data: bytes) -> None:
        if rank not in self._started:  # put this machine's resources and address into `StartRank`
            self._started.add(rank)
            message = leader_decoder.decode(data)
            assert isinstance(message, StartRank), f"{message} came first"
            first = message.config
            device = replace(self._device, isa=first.device.isa, name=first.device.name)
            parallel = replace(first.parallel, host=self._start.config.parallel.host)
            config = replace(first, device=device, parallel=parallel)
            data = encode_frame(msgspec.structs.replace(message, config=config))[4:]
        self._ends[rank].send(len(data).to_bytes(4, "little") + data)

    def _on_rank_end(self, rank: LocalRank) -> None:
        code = rank.wait(_END_S)
        self._report(rank.number, RankEnded(self._name, code, rank.pid, rank.stack))

    def _report_activities(self) -> None:
        for number, rank in self._ranks.items():
            activity = rank.activity
            if activity is not None:
                self._report(number, RankSeen(*activity))

    def _report_stacks(self) -> None:
        if self._stacks_until is None:
            return
        stacks = {number: rank.stack for number, rank in self._ranks.items()}
        if all(stacks.values()) or time.monotonic() > self._stacks_until:
            self._stacks_until = None
            for number, stack in stacks.items():
                self._report(number, RankStack(stack))


def _read_start() -> StartRankHost:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            os._exit(0)
        line += data
    return msgspec.json.decode(line, type=StartRankHost)


def _tell(address: str, reason: str) -> None:
    """Tell `run rank` why this process ends."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as connection:
        connection.setsockopt(zmq.LINGER, 1000)
        connection.connect(address)
        connection.send(msgspec.msgpack.encode(EngineFailed(reason, at_start=True)))


def main(address: str) -> int:
    """Run the ranks until the engine needs them no longer.

    Args:
        address: the address of the ZeroMQ socket of `run rank`, `ipc://PATH`.

    Returns:
        The exit code.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # `run rank` ends this process
        signal.signal(number, signal.SIG_IGN)
    start = _read_start()
    configure_logging(start.log_level, start.log_format, f"{start.name} ranks")
    end_with_standard_input(address)
    try:
        host = _Host(start)
    except OSError as error:
        _tell(address, f"the ranks cannot be started: {error}")
        return 1
    reason = host.run()
    host.kill()
    if reason:
        _tell(address, reason)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # not `exit`: threads of libraries can keep the process running
