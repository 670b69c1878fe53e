"""The part of a model that one rank holds: some layers, and a part of each of their weights.

Pipeline parallelism divides consecutive layers among stages. The first stage also has the
embedding, the last one the output head.

Tensor parallelism divides the weights of a stage's layers. A rank holds whole attention heads and
an even part of every intermediate size. Layers whose outputs are divided (column-parallel) compute
their part of the result; layers whose inputs are divided (row-parallel) compute a partial sum, and
the sum over all ranks is the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

__all__ = (
    "ONLY_STAGE",
    "WHOLE",
    "Shard",
    "Span",
    "Stage",
    "deal_layers",
    "shard_of_rank",
    "why_cut",
    "why_indivisible",
)

_MOST_NAMED = 64  # the largest number of ranks that an error message suggests


class Span(NamedTuple):
    """A range [start, start + size) of a dimension that has `total` elements."""

    start: int
    size: int
    total: int

    @property
    def is_whole(self) -> bool:
        """Whether the range is the whole dimension."""
        return self.size == self.total

    def times(self, factor: int) -> Span:
        """The same range of a dimension with `factor` times as many elements."""
        return Span(self.start * factor, self.size * factor, self.total * factor)

    @classmethod
    def of(cls, size: int | Span) -> Span:
        """A whole dimension of this size; a span is returned as it is."""
        return size if isinstance(size, Span) else cls(0, size, size)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline."""

    number: int = 0
    count: int = 1  # stages of the pipeline
    layers: Span | None = None  # None = all layers, or layers are not assigned yet

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise ValueError(f"stage {self.number} is not in a pipeline of {self.count}")

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the logits."""
        return self.number == self.count - 1


ONLY_STAGE = Stage()
"""The stage of a model that is not divided into stages."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds."""

    rank: int = 0  # number of the rank in its tensor-parallel group
    size: int = 1  # ranks of the group
    stage: Stage = ONLY_STAGE  # the stage of the group

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a group of {self.size}")

    @property
    def is_leader(self) -> bool:
        """Whether it is rank 0, the engine's process, which schedules steps and draws tokens."""
        return self.rank == 0 and self.stage.is_last

    @property
    def number(self) -> int:
        """The number of the rank in its engine; see `shard_of_rank`."""
        return (self.stage.number + 1) % self.stage.count * self.size + self.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.size * self.stage.count

    def layers(self, num_layers: int) -> Span:
        """The layers of this rank's stage.

        Args:
            num_layers: layers of the model.
        """
        return self.stage.layers or Span.of(num_layers)

    def span(self, total: int, what: str) -> Span:
        """This rank's even part of a dimension.

        Args:
            total: elements of the dimension.
            what: its name, for the error.

        Raises:
            ValueError: the dimension is not divisible by the group's size.
        """
        if total % self.size:
            raise ValueError(
                f"{what}={total} cannot be divided among {self.size} tensor-parallel ranks"
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
                f"num_key_value_heads={num_kv_heads} cannot be repeated evenly on {self.size} "
                "tensor-parallel ranks"
            )
        return Span(self.rank * num_kv_heads // self.size, 1, num_kv_heads)

    def vocabulary(self, vocab_size: int) -> Span:
        """The tokens whose logits this rank computes: an even part, or all if they cannot be
        divided.

        Parts must be equal, so that all ranks run one program. An odd vocabulary, such as the 50257
        tokens of GPT-2, cannot be divided among two ranks.
        """
        is_even = vocab_size % self.size == 0
        return self.span(vocab_size, "vocab_size") if is_even else Span.of(vocab_size)


WHOLE = Shard()
"""The shard of an engine's only rank: the whole model."""


def shard_of_rank(rank: int, tensor: int, pipeline: int) -> Shard:
    """The part of a model that a rank of an engine holds; its layers are not assigned yet.

    Rank 0 is the engine's process. It belongs to the last stage, because tokens are drawn there.
    The ranks of the first stage follow those of the last.

    Args:
        rank: 0 to tensor * pipeline - 1.
        tensor: ranks of each stage.
        pipeline: stages.
    """
    stage = (rank // tensor - 1) % pipeline
    return Shard(rank % tensor, tensor, Stage(stage, pipeline))


def deal_layers(layer_bytes: Sequence[int], first: int, last: int, stages: int) -> list[Span]:
    """Divide consecutive layers among stages so that the largest stage is as small as possible.

    Args:
        layer_bytes: bytes of each layer.
        first: bytes that the first stage has besides its layers.
        last: bytes that the last stage has besides its layers.
        stages: at most the number of layers, so that each stage gets one.

    Returns:
        The layers of each stage.
    """
    total = len(layer_bytes)
    ends = [0, *accumulate(layer_bytes)]

    def size(stage: int, begin: int, end: int) -> int:
        return ends[end] - ends[begin] + first * (stage == 0) + last * (stage == stages - 1)

    # best[end]: the best division of the layers before `end` among the stages so far, as the bytes
    # of the largest stage, the sum of the squares of all stages' bytes (which decides between
    # divisions with equal largest stages), and the first layer of each stage.
    best = {end: (size(0, 0, end), size(0, 0, end) ** 2, (0,)) for end in range(1, total + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(most, here), squares + here * here, (*begins, begin))
                for begin, (most, squares, begins) in best.items()
                if begin < end
                for here in (size(stage, begin, end),)
            )
            for end in range(stage + 1, total + 1)
        }
    begins = [*best[total][2], total]
    return [Span(begin, end - begin, total) for begin, end in pairwise(begins)]


def why_indivisible(ranks: int, num_kv_heads: int, sizes: Mapping[str, int]) -> str | None:
    """Why a model cannot be divided among `ranks` ranks, and which numbers of ranks can be used.

    Args:
        ranks: the ranks of the group.
        num_kv_heads: heads of keys and values; several ranks may hold the same one.
        sizes: the dimensions that are divided evenly, by name.

    Returns:
        One line; None if it can be divided.
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
    """Why these columns of a matrix are not whole groups, and numbers of ranks that would fit.

    Args:
        columns: the columns that a rank holds.
        unit: columns of a group, which share a scale.

    Returns:
        One line; None if they are whole groups.
    """
    if columns.is_whole or columns.size % unit == 0:
        return None
    groups = columns.total // unit if columns.total % unit == 0 else 1
    fitting = [str(n) for n in range(1, min(_MOST_NAMED, groups) + 1) if groups % n == 0]
    return (
        f"{columns.total} columns in groups of {unit} cannot be divided among "
        f"{columns.total // columns.size} tensor-parallel ranks; set parallel.tensor to "
        f"{' or '.join(fitting)}"
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
