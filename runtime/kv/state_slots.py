"""`StateSlots`: the slots in which recurrent layers keep the states of sequences.

A slot has the states of all recurrent layers after some tokens of a sequence. A running sequence
holds the slot that its last planned step writes, and its next step reads it. States are never
copied. A step writes in place, unless another sequence or a later request needs the old states.
Then it reads the old slot and writes a new one (ops/recurrent/states.py has the rules of a step).

States cannot go back, and a prefix can be used only where its states were kept. Therefore states at
the end of whole units are kept as checkpoints: lookups find them by the hash of the unit, like KV
blocks. A checkpoint has no reference of its own. The least recently used one is overwritten first.

- A chunk of known tokens makes one at its last whole unit, or at the branch point of its sequence.
  The branch point is where the cached KV blocks of its prefix ended, if there were states for a
  shorter prefix only (Marconi, arXiv:2411.19379). So the next request with this prefix finds both.
- A decode makes one when it fills a unit. Then the one before it in the same answer is dropped.

A running sequence needs a second slot where it reads a checkpoint. While a sequence waits for a
slot, the others leave one free: they overwrite checkpoints of their own, and make none in a chunk.

A step that verifies drafts writes two slots: the sequence's own one with the states before the
first draft, and one with those after the last. When the step was read, one of both is given up. If
some drafts were right, but not all, their tokens are computed again. Drafts end with their unit.

A step reads states before other rows of the step have written theirs. So states that a step writes
are found from the next step on. A slot that a step reads is free for others from the next step on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ostinato.runtime.kv.block_pool import NULL_BLOCK_ID, BlockHash, BlockPool
from ostinato.runtime.kv.block_table import (
    NO_CHECKPOINT,
    BlockTable,
    RecurrentCheckpoint,
    SequenceStates,
    StatePlan,
)

__all__ = ("FoundStates", "StateSlots")


class FoundStates(NamedTuple):
    """The longest prefix whose states a step can read."""

    num_units: int
    slot: int  # 0 = no unit was found
    has_fresh: bool  # the step that is being planned writes the states after a longer prefix


class StateSlots:
    """Slots 1 to total_slots - 1, with checkpoints. Slot 0 stands for states of zeros.

    Args:
        total_slots: slots in the tensors of recurrent layers, slot 0 included.
        block_size: tokens of a unit.

    Raises:
        ValueError: there is no usable slot.
    """

    def __init__(self, total_slots: int, block_size: int) -> None:
        if total_slots < 2:
            raise ValueError(
                f"a model with recurrent layers needs at least one slot for states besides slot 0, "
                f"got {total_slots} with it; raise cache.state_slots"
            )
        self._pool = BlockPool(total_slots)
        self._block_size = block_size
        # Slots of which one reference is dropped when the next step is planned: those that the step
        # being planned reads or writes, and that no sequence will read next.
        self._leaving: list[int] = []
        self._fresh: set[int] = set()  # checkpoints that the step being planned writes
        self._num_drafting = 0  # sequences that hold a slot for the states after drafts
        # Slots that are left to a waiting sequence, in the next step and in the one being planned.
        self._wanted = 0
        self._reserved = 0

    @property
    def num_slots(self) -> int:
        """Usable slots, slot 0 excluded."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Slots that can be taken. Checkpoints that no sequence holds count as free."""
        return self._pool.num_free

    @property
    def num_unused(self) -> int:
        """Slots that can be taken when the next step is planned. O(sequences of a step)."""
        counts = Counter(self._leaving).items()
        return self.num_free + sum(self._pool.ref_count(slot) == count for slot, count in counts)

    @property
    def num_leaving(self) -> int:
        """Slots that can become free when a later step is planned, or one in flight is read."""
        return len(self._leaving) + self._num_drafting

    @property
    def num_evictions(self) -> int:
        """Checkpoints whose slots were reused before they were outdated, since the start."""
        return self._pool.num_evictions

    def begin_step(self) -> None:
        """Note that a step is planned, after all steps before it."""
        if self._leaving:
            self._pool.free(self._leaving)
            self._leaving.clear()
        self._fresh.clear()
        self._reserved, self._wanted = self._wanted, 0

    def reserve(self) -> None:
        """In the next step, leave a slot to a waiting sequence if the running ones can."""
        self._wanted = 1

    def find(self, hashes: Sequence[BlockHash], num_units: int) -> FoundStates:
        """The longest prefix whose states are kept.

        Args:
            hashes: [num_units] or more, of a sequence's units.
            num_units: units that may be found.
        """
        has_fresh = False
        for units in range(num_units, 0, -1):
            slot = self._pool.get_cached(hashes[units - 1])
            if slot is None:
                continue
            if slot not in self._fresh:
                return FoundStates(units, slot, has_fresh)
            has_fresh = True
        return FoundStates(0, NULL_BLOCK_ID, has_fresh)

    def admit(self, table: BlockTable, slot: int, branch: int) -> None:
        """Let a sequence begin with the states in a slot, or with zeros.

        A slot must be free, so that the first step can be planned.

        Args:
            table: holds no slot.
            slot: from `find`, in the same step.
            branch: where its next chunk across this position makes a checkpoint; 0 = nowhere.
        """
        states = _states_of(table)
        assert not states.slot, f"{table!r} is admitted while it holds states"
        self._reserved = 0
        if slot:
            self._pool.touch((slot,))
        states.slot, states.branch = slot, branch

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Let a sequence with the same tokens share the states. The next step of each leaves them.

        All computed tokens of the parent must be known.
        """
        old, new = _states_of(parent), _states_of(child)
        assert not new.slot, f"{child!r} is forked while it holds states"
        if old.slot:
            self._pool.touch((old.slot,))
        old.in_place = None
        new.slot, new.branch = old.slot, old.branch

    def has_room(self, table: BlockTable) -> bool:
        """Whether there is a slot that the next step of a sequence can write.

        A slot that only this sequence holds can be written, even if it is a checkpoint.
        """
        return self._pool.num_free > 0 or self.is_sole_holder(table)

    def is_sole_holder(self, table: BlockTable) -> bool:
        """Whether a slot becomes free when this sequence gives up its states."""
        slot = _states_of(table).slot
        return slot != NULL_BLOCK_ID and self._pool.ref_count(slot) == 1

    def plan(self, table: BlockTable, token_ids: Sequence[int], start: int, end: int) -> StatePlan:
        """The slots of a sequence in the step that is being planned. `has_room` must hold.

        Args:
            table: the sequence's table.
            token_ids: the sequence's known tokens.
            start: the first position that the step computes.
            end: the position after the last.
        """
        states, num_known = _states_of(table), len(token_ids)
        self.settle(table, token_ids)
        table.hash_up_to(token_ids, min(end, num_known) // self._block_size, self._block_size)
        states.pending = 0
        read = write = states.slot
        if not read or self._pool.is_cached(read) or self._pool.ref_count(read) > 1:
            write = self._leave(read)
        states.slot = write
        checkpoint, at = NULL_BLOCK_ID, self._checkpoint_at(states, start, end, num_known)
        if at:
            checkpoint = self._keep(table, at // self._block_size)
        states.in_place = None
        if not end % self._block_size:
            states.pending = end // self._block_size
            if self.settle(table, token_ids):
                self._fresh.add(write)
        elif not states.outdated.slot:
            states.in_place = write, write, 0, 0
        return read, write, checkpoint, at - start if checkpoint else 0

    def draft_room(self, table: BlockTable, plan: StatePlan | None, start: int) -> int:
        """How many drafts a decode of the step that is being planned can verify.

        There is room for none if the decode reads another slot than it writes, because its old slot
        is a checkpoint or shared. There is none either if fewer slots than sequences hold would be
        free, because those keep the checkpoints of these sequences and start waiting ones.

        Args:
            table: the sequence's table.
            plan: the decode's slots without drafts.
            start: the position of its last known token.
        """
        if plan is None or plan != _states_of(table).in_place:
            return 0
        num_held = self._pool.num_blocks - self._pool.num_free - self._num_drafting
        if self._pool.num_free - 1 < num_held + self._reserved:
            return 0
        return self._block_size - 1 - start % self._block_size

    def plan_drafts(self, table: BlockTable) -> StatePlan:
        """The slots of a decode that verifies drafts. There must be room for one."""
        states, taken = _states_of(table), self._pool.allocate(1)
        assert taken is not None, "the caller has made sure that there is room"
        states.draft_slot, states.in_place = taken[0], None
        self._num_drafting += 1
        return states.slot, taken[0], states.slot, 1

    def settle_drafts(self, table: BlockTable, end: int, *, are_right: bool) -> None:
        """Keep the states after the drafts of a step if all were right, else those before them.

        It is called when the step was read, or when the draft model proposed none.

        Args:
            table: the sequence's table.
            end: the position after the last draft.
            are_right: whether all drafts were right. False if there are none.
        """
        states, size = _states_of(table), self._block_size
        dropped, kept = states.draft_slot, states.slot
        if are_right:
            dropped, kept = kept, dropped
        self._pool.free((dropped,))
        self._num_drafting -= 1
        states.slot, states.draft_slot = kept, NULL_BLOCK_ID
        if are_right and not end % size:
            states.pending = end // size
        else:
            states.in_place = kept, kept, 0, 0

    def settle(self, table: BlockTable, token_ids: Sequence[int]) -> bool:
        """Note that tokens arrived: register the pending checkpoint, drop an outdated one.

        Args:
            table: the sequence's table.
            token_ids: the sequence's known tokens.

        Returns:
            Whether a checkpoint was registered.
        """
        states, num_known, is_new = _states_of(table), len(token_ids), False
        units = states.pending
        if units and units * self._block_size <= num_known:
            states.pending = 0
            table.hash_up_to(token_ids, units, self._block_size)
            is_new = self._register(table, units, states.slot)
        if states.outdated.slot and states.last.num_units * self._block_size < num_known:
            self._drop(states.outdated, table.hashes)
            states.outdated = NO_CHECKPOINT
        return is_new

    def rewind(self, table: BlockTable, token_ids: Sequence[int], least: int) -> int | None:
        """Go back to the last checkpoint before the last token, which must be computed again.

        Args:
            table: the sequence's table.
            token_ids: the sequence's known tokens.
            least: the first position that can be computed again.

        Returns:
            The position that the next step begins with. None if the checkpoints from `least` on
            are lost; then the sequence must give up its states.
        """
        states, size = _states_of(table), self._block_size
        states.pending = 0  # its token will not come
        most = (len(token_ids) - 1) // size
        table.hash_up_to(token_ids, most, size)
        found = self._find_last(table.hashes, most)
        if found.num_units * size < least:
            return None
        if found.slot:
            self._pool.touch((found.slot,))
        self.release(table)
        states.slot = found.slot
        return found.num_units * size

    def release(self, table: BlockTable) -> None:
        """Give up the slot of a sequence. Its checkpoints stay until their slots are reused."""
        states = _states_of(table)
        if states.slot:
            self._pool.free((states.slot,))
        if states.draft_slot:
            self._pool.free((states.draft_slot,))
            self._num_drafting -= 1
            states.draft_slot = NULL_BLOCK_ID
        states.slot, states.in_place, states.pending, states.branch = NULL_BLOCK_ID, None, 0, 0

    def reset(self) -> bool:
        """Drop all checkpoints. While a sequence holds states: change nothing, return False."""
        self.begin_step()  # no step is being planned
        if self._pool.num_free != self._pool.num_blocks:
            return False
        self._pool.forget_cached()
        return True

    def check_integrity(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Check the pool. If all tables with states are given, compare references with them.

        Raises:
            AssertionError: the records contradict each other; the text names the slot.
        """
        self._pool.check_integrity()
        if tables is not None:
            counts = Counter(self._leaving)
            for states in map(_states_of, tables):
                counts.update((states.slot, states.draft_slot))
            del counts[NULL_BLOCK_ID]
            self._pool.check_references(counts, "states: slot")

    def _find_last(self, hashes: Sequence[BlockHash], num_units: int) -> RecurrentCheckpoint:
        """The latest checkpoint of the first units, also if the last planned step writes it."""
        for units in range(num_units, 0, -1):
            slot = self._pool.get_cached(hashes[units - 1])
            if slot is not None:
                return RecurrentCheckpoint(units, slot)
        return NO_CHECKPOINT

    def _leave(self, slot: int) -> int:
        """A new slot for a sequence that reads `slot` in this step; the same one if none is free.

        Then `slot` is a checkpoint that only this sequence holds. It is overwritten. So it is too
        if the free slots are reserved.
        """
        is_own = slot != NULL_BLOCK_ID and self._pool.ref_count(slot) == 1
        is_reserved = is_own and self._pool.num_free <= self._reserved
        taken = None if is_reserved else self._pool.allocate(1)
        if taken is None:
            assert is_own, "the caller has made sure that there is room"
            self._pool.forget(slot)
            return slot
        if slot:
            self._leaving.append(slot)
        return taken[0]

    def _checkpoint_at(self, states: SequenceStates, start: int, end: int, num_known: int) -> int:
        """The position inside the chunk [start, end) at which it makes a checkpoint; 0 = nowhere.

        States at its end become a checkpoint without a further slot. But an equal prompt can use
        only a prefix that leaves its last token to compute. So a chunk with the last known token
        has a checkpoint before its end too.
        """
        if end - start < 2:
            return 0
        at = (end - 1 if end == num_known else end) // self._block_size * self._block_size
        if states.branch and states.branch <= end:
            if states.branch > start:
                at = states.branch
            states.branch = 0
        return at if start < at < end else 0

    def _keep(self, table: BlockTable, num_units: int) -> int:
        """A slot for a checkpoint that the step writes besides the last states; 0 = none.

        There is none if lookups find these states already, or no slot is free and not reserved.
        """
        cached = self._pool.get_cached(table.hashes[num_units - 1])
        if cached is not None:
            self._pool.renew(cached)
            return NULL_BLOCK_ID
        is_reserved = self._pool.num_free <= self._reserved
        taken = None if is_reserved else self._pool.allocate(1)
        if taken is None:
            return NULL_BLOCK_ID
        slot = taken[0]
        self._register(table, num_units, slot)
        self._fresh.add(slot)
        self._leaving.append(slot)
        return slot

    def _register(self, table: BlockTable, num_units: int, slot: int) -> bool:
        """Let lookups find states; returns whether they did not find the same states before."""
        if not self._pool.register(slot, table.hashes[num_units - 1]):
            return False
        states = _states_of(table)
        if num_units * self._block_size > states.num_prompt_tokens:
            if states.outdated.slot:
                self._drop(states.outdated, table.hashes)
            states.outdated, states.last = states.last, RecurrentCheckpoint(num_units, slot)
        return True

    def _drop(self, checkpoint: RecurrentCheckpoint, hashes: Sequence[BlockHash]) -> None:
        """Let the slot of a checkpoint be reused next, unless a sequence holds it."""
        slot = checkpoint.slot
        is_kept = self._pool.get_cached(hashes[checkpoint.num_units - 1]) == slot
        if is_kept and not self._pool.ref_count(slot):
            self._pool.forget(slot)


def _states_of(table: BlockTable) -> SequenceStates:
    assert table.states is not None, "a table of a model with recurrent layers has states"
    return table.states
