"""The seam for slower memories (host memory, disk) that keep copies of KV blocks.

The scheduling side sees a tier as an index from block hashes to places. The copies are made by the
executor, as the `BlockTransfer`s of a step say. No tier is part of the engine yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.types.step import BlockTransfer

__all__ = ("BlockTier",)


class BlockTier(Protocol):
    """Index of one slower memory. A place holds the contents of one block."""

    def find(self, block_hash: BlockHash) -> int | None:
        """The place with these contents, or None."""
        ...

    def on_evict(self, block_id: int, block_hash: BlockHash) -> None:
        """A device block with these contents is about to be reused.

        The tier may plan a store: the next `take_stores` returns it, and the executor makes it
        before anything writes to the block.
        """
        ...

    def take_stores(self) -> list[BlockTransfer]:
        """The stores that were planned since the last call; the next step carries them."""
        ...

    def hold(self, places: Sequence[int]) -> None:
        """A load from these places begins: they keep their contents until `release`."""
        ...

    def release(self, places: Sequence[int]) -> None:
        """The load from these places has ended."""
        ...

    def clear(self) -> None:
        """Forget all contents."""
        ...
