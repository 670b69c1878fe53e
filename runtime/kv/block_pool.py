"""Allocates fixed-size KV cache blocks: reference counts, free list, lookup by content hash.

A block is free when its reference count is 0. A free block keeps its contents and its hash until it
is allocated again, so a later request with the same prefix can reuse it. Blocks are allocated from
the head of the free list. Block 0 is the null block. Padding tokens write to it. No sequence reads
it, and it is never allocated.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NewType

__all__ = ("NULL_BLOCK_ID", "Block", "BlockHash", "BlockPool", "hash_blocks", "hash_root")

NULL_BLOCK_ID = 0
_DIGEST_BYTES = 32
_KEY_PERSON = b"ostinato key"

BlockHash = NewType("BlockHash", bytes)
"""Digest of a full block's tokens and of all that comes before them (parent digest, salt)."""


def hash_root(cache_salt: str = "", extra_keys: Sequence[str] = ()) -> BlockHash:
    """The parent digest of a sequence's first block.

    Sequences share blocks only when their roots are equal: the same salt and the same keys in the
    same order.

    Args:
        cache_salt: chosen by the client.
        extra_keys: names of other things that keys and values depend on: adapter, media.
    """
    digest = blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES).digest()
    for key in extra_keys:
        # BLAKE2's `person` keeps this digest apart from the digests of salts and of blocks.
        keyed = blake2b(digest + key.encode(), digest_size=_DIGEST_BYTES, person=_KEY_PERSON)
        digest = keyed.digest()
    return BlockHash(digest)


def hash_blocks(
    parent: BlockHash,
    token_ids: Sequence[int],
    block_size: int,
    extras: Sequence[bytes] | None = None,
) -> list[BlockHash]:
    """Digests of consecutive full blocks: BLAKE2b over the parent's digest and 32-bit token ids.

    Args:
        parent: the digest of the block before, or `hash_root` at a sequence's beginning.
        token_ids: [n * block_size], each in [0, 2**32).
        block_size: tokens per block.
        extras: [n], for each block the bytes that its contents depend on besides its tokens. An
            entry may be empty. None = all entries are empty.

    Raises:
        OverflowError: a token id is not a 32-bit unsigned integer.
    """
    packed = array("I", token_ids).tobytes()
    width = 4 * block_size
    hashes: list[BlockHash] = []
    digest: bytes = parent
    for index, begin in enumerate(range(0, len(packed), width)):
        # The parent and the tokens have fixed lengths, so no separator is needed before `extras`.
        data = digest + packed[begin : begin + width]
        if extras is not None:
            data += extras[index]
        digest = blake2b(data, digest_size=_DIGEST_BYTES).digest()
        hashes.append(BlockHash(digest))
    return hashes


class Block:
    """One block's record. `prev_free` and `next_free` of a block in use are the block itself."""

    __slots__ = ("block_id", "hashes", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        # The hashes by which `get_cached` can find this block: one, or one of each unit that it
        # holds (`KVGroup.units`).
        self.hashes: tuple[BlockHash, ...] = ()
        self.prev_free = self
        self.next_free = self

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, {len(self.hashes)} hashes)"


class BlockPool:
    """Allocation, sharing and least-recently-used reuse of blocks 1 .. total_blocks - 1.

    Args:
        total_blocks: blocks in the cache tensors, the null block included.
        on_evict: called with a block's id and each of its hashes before a block with known contents
            is allocated for other contents. The old contents stay in the block until the next step
            writes.

    Raises:
        ValueError: there is no usable block.
    """

    def __init__(
        self, total_blocks: int, on_evict: Callable[[int, BlockHash], object] | None = None
    ) -> None:
        if total_blocks < 2:
            raise ValueError(
                "the KV cache needs at least 2 blocks (the null block and one to use), "
                f"got {total_blocks}; raise cache.memory_gib or lower cache.block_size"
            )
        self._blocks = [Block(block_id) for block_id in range(total_blocks)]
        self._cached: dict[BlockHash, Block] = {}
        self._on_evict = on_evict
        self._free_ends = Block(-1)  # sentinel of a ring: next_free is the head, prev_free the tail
        for block in self._blocks[1:]:
            _insert_free(self._free_ends.prev_free, block)
        self.num_blocks = total_blocks - 1  # usable, the null block excluded
        self.num_free = self.num_blocks
        self.num_evictions = 0  # hashed blocks that were allocated for other contents
        self.highest_block_id = NULL_BLOCK_ID  # the highest id that was ever allocated

    @property
    def num_cached(self) -> int:
        """Hashes by which a lookup finds a block, free or in use."""
        return len(self._cached)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks from the head of the free list, each with one reference and no hash.

        Returns:
            Their ids. None if fewer blocks are free; then nothing is taken.
        """
        if num_blocks > self.num_free:
            return None
        ends = self._free_ends
        block = ends.next_free
        block_ids: list[int] = []
        for _ in range(num_blocks):
            block_ids.append(block.block_id)
            block.ref_count = 1
            if block.hashes:
                for block_hash in block.hashes:
                    if self._on_evict is not None:
                        self._on_evict(block.block_id, block_hash)
                    del self._cached[block_hash]
                block.hashes = ()
                self.num_evictions += 1
            following = block.next_free
            block.prev_free = block.next_free = block
            block = following
        ends.next_free, block.prev_free = block, ends
        self.num_free -= num_blocks
        self.highest_block_id = max(self.highest_block_id, *block_ids, NULL_BLOCK_ID)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block. A free block leaves the free list; its contents stay."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                _remove_free(block)
                self.num_free -= 1
            block.ref_count += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a table, last block first.

        Blocks that no table holds any more go to the free list. Blocks with a hash go to the tail,
        the last block of a prefix first. So the end of a prefix is evicted before its beginning.
        Blocks without a hash go to the head.

        Raises:
            RuntimeError: a block is freed more often than it was taken.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.ref_count <= 0 or block_id == NULL_BLOCK_ID:
                raise RuntimeError(f"block {block_id} is freed and no table holds it")
            block.ref_count -= 1
            if block.ref_count == 0:
                ends = self._free_ends
                _insert_free(ends.prev_free if block.hashes else ends, block)
                self.num_free += 1

    def renew(self, block_id: int) -> None:
        """Let a free block with known contents be reused after all others, because it was used."""
        block = self._blocks[block_id]
        if block.ref_count == 0 and block.hashes:
            _remove_free(block)
            _insert_free(self._free_ends.prev_free, block)

    def forget(self, block_id: int) -> None:
        """Drop the hashes of one block, whose contents change. A free block is allocated next."""
        block = self._blocks[block_id]
        for block_hash in block.hashes:
            del self._cached[block_hash]
        block.hashes = ()
        if block.ref_count == 0:
            _remove_free(block)
            _insert_free(self._free_ends, block)

    def is_cached(self, block_id: int) -> bool:
        """Whether a lookup finds the block."""
        return bool(self._blocks[block_id].hashes)

    def get_cached(self, block_hash: BlockHash) -> int | None:
        """The id of a block with these contents, or None."""
        block = self._cached.get(block_hash)
        return None if block is None else block.block_id

    def register(self, block_id: int, block_hash: BlockHash) -> bool:
        """Let lookups find a block that a table holds.

        The first block with certain contents keeps the hash. A second block with the same contents
        stays in its table without a hash. After it is freed, it is allocated before other blocks.

        Args:
            block_id: a block that is full, or whose first units are.
            block_hash: the hash of all tokens up to the end of its last full unit.

        Returns:
            False if another block has the same contents already.
        """
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"{block!r} gets a hash while no table holds it"
        if block_hash in self._cached:
            return False
        self._cached[block_hash] = block
        block.hashes += (block_hash,)
        return True

    def ref_count(self, block_id: int) -> int:
        """How many tables hold the block."""
        return self._blocks[block_id].ref_count

    def num_held_once(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are held by exactly one table."""
        blocks = self._blocks
        return sum(1 for block_id in block_ids if blocks[block_id].ref_count == 1)

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are in the free list."""
        blocks = self._blocks
        return sum(1 for block_id in block_ids if blocks[block_id].ref_count == 0)

    def kinds(self) -> bytes:
        """The state of each usable block, from block 1 on. O(blocks).

        0 = free, 1 = free with known contents, 2 = held by one table, 3 = held by several tables.
        """
        blocks = self._blocks[1:]
        return bytes(
            [
                (2 if one.ref_count == 1 else 3) if one.ref_count else bool(one.hashes)
                for one in blocks
            ]
        )

    def forget_cached(self) -> None:
        """Drop every hash. Lookups find nothing until blocks are registered again."""
        for block in self._cached.values():
            block.hashes = ()
        self._cached.clear()

    def free_block_ids(self) -> list[int]:
        """The free list, beginning with the block that is allocated next."""
        block_ids: list[int] = []
        block = self._free_ends.next_free
        while block is not self._free_ends:
            block_ids.append(block.block_id)
            block = block.next_free
        return block_ids

    def check_integrity(self) -> None:
        """Compare free list, reference counts and hash table with each other. O(blocks).

        Raises:
            AssertionError: the records disagree; the text says how.
        """
        free = self.free_block_ids()
        _check(
            len(free) == self.num_free,
            f"{len(free)} blocks are listed free, {self.num_free} counted",
        )
        _check(len(set(free)) == len(free), "a block is in the free list twice")
        held = [block for block in self._blocks if block.ref_count > 0]
        used = len(held)
        _check(
            len(free) + used == self.num_blocks,
            f"{len(free)} free + {used} used blocks are not {self.num_blocks}",
        )
        null = self._blocks[NULL_BLOCK_ID]
        _check(null.ref_count == 0 and not null.hashes, f"the null block is in use: {null!r}")
        _check(NULL_BLOCK_ID not in free, "the null block is in the free list")
        for block in self._blocks:
            _check(block.ref_count >= 0, f"{block!r} was freed too often")
            for block_hash in block.hashes:
                _check(self._cached.get(block_hash) is block, f"{block!r} cannot be found")
        for block_hash, block in self._cached.items():
            _check(block_hash in block.hashes, f"{block!r} is found by a hash that it lost")
        for block in held:
            _check(block.next_free is block.prev_free is block, f"{block!r} is held and free")

    def check_references(self, counts: Mapping[int, int], name: str) -> None:
        """Compare the reference counts with those that are known to the pool's users.

        Args:
            counts: block id -> references. Blocks without any may be left out.
            name: what a block is called in the error.

        Raises:
            AssertionError: a count differs; the text names the block.
        """
        for block in self._blocks:
            held, listed = block.ref_count, counts.get(block.block_id, 0)
            if held != listed:
                raise AssertionError(
                    f"{name} {block.block_id} has {held} references and is in {listed} tables"
                )


def _insert_free(after: Block, block: Block) -> None:
    following = after.next_free
    block.prev_free, block.next_free = after, following
    after.next_free = following.prev_free = block


def _remove_free(block: Block) -> None:
    before, following = block.prev_free, block.next_free
    before.next_free, following.prev_free = following, before
    block.prev_free = block.next_free = block


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise AssertionError(f"block pool: {message}")
