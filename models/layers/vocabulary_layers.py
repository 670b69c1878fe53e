"""Matrices with a row for each token of the vocabulary: embeddings and output heads.

With tensor parallelism, the rows of an output head, and of an embedding that is also the output
head, are divided among the ranks, if their number is divisible. Other embeddings are not divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.models.layers.linear_layers import BuildOptions, LinearBase
from ostinato.models.sharding import Span
from ostinato.models.weight_methods.weight_method import MatrixRole
from ostinato.ops.parallel.collectives import gather_vocab

__all__ = ("Embedding", "OutputHead")


class _VocabularyLinear(LinearBase):
    """A matrix with a row for each token; a rank may hold the rows of a part of the vocabulary."""

    def __init__(
        self, hidden_size: int, vocabulary: Span, options: BuildOptions, *, bias: bool = False
    ) -> None:
        super().__init__(hidden_size, (vocabulary,), options, bias=bias)
        self.vocabulary = vocabulary
        if not vocabulary.is_whole:
            self._meet_others()

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, vocab_size] float32: every rank gets logits of the whole vocabulary."""
        return self.gather(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, vocab_size / ranks] float32: the logits of this rank's rows of the matrix.

        Without tensor parallelism, and if the rows are not divided, these are all logits.
        """
        return self.multiply(hidden, float32_output=True)

    def gather(self, part: Tensor) -> Tensor:
        """[R, vocab_size / ranks] -> [R, vocab_size]: the parts of all ranks, on every rank."""
        if self.group is None:
            return part
        world = self.vocabulary.total // self.vocabulary.size
        return gather_vocab(part, self.group, world, self.exchange)


class OutputHead(_VocabularyLinear):
    """Maps hidden states to logits."""

    role = MatrixRole.head

    def __init__(
        self, hidden_size: int, vocab_size: int, options: BuildOptions, *, bias: bool = False
    ) -> None:
        super().__init__(hidden_size, options.shard.vocabulary(vocab_size), options, bias=bias)


class Embedding(_VocabularyLinear):
    """Rows of a table [num_rows, D].

    With `is_head`, the output head reads the same table, and the table is divided among the ranks
    if its number of rows is divisible.
    """

    first_row: Tensor  # [1] int64; the first row of this rank

    def __init__(
        self, num_rows: int, hidden_size: int, options: BuildOptions, *, is_head: bool = False
    ) -> None:
        rows = options.shard.vocabulary(num_rows) if is_head else Span.of(num_rows)
        super().__init__(hidden_size, rows, options)
        self.role = MatrixRole.tied if is_head else MatrixRole.embedding
        if not rows.is_whole:
            first_row = torch.tensor([rows.start], device=options.device)
            self.register_buffer("first_row", first_row, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, D]. A rank that does not hold a token's row adds zeros for it."""
        if self.group is None:
            return self.method.rows(self.weights, self.spec, ids)
        own = ids - self.first_row
        is_here = (own >= 0) & (own < self.vocabulary.size)
        rows = self.method.rows(self.weights, self.spec, torch.where(is_here, own, 0))
        return self.reduce(torch.where(is_here[:, None], rows, 0), None)
