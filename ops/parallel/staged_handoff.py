"""Hands hidden states from stage to stage of a pipeline whose steps may be captured.

The model reads and writes tensors of its own device, which keep their addresses. So a captured step
contains no wait for another process. Before a step runs, `arrive` copies what the stage before has
sent to the device. After a step was launched, `leave` copies its hidden states from the device and
sends them. Between the processes the values are in the shared memory of handoff.py.

On a GPU the copies go through pinned memory, on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ostinato.ops.parallel.handoff import HiddenReceiver, HiddenSender, HiddenShape

__all__ = ("StagedReceiver", "StagedSender")


_Link = TypeVar("_Link", HiddenReceiver, HiddenSender)


class _Staged(Generic[_Link]):
    """The tensor that the model uses, the pinned memory beside it, and the link."""

    def __init__(self, link: _Link, shape: HiddenShape, device: torch.device) -> None:
        """
        Args:
            link: closed with this object.
            shape: the largest hidden states.
            device: the device of the model.
        """
        self._link = link
        size = shape.num_states, shape.num_tokens, shape.size
        on_gpu = device.type == "cuda"
        self._values = torch.zeros(size, dtype=shape.dtype, device=device)
        self._pinned = torch.zeros(size, dtype=shape.dtype, pin_memory=True) if on_gpu else None
        self._copied = torch.cuda.Event() if on_gpu else None
        self.num_states = 1  # of each step: 1 to shape.num_states

    def _copies(self, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """(on the device, pinned) for each state of a step."""
        assert self._pinned is not None, "only a GPU needs pinned memory"
        return [
            (self._values[index, :num_tokens], self._pinned[index, :num_tokens])
            for index in range(self.num_states)
        ]

    def abort(self) -> None:
        """As `abort` of the link."""
        self._link.abort()

    def close(self) -> None:
        """As `close` of the link."""
        self._link.close()


class StagedReceiver(_Staged[HiddenReceiver]):
    """The end in the stage that computes the next layers."""

    def arrive(self, num_tokens: int) -> None:
        """Wait for the hidden states of the next step, and start their copy to the device.

        Raises:
            HandoffEndedError: the other process has ended.
        """
        states = self._link.receive(num_tokens, self.num_states)
        if self._copied is None:
            self._values[: self.num_states, :num_tokens].copy_(states)
        else:
            self._copied.synchronize()  # the copy of the step before has read the pinned memory
            for state, (target, pinned) in zip(states, self._copies(num_tokens), strict=True):
                pinned.copy_(state)
                target.copy_(pinned, non_blocking=True)
            self._copied.record()
        self._link.release()

    def receive(self, num_tokens: int, num_states: int) -> Tensor:
        """The hidden states that arrived last: [num_states, num_tokens, size]."""
        assert num_states == self.num_states, f"{num_states} instead of {self.num_states} states"
        return self._values[:num_states, :num_tokens]

    def release(self) -> None:
        """Does nothing: the next `arrive` is ordered after the step by the stream."""


class StagedSender(_Staged[HiddenSender]):
    """The end in the stage that computed the hidden states."""

    def send(self, states: Sequence[Tensor]) -> None:
        """Keep the hidden states of a step, each [T, size], until `leave`."""
        assert len(states) == self.num_states, f"{len(states)} instead of {self.num_states} states"
        for index, state in enumerate(states):
            self._values[index, : len(state)].copy_(state)

    def leave(self, num_tokens: int) -> None:
        """Wait until the device has computed the step, and pass its hidden states on.

        Raises:
            HandoffEndedError: the other process has ended.
        """
        states = list(self._values[: self.num_states, :num_tokens])
        if self._copied is not None:
            copies = self._copies(num_tokens)
            for source, pinned in copies:
                pinned.copy_(source, non_blocking=True)
            self._copied.record()
            self._copied.synchronize()
            states = [pinned for _, pinned in copies]
        self._link.send(states)
