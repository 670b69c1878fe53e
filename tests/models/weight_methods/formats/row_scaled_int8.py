"""A weight method for the tests: int8 with one scale for each row.

It stores `weight` int8 [out, in] and `weight_scale` [out, 1], as compressed-tensors' int-quantized
checkpoints do. The engine has no `quant_method` of this name. The tests show that a weight method
can be added without a change of the engine's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ostinato.models.quantized_checkpoints.policy import Headers
from ostinato.models.weight_methods.weight_method import (
    FLOATS,
    IN,
    OUT,
    Axis,
    MatrixRole,
    MatrixSpec,
    ParameterSpec,
    StoredTensor,
    WeightMethod,
)


@dataclass(frozen=True, slots=True)
class RowScaledInt8(WeightMethod):
    is_quantized: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "int8 with a scale a row"

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return {
            "weight": StoredTensor((OUT, IN), dtypes=(torch.int8,), converted=False),
            "weight_scale": StoredTensor((OUT, Axis("", size=1)), dtypes=FLOATS, converted=False),
        }

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        return {
            "weight": ParameterSpec((spec.out_features, spec.in_features), torch.int8),
            "scale": ParameterSpec((spec.out_features, 1), torch.float32),
        }

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        return {"weight": tensors["weight"], "scale": tensors["weight_scale"].float()}

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
        result = linear(x, self.dense(weights, spec).to(x.dtype), bias)
        if residual is not None:
            result = result + residual
        return result.float() if float32_output else result

    def rows(self, weights: Mapping[str, Tensor], spec: MatrixSpec, ids: Tensor) -> Tensor:
        return (weights["weight"][ids].float() * embedding(ids, weights["scale"])).to(spec.dtype)

    def dense(self, weights: Mapping[str, Tensor], spec: MatrixSpec) -> Tensor:
        return weights["weight"].float() * weights["scale"]


@dataclass(frozen=True, slots=True)
class _Policy:
    unquantized: WeightMethod
    floats: tuple[str, ...]  # endings of the names of matrices that are not quantised

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def has_cache_scales(self) -> bool:
        return False

    @property
    def uses_cpu_kernels(self) -> bool:
        return False

    @property
    def is_batch_invariant(self) -> bool:
        return False

    @property
    def quantization(self) -> str:
        return RowScaledInt8().name

    def method_for(
        self, names: tuple[str, ...], role: MatrixRole, spec: MatrixSpec
    ) -> WeightMethod:
        return self.unquantized if names[-1].endswith(self.floats) else RowScaledInt8()


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> _Policy:
    return _Policy(unquantized, tuple(stated.get("ignore", ())))
