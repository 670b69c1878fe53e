"""Synthetic workloads from a seed: random lengths, shared prefixes, conversations."""

from __future__ import annotations

import random

from ostinato.benchmarks.workload.workload import Part, WorkItem
from ostinato.conf.sections.bench_schema import WorkloadSection

__all__ = ("conversations_part", "prefix_part", "random_part")


class _Source:
    """Random lengths and token ids from one seed."""

    def __init__(self, section: WorkloadSection, vocab_size: int) -> None:
        self._draw = random.Random(section.seed)
        self._vocabulary = range(vocab_size)
        self._spread = section.length_spread

    def ids(self, count: int) -> list[int]:
        return self._draw.choices(self._vocabulary, k=count)

    def length(self, mean: int) -> int:
        """A random length, uniform within `mean * (1 ± length_spread)`, at least 1."""
        spread = int(mean * self._spread)
        return self._draw.randint(max(1, mean - spread), mean + spread)

    def pick(self, count: int) -> int:
        return self._draw.randrange(count)


def _count(section: WorkloadSection) -> int:
    return section.num_requests or 32


def random_part(section: WorkloadSection, vocab_size: int) -> Part:
    """Requests of random ids that have nothing in common."""
    source = _Source(section, vocab_size)
    items = [
        WorkItem(source.ids(source.length(section.input_len)), source.length(section.output_len))
        for _ in range(_count(section))
    ]
    return Part(section.kind.value, items)


def prefix_part(section: WorkloadSection, vocab_size: int) -> Part:
    """Each prompt is one of a few prefixes, followed by random ids."""
    source = _Source(section, vocab_size)
    prefixes = [source.ids(section.prefix_len) for _ in range(section.num_prefixes)]
    items = [
        WorkItem(
            prefixes[source.pick(len(prefixes))] + source.ids(source.length(section.input_len)),
            source.length(section.output_len),
        )
        for _ in range(_count(section))
    ]
    return Part(section.kind.value, items)


def conversations_part(section: WorkloadSection, vocab_size: int) -> Part:
    """`num_requests` conversations. Each turn is sent when the previous turn has been answered."""
    source = _Source(section, vocab_size)
    items: list[WorkItem] = []
    for _ in range(_count(section)):
        after = None
        for _ in range(section.turns):
            ids = source.ids(source.length(section.input_len))
            items.append(
                WorkItem(
                    ids,
                    source.length(section.output_len),
                    after=after,
                    think_s=0.0 if after is None else section.think_time_s,
                )
            )
            after = len(items) - 1
    return Part(section.kind.value, items)
