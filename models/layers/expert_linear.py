"""The matrices of a mixture of experts as one linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ostinato.models.layers.linear_layers import BuildOptions, LinearBase
from ostinato.models.sharding import Span

__all__ = ("ExpertLinear",)


class ExpertLinear(LinearBase):
    """One matrix for each expert, in parameters with a leading dimension [experts, ...].

    A checkpoint stores the experts' matrices one by one or stacked. An expert's parameters are made
    as soon as its tensors have been read.

    Args:
        experts: the number of experts; a span if this rank holds a part of them.
        in_features, outputs, options, bias: as for `LinearBase`, of each expert.
        is_reversed: the rows of the last output come first.
    """

    def __init__(
        self,
        experts: int | Span,
        in_features: int | Span,
        outputs: Sequence[int | Span],
        options: BuildOptions,
        *,
        bias: bool = False,
        is_reversed: bool = False,
    ) -> None:
        super().__init__(in_features, outputs, options, bias=bias)
        self.experts = Span.of(experts)
        self.is_reversed = is_reversed
        self._unjoined: dict[int, Tensor] = {}  # parameters of any size, by expert

    @property
    def stacking(self) -> tuple[int, ...]:
        order = super().stacking
        return order[::-1] if self.is_reversed else order

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        routing_weights: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Each row times the matrices of its experts; see `moe_linear` (ops/moe/moe_linear.py).

        Args:
            x: [T, in_features], or a row for each token and expert: [T * k, in_features].
            ids: [T, k] int32, of this rank's experts.
            routing_weights: [T, k] float32, or None.
            residual: [T, out_features], or None.

        Returns:
            [T * k, out_features]; with routing weights [T, out_features].
        """
        return self.method.apply_experts(
            self.weights, self.spec, x, ids, self.bias, routing_weights, residual
        )

    def dense(self) -> Tensor:
        """[experts, out_features, in_features]."""
        experts = range(self.experts.size)
        return torch.stack([self.method.dense(self._weights_of(e), self.spec) for e in experts])

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        return super()._empty((self.experts.size, *shape), dtype)

    def _weights_of(self, expert: int) -> dict[str, Tensor]:
        joined = self.method.of_any_size
        return {
            name: tensor if name == joined else tensor[expert]
            for name, tensor in self.weights.items()
        }

    def _bias_of(self, expert: int) -> Tensor:
        return super()._bias_of(expert)[expert]

    def _replace(self, name: str, tensor: Tensor, expert: int) -> None:
        if name == self.method.of_any_size:
            self._unjoined[expert] = tensor
            if len(self._unjoined) == self.experts.size:
                parts = [self._unjoined[each] for each in range(self.experts.size)]
                self._unjoined = {}
                super()._replace(name, self.method.join_experts(self.weights, parts), 0)
            return
        place: Tensor = getattr(self, name)[expert]
        if tensor.data_ptr() != place.data_ptr():
            place.copy_(tensor)
