"""Hands hidden states from one stage of a pipeline to the next by torch.distributed.

Both ends know how many tokens each step has, because both build the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.ops.parallel.distributed_group import DistributedGroup
from ostinato.ops.parallel.handoff import HiddenShape

__all__ = ("DistributedReceiver", "DistributedSender")


class DistributedSender:
    """The end in the stage that computed the hidden states."""

    def __init__(self, pair: DistributedGroup) -> None:
        """
        Args:
            pair: a group of this rank and the receiver; closed with this object.
        """
        self._pair = pair

    def send(self, states: Sequence[Tensor]) -> None:
        """Pass the hidden states of a step to the next stage, each [T, size].

        Raises:
            GroupEndedError: the other process has ended.
        """
        for state in states:
            self._pair.send(state)

    def abort(self) -> None:
        """As `DistributedGroup.abort`."""
        self._pair.abort()

    def close(self) -> None:
        """As `DistributedGroup.close`."""
        self._pair.close()


class DistributedReceiver:
    """The end in the stage that computes the next layers."""

    def __init__(self, pair: DistributedGroup, shape: HiddenShape, device: torch.device) -> None:
        """
        Args:
            pair: a group of the sender and this rank; closed with this object.
            shape: the largest hidden states.
            device: where the hidden states are wanted.
        """
        self._pair = pair
        self._shape = shape
        self._device = device

    def receive(self, num_tokens: int, num_states: int) -> Tensor:
        """Wait for the hidden states of the next step: [num_states, num_tokens, size].

        Raises:
            GroupEndedError: the other process has ended.
        """
        size = (num_states, num_tokens, self._shape.size)
        states = torch.empty(size, dtype=self._shape.dtype, device=self._device)
        for state in states:
            self._pair.receive(state)
        return states

    def release(self) -> None:
        """Does nothing: each step has memory of its own."""

    def abort(self) -> None:
        """As `DistributedGroup.abort`."""
        self._pair.abort()

    def close(self) -> None:
        """As `DistributedGroup.close`."""
        self._pair.close()
