"""The weight method `packed`: in the order of the CPU kernels (ops/linear/packed_linear.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ostinato.models.weight_methods.weight_method import (
    IN,
    OUT,
    MatrixSpec,
    ParameterSpec,
    Part,
    StoredTensor,
    WeightMethod,
)
from ostinato.ops.linear.packed_linear import (
    PANEL,
    empty_packed,
    pack_linear_rows,
    packed_gated_linear,
    packed_linear,
    packed_rows,
    unpack_linear_weight,
    why_unpackable,
    zero_padding,
)
from ostinato.ops.moe.moe_linear import packed_moe_linear

__all__ = ("Packed",)


@dataclass(frozen=True, slots=True)
class Packed(WeightMethod):
    """`weight` in panels of 32 rows, padded with zeros; float32 or bfloat16 on a CPU."""

    is_batch_invariant: ClassVar[bool] = True

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor((OUT, IN))}

    @property
    def name(self) -> str:
        return "packed"

    def why_unusable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"packed weights are read by CPU kernels, but the device is {device.type}"
        return why_unpackable(torch.empty((1, 1), dtype=dtype))

    def loads_in_place(self, spec: MatrixSpec) -> bool:
        return True

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        size = (spec.out_features, spec.in_features)
        packed = empty_packed(torch.empty(size, dtype=spec.dtype, device="meta"))
        return {"weight": ParameterSpec(tuple(packed.shape), spec.dtype)}

    def load(
        self, tensors: dict[str, Tensor], name: str, value: Tensor, part: Part, spec: MatrixSpec
    ) -> None:
        rows = self.rows_of(name, value, part, spec)
        pack_linear_rows(tensors["weight"], rows, part.first_row)

    def rows_of(self, name: str, value: Tensor, part: Part, spec: MatrixSpec) -> Tensor:
        """The rows that this rank holds of a stored matrix. Their elements are contiguous."""
        rows = part.cut(value, self.stored[name]).to(spec.dtype)
        return rows.contiguous() if rows.shape[1] > 1 and rows.stride(1) != 1 else rows

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        zero_padding(tensors["weight"], spec.out_features)
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
        return packed_linear(
            x,
            weights["weight"],
            bias,
            spec.out_features,
            residual=residual,
            float32_output=float32_output,
        )

    def apply_gated(
        self,
        weights: Mapping[str, Tensor],
        spec: MatrixSpec,
        x: Tensor,
        bias: Tensor | None,
        activation: str,
    ) -> Tensor:
        if spec.out_features % (2 * PANEL):  # a panel would have gates and factors
            return WeightMethod.apply_gated(self, weights, spec, x, bias, activation)
        return packed_gated_linear(x, weights["weight"], bias, spec.out_features, activation)

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
        return packed_moe_linear(
            x,
            ids,
            weights["weight"],
            bias,
            spec.out_features,
            routing_weights=routing_weights,
            residual=residual,
        )

    def rows(self, weights: Mapping[str, Tensor], spec: MatrixSpec, ids: Tensor) -> Tensor:
        return packed_rows(weights["weight"], ids, spec.out_features, spec.in_features)

    def dense(self, weights: Mapping[str, Tensor], spec: MatrixSpec) -> Tensor:
        return unpack_linear_weight(weights["weight"], spec.out_features, spec.in_features)
