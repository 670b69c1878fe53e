"""Weights of 8 bits whose activations are rounded to 8 bits too, on CUDA.

A checkpoint can state that activations have 8 bits (W8A8, FP8). `RoundedInputs` stores such a
matrix for ops/w8a8/w8a8_linear.py:

    weight       [out, in] float8_e4m3fn or int8, the stored values
    scales       [groups, out] float32
    input_scale  [1] float32, the largest of those stored for the stacked matrices; if any is stored

`RoundingPolicy` uses it for each such matrix for which the GPU has a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ostinato.models.quantized_checkpoints.stored_groups import (
    InputsStated,
    StoredGroups,
    check_scales,
)
from ostinato.models.sharding import Span
from ostinato.models.weight_methods.weight_method import (
    FLOATS,
    Axis,
    DummyTensor,
    MatrixRole,
    MatrixSpec,
    ParameterSpec,
    Part,
    StoredTensor,
    WeightMethod,
)
from ostinato.models.weight_policy import PolicyOver
from ostinato.ops.w8a8.round_rows import InputScales
from ostinato.ops.w8a8.w8a8_linear import w8a8_linear, w8a8_moe_linear

__all__ = ("RoundedInputs", "RoundingPolicy")

_FLOAT8 = (8, 9)  # the first compute capability that multiplies floats of 8 bits
_INT8 = (8, 0)  # the first one on which Triton's kernels multiply integers of 8 bits


@dataclass(frozen=True, slots=True)
class RoundedInputs(WeightMethod):
    """A matrix of 8 bits, multiplied by activations of 8 bits."""

    is_quantized: ClassVar[bool] = True

    as_stored: StoredGroups  # its `inputs` is not None

    @staticmethod
    def fits(method: WeightMethod | None, capability: tuple[int, int]) -> bool:
        """Whether a checkpoint states 8-bit activations for a method, and the GPU has kernels."""
        if not isinstance(method, StoredGroups) or method.inputs is None:
            return False
        size = method.group_size
        is_group = size == -1 or (size >= 32 and size & (size - 1) == 0)
        is_plain = method.bits == 8 and method.symmetric and not method.has_order
        least = _FLOAT8 if method.kind == "e4m3" else _INT8
        return is_group and is_plain and capability >= least

    @property
    def inputs(self) -> InputsStated:
        """What the checkpoint states about activations."""
        assert self.as_stored.inputs is not None, "`fits` has checked it"
        return self.as_stored.inputs

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        if self.inputs.scales is not InputScales.static:
            return self.as_stored.stored
        axes = (Axis("", size=1),) * self.inputs.dims
        scale = StoredTensor(axes, FLOATS, converted=False)
        return {**self.as_stored.stored, self.inputs.stored_as: scale}

    @property
    def name(self) -> str:
        return f"{self.as_stored.name}, activations of 8 bits"

    def why_indivisible(self, columns: Span) -> str | None:
        return self.as_stored.why_indivisible(columns)

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        size = self._group_size(spec)
        groups = -(-spec.in_features // size)
        dtype = torch.float8_e4m3fn if self.as_stored.kind == "e4m3" else torch.int8
        found = {
            "weight": ParameterSpec((spec.out_features, spec.in_features), dtype),
            "scales": ParameterSpec((groups, spec.out_features), torch.float32),
        }
        if self.inputs.scales is InputScales.static:
            found["input_scale"] = ParameterSpec((1,), torch.float32)
        return found

    def load(
        self, tensors: dict[str, Tensor], name: str, value: Tensor, part: Part, spec: MatrixSpec
    ) -> None:
        spec = spec._replace(device=torch.device("cpu"))
        if name != self.inputs.stored_as:
            self.as_stored.load(tensors, name, value, part, spec)
            return
        check_scales(value.reshape(-1))
        self.place(tensors, "input_scale", value.float(), self.stored[name], part, spec)

    def dummy(self, tensor: DummyTensor) -> Tensor | None:
        if tensor.name == self.inputs.stored_as:
            return torch.ones(tensor.size)
        return self.as_stored.dummy(tensor)

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        values, factors = self.as_stored.unpacked(tensors, spec)
        if self.as_stored.kind == "e4m3":
            weight = values.view(torch.float8_e4m3fn)
        else:  # the integers are stored with 128 added
            weight = (values ^ 128).view(torch.int8)
        scales = factors.float().T.contiguous()
        found = {"weight": weight, "scales": scales}
        if self.inputs.scales is InputScales.static:
            found["input_scale"] = tensors["input_scale"].amax().reshape(1)
        return found

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
        return w8a8_linear(
            x,
            weights["weight"],
            weights["scales"],
            bias,
            self._group_size(spec),
            self._input_scales(spec),
            input_scale=weights.get("input_scale"),
            residual=residual,
            powers=self.inputs.powers,
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
        return w8a8_moe_linear(
            x,
            ids,
            weights["weight"],
            weights["scales"],
            bias,
            self._group_size(spec),
            self._input_scales(spec),
            input_scale=weights.get("input_scale"),
            routing_weights=routing_weights,
            residual=residual,
            powers=self.inputs.powers,
        )

    def rows(self, weights: Mapping[str, Tensor], spec: MatrixSpec, ids: Tensor) -> Tensor:
        chosen = weights["weight"][ids], weights["scales"][:, ids]
        return self._restored(*chosen, spec).to(spec.dtype)

    def dense(self, weights: Mapping[str, Tensor], spec: MatrixSpec) -> Tensor:
        return self._restored(weights["weight"], weights["scales"], spec)

    def _restored(self, weight: Tensor, scales: Tensor, spec: MatrixSpec) -> Tensor:
        spread = scales.T.repeat_interleave(self._group_size(spec), 1)[:, : spec.in_features]
        return weight.float() * spread

    def _group_size(self, spec: MatrixSpec) -> int:
        """Columns that share a scale, on this rank."""
        size = self.as_stored.group_size
        return spec.in_features if size == -1 else min(size, spec.in_features)

    def _input_scales(self, spec: MatrixSpec) -> InputScales:
        scales = self.inputs.scales
        is_one = self._group_size(spec) == spec.in_features
        return InputScales.row if scales is InputScales.group and is_one else scales


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingPolicy(PolicyOver):
    """The methods of a checkpoint, with 8-bit activations where it states them."""

    capability: tuple[int, int]  # the GPU's compute capability

    @property
    def is_batch_invariant(self) -> bool:
        return False

    def method_for(
        self, names: tuple[str, ...], role: MatrixRole, spec: MatrixSpec
    ) -> WeightMethod:
        """The method of one matrix; see `CheckpointPolicy`."""
        method = self.as_stored.method_for(names, role, spec)
        if isinstance(method, StoredGroups) and RoundedInputs.fits(method, self.capability):
            return RoundedInputs(method)
        return method
