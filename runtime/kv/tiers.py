"""The protocol of slower memories (host memory, disk) that keep copies of KV blocks.

For the scheduler, a tier is an index from block hashes to places. A place holds one block. The
executor makes the copies that the `BlockTransfer`s of a step name. The engine has no tier yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.types.step import BlockTransfer

__all__ = ("BlockTier",)


class BlockTier(Protocol):
    """The index of one slower memory."""

    def find(self, block_hash: BlockHash) -> int | None:
        """The place with these contents, or None."""
        ...

    def on_evict(self, block_id: int, block_hash: BlockHash) -> None:
        """Note that a device block with these contents is about to be reused.

        The tier can plan a store: the next `take_stores` returns it, and the executor copies the
        block before a step writes to the block.
        """
        ...

    def take_stores(self) -> list[BlockTransfer]:
        """The stores that were planned since the last call; the next step carries them."""
        ...

    def hold(self, places: Sequence[int]) -> None:
        """Keep the contents of these places until `release`, because a load begins."""
        ...

    def release(self, places: Sequence[int]) -> None:
        """End `hold`, because the load from these places has ended."""
        ...

    def clear(self) -> None:
        """Forget all contents."""
        ...
