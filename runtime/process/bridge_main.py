"""The bridge of rank 0's machine: `python -m ostinato.runtime.process.bridge_main ...`.

`BridgeProcess` starts it. The other machines of the engine join it (rank_host_main.py). It passes
on the messages between rank 0 and the ranks on these machines, and the values that ranks exchange.
It ends when rank 0 closes the sockets to it, or has ended. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import sys
from collections import defaultdict

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ostinato.runtime.process.log_format import configure_logging
from ostinato.runtime.process.parent_death import end_with_parent
from ostinato.runtime.ranks.bridge_messages import (
    BridgeMessage,
    DumpStacks,
    FromRank,
    Hello,
    Hidden,
    Listening,
    Look,
    OpenLinks,
    Piece,
    StartBridge,
    ToRank,
    UseEnds,
    bridge_decoder,
    encode,
    encode_framed,
)
from ostinato.runtime.ranks.messages import Frames, RankEnded, encode_frame
from ostinato.runtime.ranks.relay import Events, Relay, StreamEnd
from ostinato.runtime.secure_connection import listen

__all__ = ("main",)

_LOG = logging.getLogger(__name__)
_MOST_DESCRIPTORS = 253  # the system passes at most this many with one message
_MOST_MESSAGES = 64  # read in a row, so that no machine keeps the others waiting


class _Bridge:
    """The state of the process. One thread uses it."""

    def __init__(self, control: socket.socket) -> None:
        """
        Args:
            control: the socket to rank 0's process, for messages that are not for one rank.
        """
        self._control = control
        self._frames = Frames()
        self._descriptors: list[int] = []
        self._streams: dict[int, socket.socket] = {}  # to rank 0, by the number of the other rank
        self._ends: dict[int, StreamEnd] = {}
        self._relay: Relay | None = None
        self._opening: OpenLinks | None = None
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._router = self._context.socket(zmq.ROUTER)
        self._peers: dict[int, bytes] = {}  # ids of connections, by machine
        self._names: dict[int, str] = {}
        self._by_descriptor: dict[int, int] = {}
        self._unsent: defaultdict[int, list[list[bytes]]] = defaultdict(list)
        self._events = Events()
        self._events.add(control.fileno(), self._on_control)  # handled before streams

    def run(self) -> None:
        """Handle messages until `os._exit` ends the process."""
        while True:
            self._events.wait(None)

    def _on_control(self, ready: int) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, _MOST_DESCRIPTORS)
        except ConnectionError:
            data, descriptors = b"", list[int]()
        if not data:
            os._exit(0)  # rank 0's process has ended, or no longer needs this process
        self._descriptors += descriptors
        for frame in self._frames.add(data):
            message: BridgeMessage = bridge_decoder.decode(frame)
            if isinstance(message, StartBridge):
                self._start(message)
            elif isinstance(message, UseEnds):
                ends = message.ends.with_descriptors(self._descriptors)
                self._descriptors = []
                self._relay = Relay(ends, self._events, self._send_values)
                self._opening = OpenLinks(ends.slot_bytes, ends.exchange)
                for machine in self._peers:
                    self._send(machine, self._opening)
                self._open_streams()
            elif isinstance(message, Look | DumpStacks):
                for machine in self._peers:
                    self._send(machine, message)

    def _start(self, start: StartBridge) -> None:
        self._layout = start.layout
        first = self._layout.ranks_per_machine
        for rank, descriptor in enumerate(self._descriptors, first):
            self._streams[rank] = socket.socket(fileno=descriptor)
        self._descriptors = []
        self._authenticator.start()
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            address = listen(
                self._router, self._authenticator, start.token, start.host, start.silence_s
            )
        except zmq.ZMQError as error:
            reason = (
                f"ranks on other machines cannot reach this one at {start.host!r} ({error}): set "
                "parallel.host to an address of this machine that the others can reach"
            )
            self._control.sendall(encode_framed(Listening("", reason)))
            return
        self._events.add(self._router, self._on_machines)
        self._events.add(self._monitor, self._on_disconnected)
        self._control.sendall(encode_framed(Listening(address)))

    def _open_streams(self) -> None:
        """Begin to read what rank 0 sends to the ranks. Called when their links can be made."""
        for rank, stream in self._streams.items():
            frames = Frames()

            def on_data(data: bytes, rank: int = rank, frames: Frames = frames) -> None:
                for frame in frames.add(data):
                    self._send(self._layout.machine_of(rank), ToRank(rank), frame)

            self._ends[rank] = StreamEnd(stream, self._events, on_data, lambda: os._exit(0))

    def _on_machines(self, ready: int) -> None:
        for _ in range(_MOST_MESSAGES):
            try:
                peer, head, *values = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message: BridgeMessage = bridge_decoder.decode(head.buffer)
            if isinstance(message, Hello):
                self._join(bytes(peer.buffer), int(head.get(zmq.SRCFD)), message)
            elif isinstance(message, FromRank):
                self._to_rank_0(message.rank, values[0].bytes)
            elif isinstance(message, Piece | Hidden):
                self._pass_on(message, values[0].bytes)

    def _join(self, peer: bytes, descriptor: int, hello: Hello) -> None:
        machine = hello.machine
        if machine in self._peers or not 0 < machine < self._layout.machines:
            _LOG.warning("machine %s offers ranks that this engine does not wait for", hello.name)
            return
        self._peers[machine], self._names[machine] = peer, hello.name
        self._by_descriptor[descriptor] = machine
        self._send(machine, Hello(0, ""))
        if self._opening is not None:
            self._send(machine, self._opening)
        for parts in self._unsent.pop(machine, []):
            self._router.send_multipart([peer, *parts])

    def _pass_on(self, message: Piece | Hidden, values: bytes) -> None:
        for machine in message.machines:
            if machine:
                self._send(machine, message, values)
            elif isinstance(message, Piece):
                assert self._relay is not None, "the links were opened"
                self._relay.put_piece(message, values)
            else:
                assert self._relay is not None, "the links were opened"
                self._relay.put_hidden(message, values)

    def _send_values(self, message: Piece | Hidden, values: bytes) -> None:
        for machine in message.machines:
            self._send(machine, message, values)

    def _send(self, machine: int, message: BridgeMessage, values: bytes | None = None) -> None:
        parts = [encode(message)] if values is None else [encode(message), values]
        peer = self._peers.get(machine)
        if peer is None:
            self._unsent[machine].append(parts)
        else:
            self._router.send_multipart([peer, *parts])

    def _to_rank_0(self, rank: int, message: bytes) -> None:
        if rank in self._ends:
            self._ends[rank].send(len(message).to_bytes(4, "little") + message)

    def _on_disconnected(self, ready: int) -> None:
        event = self._monitor.recv_multipart()[0]
        _, descriptor = struct.unpack("=Hi", event)
        machine = self._by_descriptor.pop(descriptor, None)
        if machine is None:
            return  # it has not joined
        ended = encode_frame(RankEnded(self._names[machine], None))
        for rank in self._layout.ranks_of(machine):
            if rank in self._ends:
                self._ends[rank].send(ended)
            else:  # the streams are not open here yet, but rank 0 reads its ends already
                with contextlib.suppress(ConnectionError):  # rank 0 has closed its end
                    self._streams[rank].sendall(ended)


def main(control: str, parent: str, log_level: str, log_format: str, name: str) -> None:
    """Run the bridge; ends the process.

    Args:
        control: descriptor of the socket to rank 0's process.
        parent: process id of rank 0, if the system is to kill this process when rank 0 ends; else
            0.
        log_level: the log level of this process.
        log_format: text or json.
        name: the name of this process, in its log.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends this process
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(int(parent))
    configure_logging(log_level, log_format, name)
    _Bridge(socket.socket(fileno=int(control))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
