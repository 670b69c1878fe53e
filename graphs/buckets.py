"""The table of step shapes for which a program is captured (buckets); imports no torch.

A step runs in the smallest bucket that holds it. A step that fits no bucket runs the compiled
program or the eager model, which take any shape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

__all__ = (
    "BucketTable",
    "GraphKey",
    "default_decode_sizes",
    "default_mixed_sizes",
    "name_buckets",
    "verified_tokens",
    "why_incomplete",
)


class GraphKey(NamedTuple):
    """The step shape that a captured program serves."""

    num_tokens: int
    num_seqs: int
    # Tokens that each sequence has: 1 in a decode step, 1 + k in a step that verifies k draft
    # tokens of each sequence. 0 in a mixed step, whose sequences have any number of tokens.
    tokens_per_seq: int
    # Whether tokens can have low-rank adapters. `BucketTable` has only keys without adapters.
    has_adapters: bool = False

    @property
    def num_rows(self) -> int:
        """The most tokens whose logits a step of this shape can compute."""
        return self.num_seqs * max(self.tokens_per_seq, 1)


def default_decode_sizes(max_num_seqs: int, *, exact: bool) -> list[int]:
    """Batch sizes that get a decode bucket.

    Args:
        max_num_seqs: the largest batch.
        exact: whether every size gets a bucket (for a CPU, where each padded row costs time).
            Otherwise 1, 2, 4, the multiples of 8 up to 256, larger multiples of 32, and the largest
            size get one (for a GPU, where a padded row costs hardly anything).
    """
    if exact:
        return list(range(1, max_num_seqs + 1))
    sizes = {1, 2, 4, *range(8, min(max_num_seqs, 256) + 1, 8), *range(288, max_num_seqs + 1, 32)}
    return sorted(size for size in sizes | {max_num_seqs} if size <= max_num_seqs)


def default_mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Token counts that get a bucket of mixed prefill and decode.

    They are the powers of two from 32 to 1024 that a step can have.
    """
    sizes = []
    size = 32
    while size <= min(max_num_batched_tokens, 1024):
        sizes.append(size)
        size *= 2
    return sizes


def verified_tokens(rows_per_seq: int) -> list[int]:
    """The numbers of tokens per sequence for which steps that verify drafts get buckets.

    Args:
        rows_per_seq: the most tokens per sequence, 1 + draft tokens; 1 = no drafts.

    Returns:
        The powers of two from 2 to `rows_per_seq`, and `rows_per_seq`; empty without drafts.
    """
    sizes = {1 << power for power in range(1, rows_per_seq.bit_length())}
    return sorted({*sizes, rows_per_seq} - {1})


def why_incomplete(capture_sizes: Collection[int], max_num_seqs: int) -> str | None:
    """A warning if `capture_sizes` misses batches or has sizes that cannot occur, else None.

    A size that cannot occur is left out of the table. Batches above the largest size run in a
    mixed bucket if one is large enough, else uncaptured.
    """
    if not capture_sizes:
        return None
    name = f"graphs.capture_sizes={sorted(capture_sizes)}"
    parts: list[str] = []
    if above := sorted(size for size in capture_sizes if size > max_num_seqs):
        sizes = ", ".join(map(str, above))
        parts.append(f"{sizes} left out, because scheduler.max_num_seqs={max_num_seqs} is less")
    largest = max((size for size in capture_sizes if size <= max_num_seqs), default=0)
    if largest < max_num_seqs:
        parts.append(
            f"decode steps of {largest + 1} to {max_num_seqs} sequences have no decode bucket; to "
            f"capture them add {max_num_seqs} to the list, or leave the list empty"
        )
    return f"{name}: {'; '.join(parts)}" if parts else None


def name_buckets(keys: Collection[GraphKey]) -> str:
    """The buckets in words, largest first: "decode of 16, 8 sequences, mixed of 1024 tokens"."""
    parts = []
    for tokens in sorted({key.tokens_per_seq for key in keys} - {0}):
        sizes = sorted((key.num_seqs for key in keys if key.tokens_per_seq == tokens), reverse=True)
        name = "decode" if tokens == 1 else f"verification of {tokens} tokens each"
        parts.append(f"{name} of {', '.join(map(str, sizes))} sequences")
    mixed = sorted((key.num_tokens for key in keys if key.tokens_per_seq == 0), reverse=True)
    parts += [f"mixed of {', '.join(map(str, mixed))} tokens"] if mixed else []
    return ", ".join(parts)


class BucketTable:
    """Rounds a step's shape up to a captured one."""

    def __init__(
        self,
        *,
        decode_sizes: Iterable[int],
        mixed_sizes: Iterable[int],
        max_num_seqs: int,
        verify_sizes: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        """
        Args:
            decode_sizes: numbers of sequences with one token each.
            mixed_sizes: numbers of tokens, of up to `max_num_seqs` sequences.
            max_num_seqs: sequences and rows of logits of a mixed bucket.
            verify_sizes: tokens per sequence (2 or more) -> numbers of sequences.
        """
        uniform = {**(verify_sizes or {}), 1: decode_sizes}
        self._uniform_sizes = {tokens: sorted(set(sizes)) for tokens, sizes in uniform.items()}
        self._mixed_sizes = sorted(set(mixed_sizes))
        self._max_num_seqs = max_num_seqs

    @property
    def keys(self) -> list[GraphKey]:
        """All buckets, largest first. If captured in this order, they can share one memory pool."""
        keys = [
            GraphKey(size * tokens, size, tokens)
            for tokens, sizes in self._uniform_sizes.items()
            for size in sizes
        ]
        keys += [GraphKey(size, self._max_num_seqs, 0) for size in self._mixed_sizes]
        return sorted(keys, reverse=True)

    def without(self, keys: Collection[GraphKey]) -> BucketTable:
        """The table that lacks these buckets; the next larger ones serve their steps."""
        kept = [key for key in self.keys if key not in keys]
        uniform = {
            tokens: [key.num_seqs for key in kept if key.tokens_per_seq == tokens]
            for tokens in self._uniform_sizes
        }
        return BucketTable(
            decode_sizes=uniform.pop(1),
            mixed_sizes=[key.num_tokens for key in kept if key.tokens_per_seq == 0],
            max_num_seqs=self._max_num_seqs,
            verify_sizes=uniform,
        )

    def round_up(
        self, num_tokens: int, num_seqs: int, num_rows: int, *, tokens_per_seq: int
    ) -> GraphKey | None:
        """The smallest bucket with the step's `tokens_per_seq` that holds it.

        If there is none, the smallest mixed bucket that holds it; None if there is none either.
        """
        sizes = self._uniform_sizes.get(tokens_per_seq, [])
        index = bisect_left(sizes, num_seqs)
        if index < len(sizes):
            return GraphKey(sizes[index] * tokens_per_seq, sizes[index], tokens_per_seq)
        index = bisect_left(self._mixed_sizes, num_tokens)
        fits = max(num_seqs, num_rows) <= self._max_num_seqs
        if index < len(self._mixed_sizes) and fits:
            return GraphKey(self._mixed_sizes[index], self._max_num_seqs, 0)
        return None
