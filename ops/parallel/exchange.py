"""How the ranks of an engine exchange values: through shared memory, or by torch.distributed.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

__all__ = ("Exchange", "RankGroup", "Share")

Share = Callable[[bytes], list[bytes]]
"""Gives bytes of this rank to all ranks that connect to each other at the same time.

Waits for the bytes of the others. Returns those of every rank, this one included, in the order of
the ranks' numbers. All ranks call it equally often.
"""


class Exchange(StrEnum):
    """What carries values from rank to rank."""

    shared_memory = "shared memory"  # CPUs: the kernels of ops/native/collectives/
    nccl = "nccl"  # GPUs
    gloo = "gloo"  # CPUs: runs the same code as NCCL, without a GPU

    @property
    def is_distributed(self) -> bool:
        """Whether torch.distributed carries the values."""
        return self is not Exchange.shared_memory


class RankGroup(Protocol):
    """One rank's membership in a group of ranks."""

    @property
    def handle(self) -> int:
        """What the `group` argument of the collectives holds."""
        ...

    def abort(self) -> None:
        """End all present and later collectives of this rank with an error; from any thread."""
        ...

    def close(self) -> None:
        """Leave the group. No collective may follow."""
        ...
