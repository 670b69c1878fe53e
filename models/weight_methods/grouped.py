"""The base of the weight methods that quantise to integers with a scale per group.

The checkpoint has the weights as floats. A matrix is quantised as soon as all of it has been read.
The kernels are in ops/quantized.py.
"""

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
    StoredTensor,
    WeightMethod,
)
from ostinato.ops.moe.moe_linear import quantized_moe_linear
from ostinato.ops.quantized import quantize_linear_weight, quantized_linear, quantized_rows
from ostinato.ops.quantized_reference import QuantFormat, dequantize_linear_weight

__all__ = ("GroupQuantized",)


@dataclass(frozen=True, slots=True)
class GroupQuantized(WeightMethod):
    """`weight`: bytes that hold integers and the scales of their groups; on a CPU."""

    bits: ClassVar[int]
    is_quantized: ClassVar[bool] = True
    is_batch_invariant: ClassVar[bool] = True

    group_size: int  # weights of a row that share a scale
    symmetric: bool  # no zero points

    @property
    def format(self) -> QuantFormat:
        """The format in the words of ops/quantized.py."""
        return QuantFormat(self.bits, self.group_size, self.symmetric)

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor((OUT, IN))}

    def why_unusable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return (
                "only the CPU's kernels read quantised weights and the device is "
                f"{device.type}; leave it out, or set device.name=cpu"
            )
        if dtype not in (torch.float32, torch.bfloat16):
            return (
                "its kernels take activations in float32 or bfloat16, not "
                f"{str(dtype).removeprefix('torch.')}; set model.dtype=bfloat16"
            )
        return None

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        shape = self.format.packed_shape(spec.out_features, spec.in_features)
        return {"weight": ParameterSpec(tuple(shape), torch.uint8)}

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        return {"weight": quantize_linear_weight(tensors["weight"], self.format)}

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
        return quantized_linear(
            x,
            weights["weight"],
            bias,
            spec.out_features,
            self.format,
            residual=residual,
            float32_output=float32_output,
        )

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
        return quantized_moe_linear(
            x,
            ids,
            weights["weight"],
            bias,
            spec.out_features,
            self.format,
            routing_weights=routing_weights,
            residual=residual,
        )

    def rows(self, weights: Mapping[str, Tensor], spec: MatrixSpec, ids: Tensor) -> Tensor:
        size = (spec.out_features, spec.in_features)
        return quantized_rows(weights["weight"], ids, *size, self.format, dtype=spec.dtype)

    def dense(self, weights: Mapping[str, Tensor], spec: MatrixSpec) -> Tensor:
        size = (spec.out_features, spec.in_features)
        return dequantize_linear_weight(weights["weight"], self.format, *size)
