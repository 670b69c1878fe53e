"""Tensor parallelism: the part of every weight that one rank holds.

A rank holds whole attention heads and an even part of every intermediate size. Layers whose outputs
are divided (column-parallel) compute their part of the result; layers whose inputs are divided
(row-parallel) compute a partial sum, and the sum over all ranks is the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ("WHOLE", "Shard", "Span")


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


WHOLE = Shard()
"""The only rank: it holds everything."""
