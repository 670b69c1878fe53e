"""`Relay`: carries values between the links of one machine's ranks and other machines.

It sends the values of this machine's ranks to the other machines as soon as they are written, and
gives the ranks the values that come from there. Each rank reads the values of all ranks in its own
memory, as if all ranks were on one machine. So the order of sums is the same.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

import zmq

from ostinato.ops.parallel.handoff_ends import HandoffEnd, SlotFiller, SlotTaker
from ostinato.ops.parallel.segment import SegmentMirror
from ostinato.runtime.ranks.bridge_messages import Hidden, Piece
from ostinato.runtime.ranks.link_ends import RelayEnds, SlotsEnd

__all__ = ("Events", "Relay", "StreamEnd")

Send = Callable[[Piece | Hidden, bytes], None]
"""Sends values to the machines that the message names."""


class Events:
    """Waits for descriptors and sockets of ZeroMQ, and calls the handler of each."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[int], object]] = {}

    def add(
        self,
        source: int | zmq.Socket[bytes],
        handler: Callable[[int], object],
        events: int = zmq.POLLIN,
    ) -> None:
        """Call `handler` with the source's events that are ready; replaces an earlier handler."""
        self._poller.register(source, events)
        self._handlers[source] = handler

    def remove(self, source: int | zmq.Socket[bytes]) -> None:
        """Forget a source, which may be closed then."""
        self._poller.unregister(source)
        del self._handlers[source]

    def wait(self, timeout_s: float | None) -> None:
        """Wait for sources and call their handlers; returns after `timeout_s` at the latest."""
        timeout = None if timeout_s is None else int(timeout_s * 1000)
        for source, ready in self._poller.poll(timeout):
            handler = self._handlers.get(source)
            if handler is not None:  # else an earlier handler removed it
                handler(ready)


class StreamEnd:
    """A stream socket of a bridge. It never waits for the process at the other end."""

    def __init__(
        self,
        connection: socket.socket,
        events: Events,
        on_data: Callable[[bytes], object],
        on_end: Callable[[], object],
    ) -> None:
        """
        Args:
            connection: connected; closed with this object.
            events: where this object waits.
            on_data: called with the bytes that have come.
            on_end: called once when the process at the other end has closed it.
        """
        connection.setblocking(False)
        self._socket = connection
        self._events = events
        self._on_data, self._on_end = on_data, on_end
        self._unsent = bytearray()
        events.add(connection.fileno(), self._handle)

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def send(self, data: bytes) -> None:
        """Send bytes, now or when the other end reads. Bytes for a closed end are dropped."""
        if self.is_closed:
            return
        self._unsent += data
        self._flush()

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        if not self.is_closed:
            self._events.remove(self._socket.fileno())
            self._socket.close()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        wanted = zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0)
        self._events.add(self._socket.fileno(), self._handle, wanted)

    def _handle(self, ready: int) -> None:
        if ready & zmq.POLLOUT:
            self._flush()
        if ready & ~zmq.POLLOUT:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if data:
                self._on_data(data)
                return
            self.close()
            self._on_end()


class Relay:
    """The values that cross the border of one machine. One thread uses it."""

    def __init__(self, ends: RelayEnds, events: Events, send: Send) -> None:
        """
        Args:
            ends: the ends of the links. This object owns their descriptors from now on.
            events: where this object waits for the ranks of this machine.
            send: called with the values that the ranks have written.

        Raises:
            OSError: the system does not map the memory.
        """
        self._events = events
        self._send = send
        self._mirrors: dict[int, SegmentMirror] = {}
        self._fillers: dict[tuple[int, int], SlotFiller] = {}
        for group in ends.groups:
            self._mirrors[group.stage] = SegmentMirror(group.segment, group.world)
            os.close(group.segment)
            for place, notice in group.notices.items():
                self._watch_rank(group.stage, place, notice, group.machines)
        for end in ends.leaving:
            taker = SlotTaker(HandoffEnd(end.memory, end.socket), ends.slot_bytes)
            self._watch_taker(end, taker)
        for end in ends.arriving:
            filler = SlotFiller(HandoffEnd(end.memory, end.socket), ends.slot_bytes)
            self._fillers[end.stage, end.place] = filler
            self._watch_filler(filler)

    def put_piece(self, message: Piece, values: bytes) -> None:
        """Let the ranks of this machine see the values of a rank on another machine."""
        self._mirrors[message.stage].put(message.place, values)

    def put_hidden(self, message: Hidden, values: bytes) -> None:
        """Let a rank of this machine go on with hidden states from another machine."""
        with contextlib.suppress(ConnectionError):  # the rank has ended; its own socket shows that
            self._fillers[message.stage, message.place].put(values)

    def _watch_rank(self, stage: int, place: int, notice: int, machines: list[int]) -> None:
        mirror = self._mirrors[stage]

        def on_piece(ready: int) -> None:
            os.eventfd_read(notice)
            for piece in mirror.take(place):
                self._send(Piece(stage, place, machines), piece)

        self._events.add(notice, on_piece)

    def _watch_taker(self, end: SlotsEnd, taker: SlotTaker) -> None:
        descriptor = taker.socket.fileno()

        def on_step(ready: int) -> None:
            try:
                for step in taker.take():
                    self._send(Hidden(end.stage, end.place, [end.machine]), step)
            except ConnectionError:
                self._events.remove(descriptor)

        self._events.add(descriptor, on_step)

    def _watch_filler(self, filler: SlotFiller) -> None:
        descriptor = filler.socket.fileno()

        def on_free(ready: int) -> None:
            try:
                filler.note_free()
            except ConnectionError:
                self._events.remove(descriptor)

        self._events.add(descriptor, on_free)
