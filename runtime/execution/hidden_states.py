"""Keeps the hidden states of a model's steps until its draft head reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ostinato.runtime.types.step import ScheduledSequence

__all__ = ("HiddenStates", "KeptStates", "Span")


class Span(NamedTuple):
    """Consecutive positions of one row: [begin, end)."""

    row: int
    begin: int
    end: int


class KeptStates(Protocol):
    """The hidden states of watched rows, by position, until they are taken."""

    def watch(self, row: int) -> None:
        """Keep the states of a row's next steps. Earlier states of the row are dropped."""
        ...

    def unwatch(self, row: int) -> None:
        """Drop the states of a row, and keep no further ones."""
        ...

    def store(self, scheduled: Sequence[ScheduledSequence], states: Sequence[Tensor]) -> None:
        """Keep the states that a step has computed. They replace states of the same positions.

        Args:
            scheduled: the step's entries.
            states: for each layer that the head reads, its hidden states [T, D]. T can include
                padding at the end.
        """
        ...

    def span(self, row: int) -> tuple[int, int]:
        """The positions of a row that are kept: the first, and one past the last; (0, 0) = none."""
        ...

    def take(self, spans: Sequence[Span]) -> Tensor:
        """Take the states of some positions. Drops all states of each row before its span's `end`.

        All these positions must be kept.

        Returns:
            [N, D * number of layers], in the order of the spans.
        """
        ...


class _Waiting(NamedTuple):
    """Hidden states of consecutive positions of one row."""

    begin: int  # the first position
    states: list[Tensor]  # each [n, D * number of layers]

    @property
    def end(self) -> int:
        return self.begin + sum(map(len, self.states))


class HiddenStates:
    """Implements `KeptStates`, on a CPU: rows keep slices of one joined tensor for each step."""

    def __init__(self) -> None:
        self._rows: dict[int, _Waiting | None] = {}  # the watched rows

    def watch(self, row: int) -> None:
        self._rows[row] = None

    def unwatch(self, row: int) -> None:
        self._rows.pop(row, None)

    def store(self, scheduled: Sequence[ScheduledSequence], states: Sequence[Tensor]) -> None:
        if not any(entry.row in self._rows for entry in scheduled):
            return
        joined = torch.cat(list(states), 1)
        first = 0
        for entry in scheduled:
            new = joined[first : first + entry.num_new_tokens]
            first += entry.num_new_tokens
            if entry.row not in self._rows:
                continue
            kept = self._rows[entry.row]
            if kept is None or not kept.begin <= entry.start <= kept.end:
                self._rows[entry.row] = _Waiting(entry.start, [new])
                continue
            before = _cut(kept, entry.start)
            self._rows[entry.row] = _Waiting(kept.begin, [*before, new])

    def span(self, row: int) -> tuple[int, int]:
        kept = self._rows.get(row)
        return (0, 0) if kept is None else (kept.begin, kept.end)

    def take(self, spans: Sequence[Span]) -> Tensor:
        return torch.cat([part for span in spans for part in self._take(*span)])

    def _take(self, row: int, begin: int, end: int) -> list[Tensor]:
        """The states of a span, in parts."""
        kept = self._rows[row]
        assert kept is not None, f"no hidden states of row {row} are kept"
        assert kept.begin <= begin < end <= kept.end, f"{begin} to {end} of row {row} are not kept"
        until = _cut(kept, end)
        taken = _after(_Waiting(kept.begin, until), begin)
        rest = _after(kept, end)
        self._rows[row] = _Waiting(end, rest) if rest else None
        return taken


def _cut(kept: _Waiting, end: int) -> list[Tensor]:
    """The states before position `end`."""
    left, found = end - kept.begin, list[Tensor]()
    for part in kept.states:
        if left > 0:
            found.append(part[:left])
        left -= len(part)
    return found


def _after(kept: _Waiting, begin: int) -> list[Tensor]:
    """The states from position `begin` on."""
    skipped, found = begin - kept.begin, list[Tensor]()
    for part in kept.states:
        if skipped < len(part):
            found.append(part[max(0, skipped) :])
        skipped -= len(part)
    return found
