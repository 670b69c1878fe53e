"""`Turns`: the order in which sequences get rows and blocks.

An order is (rank, level, turn, arrival). A sequence with a smaller order runs first. The function
of the policy gives the rank.

**Turn.** The first sequence of an HTTP request has the number of the request's arrival. Its k-th
further sequence has the number of the k-th request that arrives later. So a request of many
sequences uses free rows, and each new request that finds no free row can take one of them. This is
fair queueing (Demers, Keshav and Shenker, 1989) with the number of arrivals as the virtual time.

**Level.** A request of many sequences may run for minutes. If it kept all rows, every later request
would wait until one of these sequences ends. So the unfinished sequences of a request with more
than `_FEW` sequences have levels: the first sequence has level 0, the next `_PER_LEVEL` sequences
have level 1, and so on. A new request takes the rows and blocks of sequences with higher levels. A
sequence of level 0 never loses its row in this way. When it ends, the other sequences of the
request get lower levels. Only one sequence has level 0, because the KV cache can be so small that
four long sequences fill it.

**New turns.** A sequence goes behind all requests that have arrived in two cases. It has moved to
level 0. Otherwise a request of many sequences would run them all, one after the other, before later
requests. Or its grammar is costly, and it has run `_MOST_HOLDS` steps without a token. Such a
sequence holds its blocks many times as long as others.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from ostinato.runtime.scheduling.sequences.sequence import Sequence
from ostinato.runtime.types.request import Request

__all__ = ("Turns", "level_of")

# All sequences of a request with up to this many sequences have level 0. They are queued nearly in
# the order of arrival. So all completions of a prompt run at about the same time, and share the
# prompt's cached blocks.
_FEW = 4
_PER_LEVEL = 4  # sequences of each further level, for the same reason
# A step takes milliseconds. So a request that waits for blocks gets those of a costly sequence
# within a second.
_MOST_HOLDS = 64


def level_of(place: int, size: int) -> int:
    """The level of a sequence that comes after `place` others of its request of `size`."""
    return 0 if size <= _FEW else -(-place // _PER_LEVEL)


class Turns:
    """The orders of a scheduler's sequences.

    Args:
        rank: gives a request the first number of its order.
    """

    def __init__(self, rank: Callable[[Request], int]) -> None:
        self._num_requests = 0  # several sequences of one request count once
        self._num_arrivals = 0  # sequences, each counted again at each new turn
        self._rank = rank
        # The unfinished sequences of each HTTP request that has several, by `Request.group`, in
        # order of place.
        self._groups: dict[int, list[Sequence]] = {}

    @property
    def next_order(self) -> tuple[int, ...]:
        """The order of a request of rank 0 that would arrive now."""
        return (0, 0, self._num_requests + 1, self._num_arrivals + 1)

    def order_of(self, request: Request) -> tuple[int, ...]:
        """The order of a request that arrives now."""
        if not request.place:
            self._num_requests += 1
        return (self._rank(request), 0, self._num_requests + request.place, self._arrive())

    def add(self, sequence: Sequence) -> bool:
        """Set the level of a new sequence; returns whether levels of other sequences changed."""
        request = sequence.request
        if not request.group or request.group_size == 1:
            return False
        sequences = self._groups.setdefault(request.group, [])
        insort(sequences, sequence, key=lambda one: one.request.place)
        changed = self._set_levels(sequences)
        return bool(changed - {sequence})  # the new one is not queued yet

    def remove(self, sequence: Sequence) -> bool:
        """Forget a sequence that has ended; returns whether levels of other sequences changed."""
        group = sequence.request.group
        sequences = self._groups.get(group)
        if sequences is None:
            return False
        sequences.remove(sequence)
        if not sequences:
            del self._groups[group]
        return bool(self._set_levels(sequences))

    def count_hold(self, sequence: Sequence) -> bool:
        """Count a step that gave the sequence no token; returns whether its turn has changed."""
        sequence.num_holds += 1
        if sequence.num_holds % _MOST_HOLDS or sequence.beam is not None:
            return False
        rank, level, *_ = sequence.order
        sequence.order = (rank, level, self._num_requests, self._arrive())
        return True

    def _arrive(self) -> int:
        self._num_arrivals += 1
        return self._num_arrivals

    def _set_levels(self, sequences: list[Sequence]) -> set[Sequence]:
        """Set each level by the index in the list; returns the sequences whose level has changed.

        A beam search sets the levels of its beams itself.
        """
        changed: set[Sequence] = set()
        for place, sequence in enumerate(sequences):
            rank, old, turn, arrival = sequence.order[:4]
            level = level_of(place, sequence.request.group_size)
            if level == old or sequence.beam is not None:
                continue
            if not level:
                turn, arrival = self._num_requests, self._arrive()
            sequence.order = (rank, level, turn, arrival)
            changed.add(sequence)
        return changed
