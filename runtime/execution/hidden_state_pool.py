"""Keeps hidden states on a GPU until a draft head reads them, in memory of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.execution.hidden_states import Span
from ostinato.runtime.sampling.to_device import to_device
from ostinato.runtime.speculation.head_drafter import MOST_WAITING
from ostinato.runtime.types.step import ScheduledSequence

__all__ = ("HiddenStatePool", "num_pool_slots")


class _Waiting(NamedTuple):
    """The slots of consecutive positions of one row."""

    begin: int  # the first position
    slots: list[int]

    @property
    def end(self) -> int:
        return self.begin + len(self.slots)


class HiddenStatePool:
    """Implements `KeptStates`. Each position takes one slot.

    All copies are queued on the device's stream. So a slot whose states were taken can be reused at
    once. If too few slots are left, the states of a row are dropped. The head then begins this
    row's sequence at a later position.

    Args:
        num_slots: from `num_pool_slots`.
        width: D times the number of layers that the head reads.
        dtype: of the hidden states.
        device: of the hidden states.
    """

    def __init__(
        self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._pool = torch.zeros(num_slots, width, dtype=dtype, device=device)
        self._free = list(range(num_slots))
        self._rows: dict[int, _Waiting | None] = {}  # the watched rows

    def watch(self, row: int) -> None:
        self.unwatch(row)
        self._rows[row] = None

    def unwatch(self, row: int) -> None:
        kept = self._rows.pop(row, None)
        if kept is not None:
            self._free += kept.slots

    def store(self, scheduled: Sequence[ScheduledSequence], states: Sequence[Tensor]) -> None:
        places: list[int] = []  # indices of the step's states that are kept
        slots: list[int] = []  # where they are kept
        first = 0
        for entry in scheduled:
            count = entry.num_new_tokens
            if entry.row in self._rows and (new := self._take_slots(entry)):
                places += range(first, first + count)
                slots += new
            first += count
        if not slots:
            return
        where, source = to_device([*slots, *places], self._pool.device).view(2, -1)
        self._pool.index_copy_(0, where, torch.cat(list(states), 1)[source])

    def span(self, row: int) -> tuple[int, int]:
        kept = self._rows.get(row)
        return (0, 0) if kept is None else (kept.begin, kept.end)

    def take(self, spans: Sequence[Span]) -> Tensor:
        slots: list[int] = []
        for row, begin, end in spans:
            kept = self._rows[row]
            assert kept is not None, f"no hidden states of row {row} are kept"
            assert kept.begin <= begin < end <= kept.end, f"{begin} to {end} of {row} are not kept"
            slots += kept.slots[begin - kept.begin : end - kept.begin]
            self._free += kept.slots[: end - kept.begin]
            rest = kept.slots[end - kept.begin :]
            self._rows[row] = _Waiting(end, rest) if rest else None
        return self._pool[to_device(slots, self._pool.device)]

    def _take_slots(self, entry: ScheduledSequence) -> list[int]:
        """Slots for the positions of an entry; empty if there are too few."""
        kept, count = self._rows[entry.row], entry.num_new_tokens
        if kept is None or not kept.begin <= entry.start <= kept.end:
            kept = self._drop(entry.row, 0, entry.start)
        else:  # the states of refused drafts are replaced
            kept = self._drop(entry.row, entry.start - kept.begin, kept.begin)
        if count > len(self._free):
            self._drop(entry.row, 0, entry.start)
            self._rows[entry.row] = None
            return []
        new = self._free[-count:]
        del self._free[-count:]
        kept.slots.extend(new)
        return new

    def _drop(self, row: int, num_kept: int, begin: int) -> _Waiting:
        """Keep the first `num_kept` slots of a row, for positions from `begin`; free the others."""
        kept = self._rows[row]
        slots = [] if kept is None else kept.slots
        self._free += slots[num_kept:]
        waiting = self._rows[row] = _Waiting(begin, slots[:num_kept])
        return waiting


def num_pool_slots(limits: StepLimits) -> int:
    """The most positions that are kept: those of one step, and those that wait in each sequence."""
    waiting = MOST_WAITING + 2 * limits.rows_per_seq  # those of two steps in flight wait too
    return limits.max_num_batched_tokens + limits.max_num_seqs * waiting
