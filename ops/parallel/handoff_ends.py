"""The shared memory and the socket that hand hidden states from one pipeline stage to the next.

The ranks of the two stages use the ends through the classes of handoff.py. If the other stage is on
another machine, the bridge process of this machine (runtime/ranks/relay.py) holds the other end. It
takes the values of full slots, or fills slots with values from the other machine.

This module imports no torch.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from typing import NamedTuple

__all__ = ("FREE", "FULL", "HandoffEnd", "SlotFiller", "SlotTaker", "create_handoff")

FULL = struct.Struct("=Q")  # bytes in the next slot
FREE = b"\0"  # one byte for each slot that is free again


class HandoffEnd(NamedTuple):
    """One end of a handoff: two file descriptors, which can be passed to another process."""

    memory: int
    socket: int

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self:
            os.close(descriptor)


def create_handoff(slot_bytes: int, num_slots: int) -> tuple[HandoffEnd, HandoffEnd]:
    """Make a handoff: the sender's end and the receiver's.

    Memory is taken when a slot is first written.

    Args:
        slot_bytes: bytes of a slot.
        num_slots: steps that can be in transit between the two stages.

    Raises:
        OSError: the system gives no memory, or no descriptors.
    """
    memory = os.memfd_create("ostinato-handoff", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, num_slots * slot_bytes)
        sender, receiver = socket.socketpair()
        return HandoffEnd(os.dup(memory), sender.detach()), HandoffEnd(memory, receiver.detach())
    except OSError:
        os.close(memory)
        raise


class _Slots:
    """An end whose socket is in non-blocking mode. This object closes both descriptors."""

    def __init__(self, end: HandoffEnd, slot_bytes: int) -> None:
        self.socket = socket.socket(fileno=end.socket)
        self.socket.setblocking(False)
        self._slot_bytes = slot_bytes
        self._num_steps = 0
        try:
            size = os.fstat(end.memory).st_size
            self._num_slots = size // slot_bytes
            self._map = mmap.mmap(end.memory, size)
        finally:
            os.close(end.memory)

    def _receive(self) -> bytes:
        """The bytes that have come; empty if none have.

        Raises:
            ConnectionError: the rank has ended.
        """
        try:
            data = self.socket.recv(1 << 12)
        except BlockingIOError:
            return b""
        if not data:
            raise ConnectionError("the rank at the other end of a handoff has ended")
        return data

    def _next_slot(self) -> int:
        begin = self._num_steps % self._num_slots * self._slot_bytes
        self._num_steps += 1
        return begin


class SlotTaker(_Slots):
    """Receives from a stage of this machine whose next stage is on another machine."""

    def __init__(self, end: HandoffEnd, slot_bytes: int) -> None:
        super().__init__(end, slot_bytes)
        self._received = bytearray()

    def take(self) -> list[bytes]:
        """The values of the steps that the stage has computed since the last call.

        Raises:
            ConnectionError: the rank has ended.
        """
        self._received += self._receive()
        steps: list[bytes] = []
        while len(self._received) >= FULL.size:
            (num_bytes,) = FULL.unpack_from(self._received)
            del self._received[: FULL.size]
            begin = self._next_slot()
            steps.append(self._map[begin : begin + num_bytes])
            self.socket.send(FREE)
        return steps


class SlotFiller(_Slots):
    """Sends to a stage of this machine whose previous stage is on another machine."""

    def __init__(self, end: HandoffEnd, slot_bytes: int) -> None:
        super().__init__(end, slot_bytes)
        self._num_free = self._num_slots
        self._waiting: deque[bytes] = deque()

    def put(self, step: bytes) -> None:
        """Pass on the values of the next step, now or when a slot is free.

        Raises:
            ConnectionError: the rank has ended.
            ValueError: the values are more than a slot holds.
        """
        if len(step) > self._slot_bytes:
            raise ValueError(f"{len(step)} bytes do not fit into a slot of {self._slot_bytes}")
        self._waiting.append(step)
        self._fill()

    def note_free(self) -> None:
        """Read how many slots are free again, and fill them.

        Raises:
            ConnectionError: the rank has ended.
        """
        self._num_free += len(self._receive())
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._num_free:
            step = self._waiting.popleft()
            self._num_free -= 1
            begin = self._next_slot()
            self._map[begin : begin + len(step)] = step
            self.socket.send(FULL.pack(len(step)))
