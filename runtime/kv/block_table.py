"""The block table of one sequence: which KV cache blocks hold its tokens, and their hashes.

A table is plain data. `KVCacheManager` fills it, registers its full blocks and frees its blocks. A
table refers to no request and no scheduler. Token ids and counts come with each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ostinato.runtime.kv.block_pool import BlockHash, hash_root
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage

__all__ = ("BlockTable", "media_extras")


def media_extras(media: Iterable[PromptImage | PromptSound], block_size: int) -> dict[int, bytes]:
    """The `BlockTable.extras` of a prompt with images or sounds.

    For each one that has placeholder tokens in a block, these are its cache key and where it
    begins, counted from the block's first token (32-bit, little-endian).
    """
    extras: dict[int, bytes] = {}
    for one in media:
        for block in range(one.begin // block_size, -(-one.end // block_size)):
            offset = one.begin - block * block_size
            place = offset.to_bytes(4, "little", signed=True)
            extras[block] = extras.get(block, b"") + one.cache_key + place
    return extras


class BlockTable:
    """Blocks of one sequence, in the order of positions.

    Args:
        root: the parent hash of the first block; see `hash_root`. Tables share blocks only with
            tables of an equal root.
        extras: block index -> bytes that the contents depend on besides the tokens. An example is
            the digest of an image whose placeholder tokens lie in the block.

    Attributes:
        block_ids: block ids; the index is position // block_size. Blocks are only appended, or
            replaced by a copy. They are freed all at once.
        hashes: hashes of the first full blocks, so far as they are computed. They are kept when the
            blocks are freed, because the tokens stay the same.
        num_registered: how many blocks were registered by their hash, counted from the first.
        num_kept: how many of the first blocks are worth a copy in a slower tier; None = no block
            may be copied.
    """

    __slots__ = ("block_ids", "extras", "hashes", "num_kept", "num_registered", "root")

    def __init__(
        self, root: BlockHash | None = None, extras: Mapping[int, bytes] | None = None
    ) -> None:
        self.root = root or hash_root()
        self.extras = extras
        self.block_ids: list[int] = []
        self.hashes: list[BlockHash] = []
        self.num_registered = 0
        self.num_kept: int | None = None

    def fork(self) -> BlockTable:
        """An empty table for a sequence with the same tokens so far. The hashes are copied."""
        other = BlockTable(self.root, self.extras)
        other.hashes = self.hashes[:]
        other.num_kept = self.num_kept
        return other

    def __repr__(self) -> str:
        return f"BlockTable({self.block_ids}, {self.num_registered} registered)"
