"""Tensor parallelism: the part of every weight that one rank holds.

A rank holds whole attention heads and an even part of every intermediate size. Layers whose outputs
are divided (column-parallel) compute their part of the result; layers whose inputs are divided
(row-parallel) compute a partial sum, and the sum over all ranks is the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ("WHOLE", "Shard", "Span", "why_cut", "why_indivisible")

_MOST_NAMED = 64  # ranks, in a refusal


class Span(NamedTuple):
    """A range [start, start + size) of a dimension that has `total` elements."""

    start: int
    size: int
    total: int

    @property
    def is_whole(self) -> bool:
        """The range is the whole dimension."""
        return self.size == self.total

    def times(self, factor: int) -> Span:
        """The same range of a dimension whose elements are `factor` times as many."""
        return Span(self.start * factor, self.size * factor, self.total * factor)

    @classmethod
    def of(cls, size: int | Span) -> Span:
        """A whole dimension of this size; a span is returned as it is."""
        return size if isinstance(size, Span) else cls(0, size, size)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group."""

    rank: int = 0
    size: int = 1  # ranks of the group

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a group of {self.size}")

    def span(self, total: int, what: str) -> Span:
        """This rank's even part of a dimension.

        Args:
            total: elements of the dimension.
            what: its name, for the error.

        Raises:
            ValueError: the group's size does not divide it.
        """
        if total % self.size:
            raise ValueError(
                f"{what}={total} can not be divided among {self.size} tensor-parallel ranks"
            )
        size = total // self.size
        return Span(self.rank * size, size, total)

    def kv_heads(self, num_kv_heads: int) -> Span:
        """The key and value heads of this rank.

        With more ranks than heads, several ranks hold the same head.

        Raises:
            ValueError: neither of the two numbers divides the other.
        """
        if num_kv_heads >= self.size:
            return self.span(num_kv_heads, "num_key_value_heads")
        if self.size % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads={num_kv_heads} can not be repeated evenly on {self.size} "
                "tensor-parallel ranks"
            )
        return Span(self.rank * num_kv_heads // self.size, 1, num_kv_heads)

    def vocabulary(self, vocab_size: int) -> Span:
        """The tokens whose logits this rank computes: an even part, or all if there is none.

        With an even part all ranks run one program. A size that can not be divided is small
        compared with the layers, or it is odd, as that of GPT-2.
        """
        is_even = vocab_size % self.size == 0
        return self.span(vocab_size, "vocab_size") if is_even else Span.of(vocab_size)


WHOLE = Shard()
"""The only rank: it holds everything."""


def why_indivisible(ranks: int, num_kv_heads: int, sizes: Mapping[str, int]) -> str | None:
    """Why a model can not be divided among so many ranks, and which numbers of ranks can be used.

    Args:
        ranks: of the group.
        num_kv_heads: heads of keys and values, which several ranks may repeat.
        sizes: the dimensions that are divided evenly, by name.

    Returns:
        One line; None if it can.
    """
    reason = _first_obstacle(ranks, num_kv_heads, sizes)
    if reason is None:
        return None
    most = min(_MOST_NAMED, *sizes.values())
    fitting = [
        str(n) for n in range(1, most + 1) if _first_obstacle(n, num_kv_heads, sizes) is None
    ]
    return f"{reason}; set parallel.tensor to {' or '.join(fitting)}"


def why_cut(columns: Span, unit: int) -> str | None:
    """Why this part of a matrix's columns is not made of whole groups, and what would be.

    Args:
        columns: that a rank holds.
        unit: columns of a group, which share a scale.

    Returns:
        One line; None if it is.
    """
    if columns.is_whole or columns.size % unit == 0:
        return None
    groups = columns.total // unit if columns.total % unit == 0 else 1
    fitting = [str(n) for n in range(1, min(_MOST_NAMED, groups) + 1) if groups % n == 0]
    return (
        f"{columns.total} columns in groups of {unit} can not be divided among "
        f"{columns.total // columns.size} tensor-parallel ranks, but among {' or '.join(fitting)}"
    )


def _first_obstacle(ranks: int, num_kv_heads: int, sizes: Mapping[str, int]) -> str | None:
    shard = Shard(0, ranks)
    try:
        for what, total in sizes.items():
            shard.span(total, what)
        shard.kv_heads(num_kv_heads)
    except ValueError as error:
        return str(error)
    return None
