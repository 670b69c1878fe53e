"""The weight method `plain`: matrices are not rearranged.

torch multiplies them. Matrices of experts are multiplied by `moe_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding, linear

from ostinato.models.weight_methods.weight_method import (
    IN,
    OUT,
    MatrixSpec,
    ParameterSpec,
    StoredTensor,
    WeightMethod,
)
from ostinato.ops.moe.moe_linear import moe_linear

__all__ = ("Plain",)


@dataclass(frozen=True, slots=True)
class Plain(WeightMethod):
    """`weight` [out, in] in the activations' dtype."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor((OUT, IN))}

    @property
    def name(self) -> str:
        return "as loaded"

    def loads_in_place(self, spec: MatrixSpec) -> bool:
        return True

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec((spec.out_features, spec.in_features), spec.dtype)}

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        return tensors

    def apply(
        self,
        weights: Mapping[str, Tensor],
        spec: MatrixSpec,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        *,
        float32_output: bool,
    ) -> Tensor:
        result = linear(x, weights["weight"], bias)
        if residual is not None:
            result = result + residual
        return result.float() if float32_output else result

    def apply_experts(
        self,
        weights: Mapping[str, Tensor],
        spec: MatrixSpec,
        x: Tensor,
        ids: Tensor,
        bias: Tensor | None,
        routing_weights: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        return moe_linear(
            x,
            ids,
            weights["weight"],
            bias,
            routing_weights=routing_weights,
            residual=residual,
        )

    def rows(self, weights: Mapping[str, Tensor], spec: MatrixSpec, ids: Tensor) -> Tensor:
        return embedding(ids, weights["weight"])

    def dense(self, weights: Mapping[str, Tensor], spec: MatrixSpec) -> Tensor:
        return weights["weight"]
