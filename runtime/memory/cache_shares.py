"""Chooses the memory of the cache, and how blocks and states of recurrent layers share it.

A running sequence has a slot. The other slots keep checkpoints: states of prefixes, and the states
to which sequences go back if a step is repeated. All numbers here include slot 0, which stands for
a sequence that begins.

    cache.state_slots is set   so many
    otherwise                  two for each of scheduler.max_num_seqs sequences, three with drafts,
                               if all their states and blocks fit, or if their states take at most
                               a quarter of the cache's memory. If not, what this quarter holds, but
                               one for each sequence and one more

If `scheduler.max_num_seqs` is not set, it is an upper bound that the slots may lower. Then the
states of the sequences take at most half of the cache's memory, and leave room for a sequence of
full length. If `model.max_model_len` is set, checkpoints leave room for a sequence of this length.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.sections.cache_schema import CacheConfig
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.memory.footprint import ModelFootprint
from ostinato.runtime.memory.plan_texts import size_text

__all__ = ("StateChoice", "cache_bytes_of")

_SPARE = 2  # slots that no running sequence has: slot 0, and one to write to while another is read
_QUARTER, _HALF = 4, 2
_GIB = 1 << 30
_CPU_KV_BYTES = 4 * _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChoice:
    """What decides the number of slots."""

    slot_bytes: int  # of all recurrent layers of this rank
    has_states: bool  # whether any layer of the whole model is recurrent
    slots: int | None  # cache.state_slots; None = chosen
    num_seqs: int  # sequences that run at once, at most
    is_set: bool  # whether scheduler.max_num_seqs is set
    per_sequence: int = 2  # slots that a sequence can use: its own, a checkpoint, one for drafts

    @classmethod
    def of(cls, model: ModelFootprint, cache: CacheConfig, limits: StepLimits) -> StateChoice:
        """What decides the number of slots of an engine.

        Args:
            model: the model's sizes.
            cache: the number that is set.
            limits: the largest step.

        Raises:
            StartupError: cache.state_slots is less than one for each sequence and one more, or the
                model has no recurrent layers.
        """
        slots, num_seqs, is_set = cache.state_slots, limits.max_num_seqs, not limits.chooses_seqs
        if slots is not None and not model.has_states:
            raise StartupError(
                f"cache.state_slots={slots} is for models with recurrent layers, and this model "
                "has none; leave it out"
            )
        if slots is not None and is_set and slots <= num_seqs:
            raise StartupError(
                f"cache.state_slots={slots} is too small for scheduler.max_num_seqs={num_seqs}: "
                "each running sequence has a slot, and one more is needed; raise the first to at "
                f"least {num_seqs + 1} or lower the second"
            )
        return cls(
            slot_bytes=model.state_bytes,
            has_states=model.has_states,
            slots=slots,
            num_seqs=num_seqs,
            is_set=is_set,
            per_sequence=3 if limits.rows_per_seq > 1 else 2,
        )

    @property
    def least(self) -> int:
        """The fewest slots that the engine starts with."""
        if not self.has_states:
            return 0
        if self.slots is not None:
            return self.slots + 1
        return (self.num_seqs if self.is_set else 1) + _SPARE

    @property
    def wanted(self) -> int:
        """The most slots that are useful."""
        if not self.has_states:
            return 0
        if self.slots is not None:
            return self.slots + 1
        return max(self.least, self.per_sequence * self.num_seqs + 1)

    @property
    def least_bytes(self) -> int:
        return self.least * self.slot_bytes

    @property
    def wanted_bytes(self) -> int:
        return self.wanted * self.slot_bytes

    def can_free(self, num_bytes: int) -> bool:
        """Whether fewer sequences or slots would free so much of `least_bytes`."""
        return self.least_bytes - (1 + _SPARE) * self.slot_bytes >= num_bytes

    def choose(
        self,
        cache_bytes: int,
        *,
        all_sequences: int,
        one_sequence: int,
        block_bytes: int,
        is_asked: bool,
    ) -> int:
        """The number of slots.

        Args:
            cache_bytes: memory for blocks and states.
            all_sequences: bytes of the blocks of all sequences of full length.
            one_sequence: the same, of one sequence.
            block_bytes: bytes of one block; 0 = no layer of this rank has keys and values.
            is_asked: whether the full length is set, and not the model's own.
        """
        size, wanted = self.slot_bytes, self.wanted
        if self.least == wanted or not size or all_sequences + self.wanted_bytes <= cache_bytes:
            return wanted
        if not block_bytes:
            return max(self.least, min(wanted, cache_bytes // size))
        chosen = min(wanted, cache_bytes // _QUARTER // size)
        beside_one = (cache_bytes - one_sequence) // size
        if not self.is_set:
            half = cache_bytes // _HALF // size
            if beside_one >= chosen:
                half = min(half, beside_one)  # the context is not shortened for more sequences
            chosen = max(chosen, min(self.num_seqs + _SPARE, half))
        kept = beside_one if is_asked else (cache_bytes - 2 * block_bytes) // size
        return max(self.least, min(chosen, kept))

    def reason(self, chosen: int) -> str:
        """One sentence about the number of slots.

        Args:
            chosen: from `choose`.
        """
        slots, seqs = chosen - 1, self.num_seqs
        if not self.slot_bytes:
            return f"states: {slots} slots, which take no memory on this stage"
        text = f"states: {slots} slots of {self.slot_bytes / 1024:,.1f} KiB"
        if self.slots is not None:
            return f"{text}: cache.state_slots is set"
        if chosen == self.wanted:
            count = "two" if self.per_sequence == 2 else "three"
            return f"{text}, {count} for each of {seqs} sequences"
        more = "raise cache.memory_gib or cache.state_slots for more"
        if slots <= seqs:
            return f"{text}, so at most {max(1, slots - 1)} sequences run at once; {more}"
        checkpoints = "a checkpoint" if slots == seqs + 1 else f"{slots - seqs} checkpoints"
        return f"{text} for {seqs} sequences and {checkpoints}; {more}"


def cache_bytes_of(
    room: int,
    states: StateChoice,
    *,
    one_sequence: int,
    all_sequences: int,
    is_cpu: bool,
    memory_gib: float | None,
) -> tuple[int, str]:
    """Choose the bytes for KV blocks, the null block included, and for states; and say why.

    Args:
        room: bytes that are left of the budget.
        states: how many states the engine needs and wants.
        one_sequence: bytes of the blocks of a sequence of full length.
        all_sequences: the same, of all sequences.
        is_cpu: the device is a CPU.
        memory_gib: cache.memory_gib.

    Raises:
        StartupError: cache.memory_gib is more than `room`.
    """
    what = "cache of blocks and states" if states.has_states else "KV cache"
    if memory_gib is not None:
        wanted = int(memory_gib * _GIB)
        if wanted > room:
            raise StartupError(
                f"cache.memory_gib={memory_gib:g}, but {room / _GIB:.2f} GiB are left for KV "
                f"blocks{' and states' if states.has_states else ''}; lower cache.memory_gib or "
                "raise device.memory_fraction"
            )
        return wanted, f"{what}: cache.memory_gib={memory_gib:g}"
    if not is_cpu:
        return room, f"{what}: all that is left of the budget"
    # Beside the blocks of a long sequence, states get a quarter of the whole.
    one = one_sequence + min(states.wanted_bytes, one_sequence // 3)
    wanted = min(room, states.least_bytes + max(_CPU_KV_BYTES, min(one, room // 2)))
    everything = all_sequences + states.wanted_bytes
    if everything <= wanted:
        return everything, f"{what}: scheduler.max_num_seqs sequences of full length fit"
    if wanted == room:
        return room, f"{what}: all that is left of the budget"
    return wanted, (
        f"{what}: {size_text(wanted)} of {size_text(room)} that are left, as a CPU's memory "
        f"belongs to other programs too; set cache.memory_gib for more"
    )
