"""How the ranks of an engine exchange values: through shared memory, or by torch.distributed.

Imports no torch.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Protocol

__all__ = ("Exchange", "RankGroup", "create_rendezvous")


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


def create_rendezvous() -> int:
    """Make the file through which the ranks of a `DistributedGroup` find each other.

    Returns:
        A file descriptor that a new process does not inherit unless it is passed. The file has no
        name, and disappears with its last descriptor.

    Raises:
        OSError: the system gives no descriptor.
    """
    return os.memfd_create("ostinato-rendezvous", os.MFD_CLOEXEC)
