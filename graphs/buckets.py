"""Which step shapes have a prepared program: pure tables, no torch.

A step is looked up by its shape. The smallest bucket that holds it wins; a miss is legal and falls
back to the compiled program, which takes any shape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from typing import NamedTuple

__all__ = (
    "BucketTable",
    "GraphKey",
    "default_decode_sizes",
    "default_mixed_sizes",
    "name_buckets",
    "why_incomplete",
)


class GraphKey(NamedTuple):
    """The shape that a captured program was made for."""

    num_tokens: int
    num_seqs: int
    uniform_decode: bool  # every sequence has exactly one token, so num_tokens == num_seqs

    @property
    def num_rows(self) -> int:
        """The most tokens whose logits a step of this shape can ask for."""
        return self.num_seqs


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


def why_incomplete(capture_sizes: Collection[int], max_num_seqs: int) -> str | None:
    """What a chosen list of decode sizes means for the batches that it does not fit, or None.

    The list is obeyed: a size that can not occur is left out, and larger batches run in a mixed
    bucket where one is large enough, else uncaptured.
    """
    if not capture_sizes:
        return None
    name = f"graphs.capture_sizes={sorted(capture_sizes)}"
    parts: list[str] = []
    if above := sorted(size for size in capture_sizes if size > max_num_seqs):
        parts.append(
            f"{', '.join(map(str, above))} can not occur with scheduler.max_num_seqs={max_num_seqs}"
            " and is left out"
        )
    largest = max((size for size in capture_sizes if size <= max_num_seqs), default=0)
    if largest < max_num_seqs:
        parts.append(
            f"decode steps of {largest + 1} to {max_num_seqs} sequences have no decode bucket; add "
            f"{max_num_seqs} to it, or leave it empty, to capture them"
        )
    return f"{name}: {'; '.join(parts)}" if parts else None


def name_buckets(keys: Collection[GraphKey]) -> str:
    """In words, largest first: "decode of 16, 8 sequences, mixed of 1024 tokens"."""
    decode = sorted((key.num_seqs for key in keys if key.uniform_decode), reverse=True)
    mixed = sorted((key.num_tokens for key in keys if not key.uniform_decode), reverse=True)
    parts = [f"decode of {', '.join(map(str, decode))} sequences"] if decode else []
    parts += [f"mixed of {', '.join(map(str, mixed))} tokens"] if mixed else []
    return ", ".join(parts)


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

    def without(self, keys: Collection[GraphKey]) -> BucketTable:
        """The table that lacks these buckets; the next larger ones serve their steps."""
        kept = [key for key in self.keys if key not in keys]
        return BucketTable(
            decode_sizes=[key.num_seqs for key in kept if key.uniform_decode],
            mixed_sizes=[key.num_tokens for key in kept if not key.uniform_decode],
            max_num_seqs=self.max_num_seqs,
        )

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
