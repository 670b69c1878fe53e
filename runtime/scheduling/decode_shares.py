"""Limits how much a request of many sequences slows down the decodes of other requests.

Every decode of a step waits for the whole step. On a CPU each further sequence makes the step
longer, so 128 completions of one request would slow all other requests down many times.

The decodes of a step take at most `max_slowdown` times as long as a fair step. In a fair step no
request decodes more sequences than the smallest request has. The sequences that do not fit into
this time rest: they are left out of the step. The sequences of one request rest in turn. On a GPU a
step of many decodes takes hardly longer than a small step, so sequences rarely rest there.

Draft tokens of larger requests are limited in the same way (`FairStep`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.scheduling.sequences.sequence import Sequence as RunningSequence
from ostinato.runtime.speculation.depth import FairStep

__all__ = ("DecodeShares", "quotas")

_MOST_CACHED = 4096  # entries of `DecodeShares._most`
_CONTEXT_UNIT = 64  # the mean context is rounded down to a multiple of this many tokens


class DecodeShares:
    """Chooses the sequences that rest in a step.

    Args:
        costs: the step-cost table.
        max_slowdown: decodes may take this many times as long as a fair step; at least 1.

    Attributes:
        fair: the fair step of the last call of `resting`. None = no request is limited, because
            there is only one, or all are about equally large.
    """

    def __init__(self, costs: CostTable, max_slowdown: float) -> None:
        self._costs = costs
        self._max_slowdown = max_slowdown
        self.fair: FairStep | None = None
        self._num_steps = 0
        # Results of `_most_decodes`, by its arguments. The context is divided by _CONTEXT_UNIT.
        self._most: dict[tuple[int, int, int], int] = {}

    def resting(self, running: Iterable[RunningSequence]) -> Set[RunningSequence]:
        """The decoding sequences that do not take part in this step.

        The step keeps at least one sequence more than a fair step. Of each request, it keeps the
        sequences that were decoded longest ago.

        Args:
            running: sequences with a row.
        """
        requests: dict[int, list[RunningSequence]] = {}
        least = 1 << 30
        for sequence in running:
            if sequence.is_decoding:
                requests.setdefault(sequence.request.group, []).append(sequence)
                least = min(least, sequence.request.group_size)
        sizes = [len(some) for some in requests.values()]
        total, base = sum(sizes), sum(min(size, least) for size in sizes)
        self.fair = None
        if len(requests) < 2 or total <= base + 1:
            return frozenset()
        self.fair = FairStep(base, least, self._max_slowdown)
        contexts = (one.num_computed_tokens for some in requests.values() for one in some)
        most = self._most_decodes(base, total, sum(contexts) // total)
        if most >= total:
            return frozenset()
        self._num_steps += 1
        resting: set[RunningSequence] = set()
        for some in requests.values():
            some.sort(key=lambda one: one.decoded_at)
        waits = [some[0].decoded_at for some in requests.values()]
        for some, quota in zip(requests.values(), quotas(sizes, most, waits), strict=True):
            for sequence in some[:quota]:
                sequence.decoded_at = self._num_steps
            resting.update(some[quota:])
        return resting

    def _most_decodes(self, base: int, total: int, context: int) -> int:
        """The largest number of decodes whose step is short enough; at least `base` + 1.

        Args:
            base: decodes of a fair step.
            total: all decodes.
            context: mean cached tokens of a decode.
        """
        key = base, total, context // _CONTEXT_UNIT
        most = self._most.get(key)
        if most is not None:
            return most
        limit = self._max_slowdown * self._costs.decode_seconds(base, context)
        most, too_many = base + 1, total + 1
        while too_many - most > 1:
            middle = (most + too_many) // 2
            if self._costs.decode_seconds(middle, context) <= limit:
                most = middle
            else:
                too_many = middle
        if len(self._most) >= _MOST_CACHED:
            self._most.clear()
        self._most[key] = most
        return most


def quotas(sizes: Sequence[int], most: int, waits: Sequence[int]) -> list[int]:
    """The number of sequences of each request that take part in a step.

    The numbers are as equal as the sizes of the requests allow. Their sum is `most`.

    Args:
        sizes: sequences of each request; their sum is above `most`.
        most: sequences that take part; at least the number of requests.
        waits: one value for each request. If `most` cannot be divided equally, the requests with
            the smallest values get one sequence more.
    """
    level, left = 0, most
    while True:
        open_ones = [index for index, size in enumerate(sizes) if size > level]
        if left < len(open_ones):
            break
        level, left = level + 1, left - len(open_ones)
    given = [min(size, level) for size in sizes]
    for index in sorted(open_ones, key=waits.__getitem__)[:left]:
        given[index] += 1
    return given
