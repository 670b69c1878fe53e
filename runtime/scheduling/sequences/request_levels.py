"""Levels of the sequences of one HTTP request. Sequences of low levels run first.

A request of many sequences may run for minutes. If it kept all rows, every later request would wait
until one of these sequences ends. So the unfinished sequences of a request have levels: the first
`_PER_LEVEL` sequences have level 0, the next `_PER_LEVEL` have level 1, and so on. The level counts
more than the order of arrival, so a new request takes the rows of sequences with higher levels.
Sequences of level 0 never lose their rows in this way. When they end, the other sequences of the
request get lower levels.
"""

from __future__ import annotations

from bisect import insort

from ostinato.runtime.scheduling.sequences.sequence import Sequence

__all__ = ("RequestLevels", "level_of")

# All sequences of a request with up to this many sequences have level 0. They are queued nearly in
# the order of arrival. So all completions of a prompt run at about the same time, and share the
# prompt's cached blocks.
_PER_LEVEL = 4


def level_of(place: int) -> int:
    """The level of a sequence that comes after `place` other sequences of its request."""
    return place // _PER_LEVEL


class RequestLevels:
    """The unfinished sequences of each HTTP request that has several, and their levels."""

    def __init__(self) -> None:
        self._requests: dict[int, list[Sequence]] = {}  # by `Request.group`, in order of place

    def add(self, sequence: Sequence) -> bool:
        """Set the level of a new sequence; returns whether levels of other sequences changed."""
        request = sequence.request
        if not request.group or request.group_size == 1:
            return False
        sequences = self._requests.setdefault(request.group, [])
        insort(sequences, sequence, key=lambda one: one.request.place)
        changed = _set_levels(sequences)
        return changed > {sequence}

    def remove(self, sequence: Sequence) -> bool:
        """Forget a sequence that has ended; returns whether levels of other sequences changed."""
        group = sequence.request.group
        sequences = self._requests.get(group)
        if sequences is None:
            return False
        sequences.remove(sequence)
        if not sequences:
            del self._requests[group]
        return bool(_set_levels(sequences))


def _set_levels(sequences: list[Sequence]) -> set[Sequence]:
    """Set each level by the index in the list; returns the sequences whose level has changed.

    A beam search sets the levels of its beams itself.
    """
    changed: set[Sequence] = set()
    for place, sequence in enumerate(sequences):
        rank, level, *rest = sequence.order
        if level != level_of(place) and sequence.beam is None:
            sequence.order = (rank, level_of(place), *rest)
            changed.add(sequence)
    return changed
