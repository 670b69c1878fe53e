"""The block tables of one sequence: which KV cache blocks hold its tokens, and their hashes.

With recurrent layers, it says too which slot holds the sequence's states (state_slots.py).

A table is plain data. `KVCacheManager` fills it, registers its full blocks and frees its blocks. A
table refers to no request and no scheduler. Token ids and counts come with each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ostinato.models.kv_groups import KVGroup
from ostinato.runtime.kv.block_pool import NULL_BLOCK_ID, BlockHash, hash_blocks, hash_root
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage

__all__ = (
    "NO_CHECKPOINT",
    "BlockTable",
    "GroupBlocks",
    "RecurrentCheckpoint",
    "SequenceStates",
    "StatePlan",
    "media_extras",
)

StatePlan = tuple[int, int, int, int]
"""The slots of one sequence in a step: read, write, checkpoint, tokens before the checkpoint."""


def media_extras(media: Iterable[PromptImage | PromptSound], block_size: int) -> dict[int, bytes]:
    """The `BlockTable.extras` of a prompt with images or sounds.

    For each one that has placeholder tokens in a unit of `block_size` tokens, these are its cache
    key and where it begins, counted from the unit's first token (32-bit, little-endian).
    """
    extras: dict[int, bytes] = {}
    for one in media:
        for block in range(one.begin // block_size, -(-one.end // block_size)):
            offset = one.begin - block * block_size
            place = offset.to_bytes(4, "little", signed=True)
            extras[block] = extras.get(block, b"") + one.cache_key + place
    return extras


class GroupBlocks:
    """The blocks that a sequence has for one `KVGroup`.

    Attributes:
        ids: block ids; the index is position // tokens of a block. Blocks are only appended, or
            replaced by a copy.
        num_freed: the first entries of `ids`, which are the null block, because their blocks lie
            outside of the group's window.
    """

    __slots__ = ("ids", "num_freed")

    def __init__(self, ids: list[int] | None = None, num_freed: int = 0) -> None:
        self.ids = [] if ids is None else ids
        self.num_freed = num_freed

    def held(self) -> list[int]:
        """The ids without those of the null block."""
        return self.ids[self.num_freed :] if self.num_freed else self.ids


class RecurrentCheckpoint(NamedTuple):
    """States that lookups find, unless their slot was reused."""

    num_units: int
    slot: int


NO_CHECKPOINT = RecurrentCheckpoint(0, NULL_BLOCK_ID)


class SequenceStates:
    """Where a sequence has its states. `StateSlots` changes it.

    Args:
        num_prompt_tokens: checkpoints at later positions are those of the answer.

    Attributes:
        slot: the slot that its last planned step writes. 0 = its next token is its first.
        in_place: the plan of a decode that writes to `slot` and fills no unit; None = `plan` must
            be called.
        branch: the position at which its next chunk across it makes a checkpoint; 0 = none.
        pending: units whose states are in `slot`, while their last token has not arrived; 0 = none.
        last: the last checkpoint of the answer.
        outdated: the one before it. It is dropped when the token after `last` has arrived, because
            a step that gives no token goes back behind `last`.
        draft_slot: while drafts are verified, the slot of the states after all of them. `slot` has
            those before the first draft. 0 = no drafts are verified.
    """

    __slots__ = (
        "branch",
        "draft_slot",
        "in_place",
        "last",
        "num_prompt_tokens",
        "outdated",
        "pending",
        "slot",
    )

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.slot = self.draft_slot = NULL_BLOCK_ID
        self.in_place: StatePlan | None = None
        self.branch = 0
        self.pending = 0
        self.last = self.outdated = NO_CHECKPOINT

    def fork(self) -> SequenceStates:
        """Those of a sequence with the same tokens, which holds no slot yet."""
        return SequenceStates(self.num_prompt_tokens)


class BlockTable:
    """Blocks of one sequence, in the order of positions.

    Args:
        root: the parent hash of the first unit; see `hash_root`. Tables share blocks only with
            tables of an equal root.
        extras: unit index -> bytes that the contents depend on besides the tokens. An example is
            the digest of an image whose placeholder tokens lie in the unit.
        num_groups: groups of layers that have blocks of their own; see `KVGroup`.

    Attributes:
        groups: the blocks of each group of layers.
        hashes: hashes of the first full units, so far as they are computed. They are kept when the
            blocks are freed, because the tokens stay the same. A unit is `cache.block_size` tokens.
        num_registered: how many units were registered by their hash, counted from the first.
        num_kept: how many of the first blocks are worth a copy in a slower tier; None = no block
            may be copied.
        states: where recurrent layers have the states of the sequence; None = no layer is
            recurrent.
    """

    __slots__ = ("extras", "groups", "hashes", "num_kept", "num_registered", "root", "states")

    def __init__(
        self,
        root: BlockHash | None = None,
        extras: Mapping[int, bytes] | None = None,
        num_groups: int = 1,
    ) -> None:
        self.root = root or hash_root()
        self.extras = extras
        self.groups = [GroupBlocks() for _ in range(num_groups)]
        self.hashes: list[BlockHash] = []
        self.num_registered = 0
        self.num_kept: int | None = None
        self.states: SequenceStates | None = None

    @property
    def block_ids(self) -> list[int]:
        """The ids of the first group, with null blocks. It is the only group of most models."""
        return self.groups[0].ids

    @property
    def is_empty(self) -> bool:
        """Whether the table has no blocks."""
        return not self.groups[0].ids

    def held(self) -> list[int]:
        """The ids of all blocks that the table holds, of all groups."""
        groups = self.groups
        if len(groups) == 1:
            return groups[0].held()
        return [block_id for group in groups for block_id in group.held()]

    def hash_up_to(self, token_ids: Sequence[int], num_units: int, block_size: int) -> None:
        """Hash the first units of the sequence's tokens, if they are not hashed yet.

        Args:
            token_ids: the sequence's known tokens, `num_units * block_size` or more.
            num_units: how many units have a hash afterwards, at least.
            block_size: tokens of a unit.
        """
        hashes = self.hashes
        if len(hashes) < num_units:
            parent = hashes[-1] if hashes else self.root
            extras = None
            if self.extras:
                extras = [self.extras.get(i, b"") for i in range(len(hashes), num_units)]
            unhashed = token_ids[len(hashes) * block_size : num_units * block_size]
            hashes += hash_blocks(parent, unhashed, block_size, extras)

    def check_shape(self, groups: Sequence[KVGroup]) -> None:
        """Raise AssertionError if null blocks are elsewhere than behind a window."""
        for group, blocks in zip(groups, self.groups, strict=True):
            nulls = [index for index, one in enumerate(blocks.ids) if one == NULL_BLOCK_ID]
            if nulls != list(range(blocks.num_freed)) or (nulls and not group.window):
                raise AssertionError(
                    f"KV cache: {self!r} has null blocks at {nulls}, and {blocks.num_freed} are "
                    f"freed behind a window of {group.window}"
                )

    def block_hashes(self, units: int) -> list[BlockHash]:
        """The hashes of the first full blocks of the first group, which have `units` units each."""
        return self.hashes if units == 1 else self.hashes[units - 1 :: units]

    def fork(self) -> BlockTable:
        """An empty table for a sequence with the same tokens so far. The hashes are copied."""
        other = BlockTable(self.root, self.extras, len(self.groups))
        other.hashes = self.hashes[:]
        other.num_kept = self.num_kept
        if self.states is not None:
            other.states = self.states.fork()
        return other

    def __repr__(self) -> str:
        ids = [group.ids for group in self.groups]
        return f"BlockTable({ids}, {self.num_registered} registered)"
