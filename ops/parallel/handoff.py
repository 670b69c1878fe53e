"""Hands hidden states from one stage of a pipeline to the next, in another process.

The values are in unnamed shared memory, in slots that are used in turn. Messages on a socket tell
which slots are full and which are free again. So a waiting stage uses no processor time, and it
notices at once if the process of the neighbouring stage ends.

A message does not contain the step's number of tokens. Both stages build the same batch, so the
receiver has this number. It reads the slot in place, without a copy.

If the model has a draft head that reads the inputs of some layers, these hidden states are sent
too. Each is as large as the hidden states of the stage. Both ends are made for the same number of
tensors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ostinato.ops.parallel.handoff_ends import FREE, FULL, HandoffEnd

__all__ = (
    "HandoffEndedError",
    "HiddenReceiver",
    "HiddenSender",
    "HiddenShape",
    "HiddenSink",
    "HiddenSource",
)

_PAGE = mmap.PAGESIZE


class HandoffEndedError(ConnectionError):
    """The process of the stage beside this one has ended, or `abort` was called at one end."""


class HiddenShape(NamedTuple):
    """The largest hidden states that a handoff passes."""

    num_tokens: int
    size: int  # values of a token in each state
    dtype: torch.dtype
    num_states: int = 1  # hidden states of a token: that of the stage, and those for a draft head

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, whole pages."""
        num_values = self.num_states * self.num_tokens * self.size
        return -(-num_values * self.dtype.itemsize // _PAGE) * _PAGE


class HiddenSink(Protocol):
    """Takes hidden states for the next stage."""

    def send(self, states: Sequence[Tensor]) -> None:
        """Pass the hidden states of a step on, each [T, size]; those of the stage come first."""
        ...


class HiddenSource(Protocol):
    """Has the hidden states of the stage before."""

    def receive(self, num_tokens: int, num_states: int) -> Tensor:
        """The hidden states of the next step, as they were sent.

        Returns:
            [num_states, num_tokens, size], valid until `release`.
        """
        ...

    def release(self) -> None:
        """The hidden states of the last `receive` are no longer needed."""
        ...


class _End:
    """The memory and the socket of one end. One thread uses it, except `abort`."""

    def __init__(self, end: HandoffEnd, shape: HiddenShape) -> None:
        """
        Args:
            end: closed with this object.
            shape: the shape for which the handoff was made.

        Raises:
            ValueError: the handoff was made for another shape.
            OSError: the system does not map the memory.
        """
        self._socket = socket.socket(fileno=end.socket)
        self._shape = shape
        self._num_steps = 0
        try:
            size = os.fstat(end.memory).st_size
            if size == 0 or size % shape.slot_bytes:
                raise ValueError(f"a handoff of {size} bytes was not made for {shape}")
            self._num_slots = size // shape.slot_bytes
            self._memory = torch.frombuffer(mmap.mmap(end.memory, size), dtype=torch.uint8)
        finally:
            os.close(end.memory)

    def abort(self) -> None:
        """End the waits of both ends with an error; from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. The memory is unmapped when its last tensor is freed."""
        self._socket.close()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _next_slot(self, num_states: int, num_tokens: int) -> Tensor:
        """[num_states, num_tokens, size]: the slot of the next step."""
        shape = self._shape
        assert num_states <= shape.num_states, f"{num_states} states do not fit into {shape}"
        begin = self._num_steps % self._num_slots * shape.slot_bytes
        self._num_steps += 1
        num_bytes = num_states * num_tokens * shape.size * shape.dtype.itemsize
        slot = self._memory[begin : begin + num_bytes].view(shape.dtype)
        return slot.view(num_states, num_tokens, shape.size)

    def _receive(self, num_bytes: int) -> bytes:
        try:
            data = self._socket.recv(num_bytes)
        except OSError:
            data = b""
        if not data:
            raise HandoffEndedError("the rank of the stage beside this one has ended")
        return data

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise HandoffEndedError("the rank of the stage beside this one has ended") from error


class HiddenSender(_End):
    """The end in the stage that computed the hidden states."""

    def __init__(self, end: HandoffEnd, shape: HiddenShape) -> None:
        super().__init__(end, shape)
        self._num_free = self._num_slots

    def send(self, states: Sequence[Tensor]) -> None:
        """Pass the hidden states of a step to the next stage; waits while all slots are full.

        Args:
            states: at least one, each [T, size] of the handoff's dtype. They are copied.

        Raises:
            HandoffEndedError: the other process has ended.
        """
        dtypes = {state.dtype for state in states}
        assert dtypes == {self._shape.dtype}, f"{dtypes} instead of {self._shape.dtype}"
        while not self._num_free:
            self._num_free += len(self._receive(self._num_slots))
        self._num_free -= 1
        slot = self._next_slot(len(states), len(states[0]))
        for place, state in zip(slot, states, strict=True):
            place.copy_(state)
        self._send(FULL.pack(slot.nbytes))


class HiddenReceiver(_End):
    """The end in the stage that computes the next layers."""

    def receive(self, num_tokens: int, num_states: int) -> Tensor:
        """Wait for the hidden states of the next step.

        Args:
            num_tokens: T, of the step.
            num_states: the number of states that the stage before sends.

        Returns:
            [num_states, T, size], valid until `release`. The caller does not write to it.

        Raises:
            HandoffEndedError: the other process has ended.
            RuntimeError: the stage before has run a step of another size.
        """
        data = self._receive(FULL.size)
        while len(data) < FULL.size:
            data += self._receive(FULL.size - len(data))
        (sent,) = FULL.unpack(data)
        slot = self._next_slot(num_states, num_tokens)
        if sent != slot.nbytes:
            raise RuntimeError(
                f"the stage before sent {sent} bytes of hidden states, and {num_states} of "
                f"{num_tokens} tokens are {slot.nbytes} bytes"
            )
        return slot

    def release(self) -> None:
        """Give the slot of the last `receive` back.

        Raises:
            HandoffEndedError: the other process has ended.
        """
        self._send(FREE)
