"""The weight method `compressed`: bfloat16 in 12 bits (ops/linear/compressed_linear.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.weight_method import (
    MatrixSpec,
    ParameterSpec,
    Part,
    WeightMethod,
)
from ostinato.ops.linear.compressed_linear import (
    compress_linear_rows,
    compressed_gated_linear,
    compressed_linear,
    compressed_rows,
    compressed_shape,
    join_exceptions,
    join_experts,
    why_incompressible,
)
from ostinato.ops.linear.packed_linear import PANEL
from ostinato.ops.moe.moe_linear import compressed_moe_linear

__all__ = ("Compressed",)

_ASIDE = "exceptions of row "  # entries of a matrix that is being loaded, by their first row
_LOOSE = "values of row "


@dataclass(frozen=True, slots=True)
class Compressed(Packed):
    """`weight` in panels of 32 rows; `exceptions`, whose size depends on the values."""

    of_any_size: ClassVar[str | None] = "exceptions"

    @property
    def name(self) -> str:
        return "compressed"

    def why_unusable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        reason = Packed.why_unusable(self, device, dtype)
        return reason or why_incompressible(torch.empty((1, 1), dtype=dtype))

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        shape = compressed_shape(spec.out_features, spec.in_features)
        return {
            "weight": ParameterSpec(shape, torch.uint8),
            "exceptions": ParameterSpec((64,), torch.uint8),
        }

    def load(
        self, tensors: dict[str, Tensor], name: str, value: Tensor, part: Part, spec: MatrixSpec
    ) -> None:
        """Compress the part's rows. If it does not consist of whole panels, `finish` does that."""
        rows = self.rows_of(name, value, part, spec)
        first, last = part.first_row, part.first_row + len(rows)
        if first % PANEL == 0 and (last % PANEL == 0 or last == spec.out_features):
            tensors[f"{_ASIDE}{first}"] = compress_linear_rows(tensors["weight"], rows, first)
        else:
            tensors[f"{_LOOSE}{first}"] = rows

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        weight = tensors["weight"]
        aside = _by_row(tensors, _ASIDE)
        run: list[Tensor] = []  # successive parts that share panels
        for first, rows in _by_row(tensors, _LOOSE).items():
            run.append(rows)
            last = first + len(rows)
            if last % PANEL == 0 or last == spec.out_features:
                begin = last - sum(map(len, run))
                aside[begin] = compress_linear_rows(weight, torch.cat(run), begin)
                run = []
        return {"weight": weight, "exceptions": join_exceptions(weight, aside)}

    def join_experts(self, weights: Mapping[str, Tensor], parts: list[Tensor]) -> Tensor:
        return join_experts(weights["weight"], parts)

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
        return compressed_linear(
            x,
            weights["weight"],
            weights["exceptions"],
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
        weight, exceptions = weights["weight"], weights["exceptions"]
        return compressed_gated_linear(x, weight, exceptions, bias, spec.out_features, activation)

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
        return compressed_moe_linear(
            x,
            ids,
            weights["weight"],
            weights["exceptions"],
            bias,
            spec.out_features,
            routing_weights=routing_weights,
            residual=residual,
        )

    def rows(self, weights: Mapping[str, Tensor], spec: MatrixSpec, ids: Tensor) -> Tensor:
        weight, exceptions = weights["weight"], weights["exceptions"]
        return compressed_rows(weight, exceptions, ids, spec.out_features, spec.in_features)

    def dense(self, weights: Mapping[str, Tensor], spec: MatrixSpec) -> Tensor:
        return self.rows(weights, spec, torch.arange(spec.out_features))


def _by_row(tensors: Mapping[str, Tensor], kind: str) -> dict[int, Tensor]:
    """The entries of one kind by their first row, in ascending order."""
    found = {
        int(name.removeprefix(kind)): tensor
        for name, tensor in tensors.items()
        if name.startswith(kind)
    }
    return dict(sorted(found.items()))
