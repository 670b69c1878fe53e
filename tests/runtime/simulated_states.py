"""The states of a simulated recurrent layer: a state is the tuple of all tokens folded into it.

As in the real ops, every row of a step reads before any row writes.
"""

from __future__ import annotations

from ostinato.runtime.types.step import ScheduledSequence

State = tuple[int, ...]


class SimulatedStates:
    """The slots of a recurrent layer, and the tokens that each row's state must have.

    A state begins with the salt of its request, so that no state is shared between salts.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots: list[State | None] = [None] * num_slots
        self._tokens: dict[int, list[int]] = {}  # row -> its salt, then its known tokens
        self.num_checkpoints = 0  # states that were written besides those after the last token

    def admit(self, row: int, salt: int, token_ids: list[int]) -> None:
        """Give a row to a sequence with these tokens."""
        self._tokens[row] = [salt, *token_ids]

    def run(self, entries: list[tuple[ScheduledSequence, list[int], bool]]) -> None:
        """Advance the states of a step.

        Args:
            entries: (entry, its tokens, whether these are void) of each sequence. Void tokens come
                after a step that gave no token.
        """
        found = [self._fold(*one) for one in entries]
        self._check_slots([entry for entry, _, _ in entries])
        for written in found:
            for slot, state in written:
                self._slots[slot] = state

    def verify(self, entry: ScheduledSequence, num_tokens: int) -> None:
        """Note that the first tokens of an entry with drafts were right."""
        known = self._tokens[entry.row]
        known[1 + entry.start :] = entry.token_ids[:num_tokens]

    def _fold(
        self, entry: ScheduledSequence, token_ids: list[int], is_void: bool
    ) -> list[tuple[int, State]]:
        """The states that a sequence writes, with their slots."""
        assert entry.state_slots is not None, "a step of a recurrent model without slots"
        read, write, checkpoint, at = entry.state_slots
        known = self._tokens[entry.row]
        state = self._slots[read] if read else (known[0],)
        assert state is not None, f"slot {read} is read before it is written"
        after = (*state, *token_ids)
        if not is_void:
            num_known = entry.num_new_tokens - entry.num_drafts
            end = 1 + entry.start + num_known
            known[1 + entry.start : end] = token_ids[:num_known]
            before_drafts = (*state, *token_ids[:num_known])
            assert before_drafts == tuple(known[:end]), (
                f"row {entry.row} has the states of other tokens"
            )
        if not checkpoint:
            assert at == 0
            return [(write, after)]
        assert 0 < at < entry.num_new_tokens
        self.num_checkpoints += 1
        return [(write, after), (checkpoint, (*state, *token_ids[:at]))]

    def _check_slots(self, entries: list[ScheduledSequence]) -> None:
        """No slot is written twice in a step, or written and read by different sequences."""
        writers: dict[int, int] = {}  # slot -> row
        for entry in entries:
            assert entry.state_slots is not None
            _, write, checkpoint, _ = entry.state_slots
            for slot in (write, checkpoint) if checkpoint else (write,):
                assert 0 < slot < len(self._slots), f"row {entry.row} writes to slot {slot}"
                assert slot not in writers, f"two writes to slot {slot} in one step"
                writers[slot] = entry.row
            # The states before drafts are the only ones that are kept in the slot that is read.
            assert not checkpoint or checkpoint != entry.state_slots[0] or entry.num_drafts
        for entry in entries:
            read = entry.state_slots[0] if entry.state_slots else 0
            writer = writers.get(read, entry.row)
            assert writer == entry.row, f"slot {read} is read by a row and written by another"
