"""Which step shapes have a prepared program: pure tables, no torch.

A step is looked up by its shape. The smallest bucket that holds it wins; a miss is legal and falls
back to the compiled program, which takes any shape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ("BucketTable", "GraphKey", "default_decode_sizes", "default_mixed_sizes")


class GraphKey(NamedTuple):
    """The shape that a captured program was made for."""

    num_tokens: int
    num_seqs: int
    uniform_decode: bool  # every sequence has exactly one token, so num_tokens == num_seqs


def default_decode_sizes(max_num_seqs: int, *, exact: bool) -> list[int]:
    """Batch sizes worth a decode bucket.

    Args:
        max_num_seqs: the largest batch.
        exact: every size gets its own bucket (the CPU, where a padded row costs real arithmetic);
            else 1, 2, 4, then steps of 8 up to 256, then of 32 (a GPU, where a padded row is nearly
            free).
    """
    if exact:
        return list(range(1, max_num_seqs + 1))
    sizes = {1, 2, 4, *range(8, min(max_num_seqs, 256) + 1, 8), *range(288, max_num_seqs + 1, 32)}
    return sorted(size for size in sizes | {max_num_seqs} if size <= max_num_seqs)


def default_mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Token counts worth a mixed prefill-and-decode bucket: powers of two from 32, at most 1024."""
    sizes = []
    size = 32
    while size <= min(max_num_batched_tokens, 1024):
        sizes.append(size)
        size *= 2
    return sizes


class BucketTable:
    """Rounds a step's shape up to a captured one."""

    def __init__(
        self, *, decode_sizes: Iterable[int], mixed_sizes: Iterable[int], max_num_seqs: int
    ) -> None:
        self.decode_sizes = sorted(set(decode_sizes))
        self.mixed_sizes = sorted(set(mixed_sizes))
        self.max_num_seqs = max_num_seqs

    @property
    def keys(self) -> list[GraphKey]:
        """All buckets, largest first: the order of capture, so that smaller ones reuse the pool."""
        keys = [GraphKey(size, size, True) for size in self.decode_sizes]
        keys += [GraphKey(size, self.max_num_seqs, False) for size in self.mixed_sizes]
        return sorted(keys, reverse=True)

    def round_up(self, num_tokens: int, num_seqs: int, *, uniform_decode: bool) -> GraphKey | None:
        """The smallest bucket that holds the step, or None when there is none."""
        if uniform_decode:
            index = bisect_left(self.decode_sizes, num_seqs)
            if index < len(self.decode_sizes):
                size = self.decode_sizes[index]
                return GraphKey(size, size, True)
        index = bisect_left(self.mixed_sizes, num_tokens)
        if index < len(self.mixed_sizes) and num_seqs <= self.max_num_seqs:
            return GraphKey(self.mixed_sizes[index], self.max_num_seqs, False)
        return None
