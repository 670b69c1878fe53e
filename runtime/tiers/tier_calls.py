"""What an engine asks its ranks about their copies of KV blocks. Imports no torch."""

from __future__ import annotations

import msgspec

from ostinato.runtime.types.step import BlockTransfer

__all__ = (
    "AdvanceTiers",
    "ClearTiers",
    "FlushTiers",
    "OpenTiers",
    "StartTransfers",
    "TierCall",
    "TierProgress",
    "device_bytes",
    "num_buffers",
)

_BUFFER_BYTES = 64 << 20
_LEAST_BUFFERS = 4


def num_buffers(block_bytes: int) -> int:
    """How many blocks of a rank can be on their way to the disk at once."""
    return max(_LEAST_BUFFERS, _BUFFER_BYTES // block_bytes)


def device_bytes(block_bytes: int, *, is_cpu: bool, has_disk: bool) -> int:
    """Bytes of the device's memory that a rank needs to make copies, without the copies themselves.

    A GPU has room for one block on its way out and one on its way in; the buffers for the disk are
    in host memory. On a CPU these buffers, and one for loads, are in the device's memory.

    Args:
        block_bytes: bytes of a block on this rank.
        is_cpu: whether the device is a CPU.
        has_disk: whether blocks are copied to the disk.
    """
    if not is_cpu:
        return 2 * block_bytes
    return (num_buffers(block_bytes) + 1) * block_bytes if has_disk else 0


class TierProgress(msgspec.Struct, array_like=True, gc=False):
    """What has happened to the copies of a rank since its last report."""

    # (transfer id, leading blocks that were loaded, seconds without the wait for other work)
    finished_loads: list[tuple[int, int, float]]
    lost_places: list[int]  # places of stores that failed
    num_free_buffers: int
    is_writing: bool  # whether blocks are on their way to the disk
    can_write: bool  # whether the disk takes stores; it does not after a failed write


class OpenTiers(msgspec.Struct, frozen=True, tag=8):
    """Open the rank's copies of KV blocks on disk.

    Each rank answers with a JSON array of (place, hash in hexadecimal) of the blocks that it has,
    the oldest first.

    Raises InvalidRequestError if they cannot be used.
    """

    directory: str  # each rank uses a directory in it
    identity: str  # files that were written under another identity are begun anew
    num_places: int


class StartTransfers(msgspec.Struct, frozen=True, tag=9):
    """Begin the transfers of KV blocks of a step without entries."""

    transfers: list[BlockTransfer]


class AdvanceTiers(msgspec.Struct, frozen=True, tag=10):
    """Report what has happened to transfers; each rank answers with a JSON `TierProgress`."""

    timeout_s: float  # how long a rank waits until something has happened; 0 = not


class ClearTiers(msgspec.Struct, frozen=True, tag=11):
    """Forget all copies of KV blocks, also for later starts."""


class FlushTiers(msgspec.Struct, frozen=True, tag=12):
    """Wait until all stores that have begun are on the disk."""

    timeout_s: float


TierCall = OpenTiers | StartTransfers | AdvanceTiers | ClearTiers | FlushTiers
