"""Hands hidden states from stage to stage of a pipeline whose steps may be captured.

The model reads and writes tensors of its own device, which keep their addresses. So a captured step
contains no wait for another process. Before a step runs, `arrive` copies the hidden states that the
previous stage has sent to this stage's device. After a step was launched, `leave` starts the copy
of its hidden states to the host. A thread waits for this copy and sends the values, while the
caller builds and launches its next step. Between the processes the values are in the shared memory
of handoff.py.

On a GPU the copies go through pinned memory, on the current stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Queue
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ostinato.ops.parallel.handoff import (
    HandoffEndedError,
    HiddenReceiver,
    HiddenSender,
    HiddenShape,
)

__all__ = ("NUM_SENDING", "StagedReceiver", "StagedSender")

NUM_SENDING = 2  # steps whose hidden states can wait in a sender while a later step is computed

_Link = TypeVar("_Link", HiddenReceiver, HiddenSender)


class _Staged(Generic[_Link]):
    """The tensor that the model reads or writes, and an end of the handoff (`link`)."""

    def __init__(self, link: _Link, shape: HiddenShape, device: torch.device) -> None:
        """
        Args:
            link: closed with this object.
            shape: the largest hidden states.
            device: the device of the model.
        """
        self._link = link
        self._on_gpu = device.type == "cuda"
        self._values = torch.zeros(_sizes(shape), dtype=shape.dtype, device=device)
        self.num_states = 1  # of each step: 1 to shape.num_states

    def abort(self) -> None:
        """As `abort` of the link."""
        self._link.abort()

    def close(self) -> None:
        """As `close` of the link."""
        self._link.close()


class StagedReceiver(_Staged[HiddenReceiver]):
    """The end in the stage that computes the next layers."""

    def __init__(self, link: HiddenReceiver, shape: HiddenShape, device: torch.device) -> None:
        super().__init__(link, shape, device)
        self._buffer = _HostBuffer(shape) if self._on_gpu else None

    def arrive(self, num_tokens: int) -> None:
        """Wait for the hidden states of the next step, and start their copy to the device.

        Raises:
            HandoffEndedError: the other process has ended.
        """
        states = self._link.receive(num_tokens, self.num_states)
        values = self._values[: self.num_states, :num_tokens]
        if self._buffer is None:
            values.copy_(states)
        else:
            self._buffer.wait()  # the copy of the step before has read the pinned memory
            pinned = self._buffer.states(self.num_states, num_tokens)
            for state, host, target in zip(states, pinned, values, strict=True):
                host.copy_(state)
                target.copy_(host, non_blocking=True)
            self._buffer.record()
        self._link.release()

    def receive(self, num_tokens: int, num_states: int) -> Tensor:
        """The hidden states that arrived last: [num_states, num_tokens, size]."""
        assert num_states == self.num_states, f"{num_states} instead of {self.num_states} states"
        return self._values[:num_states, :num_tokens]

    def release(self) -> None:
        """Does nothing: the next `arrive` is ordered after the step by the stream."""


class StagedSender(_Staged[HiddenSender]):
    """The end in the stage that computed the hidden states. A thread of this object sends them."""

    def __init__(self, link: HiddenSender, shape: HiddenShape, device: torch.device) -> None:
        super().__init__(link, shape, device)
        self._free: Queue[_HostBuffer] = Queue()
        for _ in range(NUM_SENDING):
            self._free.put(_HostBuffer(shape, on_gpu=self._on_gpu))
        self._full: Queue[tuple[_HostBuffer, int, int] | None] = Queue()
        self._error: Exception | None = None  # of the thread
        self._gpu = torch.cuda.current_device() if self._on_gpu else -1
        self._thread = threading.Thread(target=self._run, name="send-hidden", daemon=True)
        self._thread.start()

    def send(self, states: Sequence[Tensor]) -> None:
        """Keep the hidden states of a step, each [T, size], until `leave`."""
        assert len(states) == self.num_states, f"{len(states)} instead of {self.num_states} states"
        for index, state in enumerate(states):
            self._values[index, : len(state)].copy_(state)

    def leave(self, num_tokens: int) -> None:
        """Let the hidden states of a launched step be sent when the device has computed the step.

        Waits only while the hidden states of `NUM_SENDING` earlier steps have not been sent.

        Raises:
            HandoffEndedError: the other process has ended.
            RuntimeError: an earlier step has failed on the device.
        """
        buffer = self._free.get()
        if self._error is not None:
            self._free.put(buffer)
            raise self._error
        values = self._values[: self.num_states, :num_tokens]
        for source, host in zip(values, buffer.states(self.num_states, num_tokens), strict=True):
            host.copy_(source, non_blocking=self._on_gpu)
        buffer.record()
        self._full.put((buffer, self.num_states, num_tokens))

    def close(self) -> None:
        """End the thread, which drops what it has not sent, and close the link."""
        self._full.put(None)
        super().abort()  # ends the thread's wait for the other process
        self._thread.join()
        super().close()

    def _run(self) -> None:
        """Send the hidden states of one step after the other. Runs on the thread."""
        if self._on_gpu:  # otherwise a wait would make a context on the first GPU
            torch.cuda.set_device(self._gpu)
        while (step := self._full.get()) is not None:
            buffer, num_states, num_tokens = step
            if self._error is None:
                try:
                    buffer.wait()
                    self._link.send(list(buffer.states(num_states, num_tokens)))
                except (HandoffEndedError, RuntimeError) as error:
                    self._error = error  # the next `leave` raises it
            self._free.put(buffer)


class _HostBuffer:
    """Memory of the host for the hidden states of a step, which a GPU copies to or from."""

    def __init__(self, shape: HiddenShape, *, on_gpu: bool = True) -> None:
        self._memory = torch.zeros(_sizes(shape), dtype=shape.dtype, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def states(self, num_states: int, num_tokens: int) -> Tensor:
        """[num_states, num_tokens, size]: the place of the states of a step."""
        return self._memory[:num_states, :num_tokens]

    def record(self) -> None:
        """Note that the copies of a step have been started on the current stream."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Wait until the GPU has done the copies of the last step."""
        if self._copied is not None:
            self._copied.synchronize()


def _sizes(shape: HiddenShape) -> tuple[int, int, int]:
    return shape.num_states, shape.num_tokens, shape.size
