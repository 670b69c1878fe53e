"""Pools hidden states into one vector per prompt, chunk by chunk: mean, last or first token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.runtime.types.params import PoolingKind, PoolingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence

__all__ = ("PendingVectors", "Pooler")


class PendingVectors:
    """Vectors that the device can still be computing.

    Args:
        vectors: float32 vectors, which can have different lengths.
    """

    def __init__(self, vectors: list[Tensor]) -> None:
        self._sizes = [len(vector) for vector in vectors]
        self._numbers = torch.cat(vectors) if vectors else None

    def read(self) -> list[bytes]:
        """Wait for the device; returns each vector as little-endian float32."""
        if self._numbers is None:
            return []
        parts = self._numbers.cpu().split(self._sizes)
        return [part.numpy().astype("<f4", copy=False).tobytes() for part in parts]


class _Row:
    """A pooled prompt that is being computed."""

    __slots__ = ("num_tokens", "params", "state")

    def __init__(self, params: PoolingParams, num_tokens: int) -> None:
        self.params = params
        self.num_tokens = num_tokens
        self.state: Tensor | None = None  # [D]: float64 sum so far, or the first or last state


class Pooler:
    """Pools the prompts of all rows; keeps the partial result of each row between chunks.

    Args:
        classify: the classification head: [P, D] pooled vectors of P prompts -> [P, num_labels]
            float32 logits. None = the model has no classification head.
        has_raw_scores: `ModelConfig.has_raw_scores`.
    """

    def __init__(
        self,
        classify: Callable[[Tensor], Tensor] | None = None,
        *,
        has_raw_scores: bool = False,
    ) -> None:
        self._classify = classify
        self._has_raw_scores = has_raw_scores
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Start pooling for a sequence that takes the row."""
        self._rows.pop(row, None)
        if request.pooling is not None:
            self._rows[row] = _Row(request.pooling, len(request.prompt_token_ids))

    def pool(self, hidden: Tensor, scheduled: list[ScheduledSequence]) -> PendingVectors:
        """Add a step's hidden states; returns the vectors of the prompts that end in it, in order.

        Args:
            hidden: [T, D], the final hidden states of the step.
            scheduled: the step's entries, in the order of their tokens.
        """
        vectors: list[Tensor] = []
        begin = 0
        for entry in scheduled:
            end = begin + entry.num_new_tokens
            if entry.is_pooled:
                row = self._rows[entry.row]
                is_end = entry.start + entry.num_new_tokens == row.num_tokens
                self._take(row, hidden[begin:end], entry.start, is_end=is_end)
                if is_end:
                    del self._rows[entry.row]
                    vectors.append(self._finish(row))
            begin = end
        return PendingVectors(vectors)

    @staticmethod
    def _take(row: _Row, hidden: Tensor, start: int, *, is_end: bool) -> None:
        kind = row.params.kind
        if kind is PoolingKind.mean:
            # In float64 the mean hardly depends on how the prompt was cut into chunks.
            part = hidden.sum(0, dtype=torch.float64)
            row.state = part if row.state is None else row.state + part
        elif kind is PoolingKind.cls and start == 0:
            row.state = hidden[0].to(torch.float32, copy=True)
        elif kind is PoolingKind.last and is_end:
            row.state = hidden[-1].to(torch.float32, copy=True)

    def _finish(self, row: _Row) -> Tensor:
        params, vector = row.params, row.state
        assert vector is not None, "a prompt was computed without its first or last token"
        if params.kind is PoolingKind.mean:
            vector = (vector / row.num_tokens).float()
        if params.classify:
            assert self._classify is not None, "such a request is refused before it gets here"
            logits = self._classify(vector.unsqueeze(0)).squeeze(0)
            if self._has_raw_scores:
                return logits
            return logits.sigmoid() if len(logits) == 1 else logits.softmax(0)
        vector = vector[: params.dimensions]
        return F.normalize(vector, dim=0) if params.normalize else vector
