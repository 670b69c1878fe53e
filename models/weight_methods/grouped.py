"""The bases of the weight methods over quantised matrices.

`QuantizedMatrix` multiplies quantised matrices with the kernels of ops/quantized.py.
`GroupQuantized` makes them from the floats of a checkpoint. The methods for stored integers are in
models/quantized_checkpoints/.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ostinato.models.sharding import Span, why_cut
from ostinato.models.weight_methods.weight_method import (
    IN,
    OUT,
    MatrixSpec,
    ParameterSpec,
    Part,
    StoredTensor,
    WeightMethod,
)
from ostinato.ops.moe.moe_linear import quantized_moe_linear
from ostinato.ops.quantized import quantize_linear_weight, quantized_linear, quantized_rows
from ostinato.ops.quantized_reference import QuantFormat, dequantize_linear_weight

__all__ = ("GroupQuantized", "QuantizedMatrix")


@dataclass(frozen=True, slots=True)
class QuantizedMatrix(WeightMethod):
    """`weight`: bytes that the kernels of ops/quantized.py multiply, on a CPU and on CUDA.

    The bytes are made on the CPU and copied to the model's device. With act-order there is also a
    parameter `order` [in] int32: for each column of `weight`, its column in the checkpoint.
    """

    is_quantized: ClassVar[bool] = True
    is_batch_invariant: ClassVar[bool] = True

    @abstractmethod
    def form(self, spec: MatrixSpec) -> QuantFormat:
        """The format of a matrix, as ops/quantized.py takes it."""

    def why_unusable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type == "cuda":
            return None
        if device.type != "cpu":
            return (
                "only kernels of CPUs and of CUDA read quantised weights, and the device is "
                f"{device.type}; set device.name=cpu, or choose weights that are not quantised"
            )
        if dtype not in (torch.float32, torch.bfloat16):
            return (
                "its kernels take activations in float32 or bfloat16, not "
                f"{str(dtype).removeprefix('torch.')}; set model.dtype=bfloat16"
            )
        return None

    def place(
        self,
        tensors: dict[str, Tensor],
        name: str,
        value: Tensor,
        stored: StoredTensor,
        part: Part,
        spec: MatrixSpec,
    ) -> None:
        if spec.device.type == "cuda":  # only the CPU has kernels that pack weights
            spec = spec._replace(device=torch.device("cpu"))
        super(QuantizedMatrix, self).place(tensors, name, value, stored, part, spec)

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
            self.form(spec),
            residual=residual,
            order=weights.get("order"),
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
        if "order" in weights:
            raise ValueError(
                f"weights as {self.name} have no kernel for mixtures of experts; quantise them "
                "without act-order (desc_act=false)"
            )
        return quantized_moe_linear(
            x,
            ids,
            weights["weight"],
            bias,
            spec.out_features,
            self.form(spec),
            routing_weights=routing_weights,
            residual=residual,
        )

    def rows(self, weights: Mapping[str, Tensor], spec: MatrixSpec, ids: Tensor) -> Tensor:
        size = (spec.out_features, spec.in_features)
        rows = quantized_rows(weights["weight"], ids, *size, self.form(spec), dtype=spec.dtype)
        return _as_stored(rows, weights)

    def dense(self, weights: Mapping[str, Tensor], spec: MatrixSpec) -> Tensor:
        size = (spec.out_features, spec.in_features)
        return _as_stored(
            dequantize_linear_weight(weights["weight"], self.form(spec), *size), weights
        )


def _as_stored(rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Rows of the matrix with their columns in the checkpoint's order."""
    return rows[:, weights["order"].long().argsort()] if "order" in weights else rows


@dataclass(frozen=True, slots=True)
class GroupQuantized(QuantizedMatrix):
    """A float matrix that is quantised as soon as all of it has been read."""

    bits: ClassVar[int]

    group_size: int  # weights of a row that share a scale
    symmetric: bool  # no zero points

    def form(self, spec: MatrixSpec) -> QuantFormat:
        return QuantFormat(self.bits, self.group_size, self.symmetric)

    @property
    def name(self) -> str:
        return QuantFormat(self.bits, self.group_size, self.symmetric).name

    def why_indivisible(self, columns: Span) -> str | None:
        return why_cut(columns, self.group_size)

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor((OUT, IN))}

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        shape = self.form(spec).packed_shape(spec.out_features, spec.in_features)
        return {"weight": ParameterSpec(tuple(shape), torch.uint8)}

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        weight = tensors["weight"]
        # Weights are float16 only on CUDA. The CPU's kernels quantise them and do not read float16.
        if weight.dtype == torch.float16:
            weight = weight.float()
        return {"weight": quantize_linear_weight(weight, self.form(spec))}
