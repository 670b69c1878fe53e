"""The base of the weight methods whose integers and scales are stored in the checkpoint.

The formats differ in how they pack integers into words. Each converts its tensors to this form:

    values  integers from 0 to 2**bits - 1, uint8, [out, in]
    scales  [out, groups], in the checkpoint's dtype
    zeros   the integers that stand for zero, of the scales' shape, int16; none if symmetric
    g_idx   [in] int32, the group of each column; none if the columns are in the groups' order

`finish` packs them for the kernel. Nothing is rounded: a weight is `(value - zero) * scale` of the
stored numbers. A group of more than 256 columns becomes several groups with the same scale, because
only sums of up to 256 products are exact in every instruction set.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ostinato.models.quantized_checkpoints.policy import Headers
from ostinato.models.sharding import Span, why_cut
from ostinato.models.weight_methods.grouped import QuantizedMatrix
from ostinato.models.weight_methods.weight_method import (
    IN,
    OUT,
    Axis,
    MatrixSpec,
    ParameterSpec,
    Part,
    StoredTensor,
)
from ostinato.ops.quantized import pack_quantized_weight
from ostinato.ops.quantized_reference import QuantFormat
from ostinato.ops.rounded.round_rows import InputScales

__all__ = ("G_IDX", "InputsStated", "StoredGroups", "check_scales", "static_inputs", "stored_dtype")

_MOST = 256  # values in the largest group that the kernels take
G_IDX = StoredTensor((IN,), dtypes=(torch.int32, torch.int64), converted=False)


class InputsStated(NamedTuple):
    """How a checkpoint wants activations to be rounded to 8 bits."""

    scales: InputScales
    powers: bool = False  # the scales are powers of two
    dims: int = 0  # dimensions of a stored scale


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroups(QuantizedMatrix):
    """Integers with a scale for each group of a row."""

    kind: ClassVar[str] = "steps"  # the `kind` of QuantFormat

    bits: int
    group_size: int  # -1 = a row is one group
    symmetric: bool
    scale_dtype: str = "float16"  # in the checkpoint
    has_order: bool = False  # the columns of a group are not adjacent (act-order)
    inputs: InputsStated | None = None  # 8-bit activations, which only CUDA has (rounded_inputs.py)

    @abstractmethod
    def unpacked(self, name: str, value: Tensor, part: Part) -> tuple[str, Tensor]:
        """One stored tensor in the form of the module's docstring.

        Args:
            name: a key of `stored`.
            value: the tensor.
            part: the stored matrix.

        Returns:
            The name `values`, `scales`, `zeros` or `g_idx`, and the converted tensor. The name is
            empty for a tensor that is only checked.

        Raises:
            ValueError: the tensor has values that the format does not allow.
        """

    def form(self, spec: MatrixSpec) -> QuantFormat:
        size = self.group_size
        if size == -1 or size >= spec.in_features:
            size = min(_MOST, -(-spec.in_features // 8) * 8)
        elif size > _MOST:
            size = next(each for each in range(_MOST, 0, -8) if size % each == 0)
        return QuantFormat(self.bits, size, self.symmetric, self.scale_dtype, self.kind)

    @property
    def name(self) -> str:
        groups = "a scale a row" if self.group_size == -1 else f"groups of {self.group_size}"
        kind = "" if self.symmetric else "asymmetric "
        order = ", act-order" if self.has_order else ""
        return f"{kind}int{self.bits} in {groups}{order}"

    def why_indivisible(self, columns: Span) -> str | None:
        if self.has_order and not columns.is_whole:
            return (
                "the columns of a group lie apart (act-order), so they cannot be divided among "
                "ranks; set parallel.tensor to 1"
            )
        return None if self.group_size == -1 else why_cut(columns, self.group_size)

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        shape = self.form(spec).packed_shape(spec.out_features, spec.in_features)
        weight = {"weight": ParameterSpec(tuple(shape), torch.uint8)}
        order = {"order": ParameterSpec((spec.in_features,), torch.int32)}
        return weight | order if self.has_order else weight

    def load(
        self, tensors: dict[str, Tensor], name: str, value: Tensor, part: Part, spec: MatrixSpec
    ) -> None:
        entry, value = self.unpacked(name, value, part)
        if entry == "scales":
            check_scales(value)
        if entry == "g_idx" and self.group_size != -1:  # counted from this rank's first group
            value = value - part.columns.start // self.group_size
        if entry:
            self.place(tensors, entry, value, self._placed(entry), part, spec)

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        values, scales, zeros = (tensors.get(name) for name in ("values", "scales", "zeros"))
        assert values is not None, "all stored tensors are there"
        assert scales is not None, "all stored tensors are there"
        order = self._order(tensors.get("g_idx"), spec)
        if order is not None:
            values = values.index_select(1, order)
        form = self.form(spec)
        packed = pack_quantized_weight(
            values,
            self._spread(scales, form, spec),
            None if zeros is None or self.symmetric else self._spread(zeros, form, spec),
            form,
        )
        if not self.has_order:
            return {"weight": packed}
        order = torch.arange(spec.in_features) if order is None else order
        return {"weight": packed, "order": order.int()}

    def groups_axis(self) -> Axis:
        """The dimension of groups of a stored tensor."""
        return Axis("", size=1) if self.group_size == -1 else Axis("in", self.group_size)

    def _placed(self, entry: str) -> StoredTensor:
        if entry == "g_idx":
            return G_IDX
        axes = (OUT, IN if entry == "values" else self.groups_axis())
        return StoredTensor(axes, converted=False)

    def _spread(self, factors: Tensor, form: QuantFormat, spec: MatrixSpec) -> Tensor:
        """[out, stored groups] -> [out, groups of the kernel] float32."""
        groups = -(-(-(-spec.in_features // 8) * 8) // form.group_size)
        stored = spec.in_features if self.group_size == -1 else self.group_size
        group = torch.arange(groups) * form.group_size // stored
        return factors.float()[:, group]

    def _order(self, g_idx: Tensor | None, spec: MatrixSpec) -> Tensor | None:
        """For each column of the kernel, the stored column; None = the same column."""
        if g_idx is None:
            return None
        if bool((g_idx != g_idx[0]).any()):
            raise ValueError(
                "g_idx orders the columns of the stacked matrices (such as q_proj, k_proj and "
                "v_proj) differently; quantise them with the same calibration text"
            )
        size = spec.in_features if self.group_size == -1 else self.group_size
        groups = torch.arange(spec.in_features, dtype=g_idx.dtype) // size
        if torch.equal(g_idx[0], groups):
            return None
        order = g_idx[0].argsort(stable=True)
        if not torch.equal(g_idx[0][order], groups):
            raise ValueError(
                f"g_idx must put {size} columns in each group, counted over the columns of this "
                "rank; set parallel.tensor to 1, and check that the file is whole"
            )
        if not self.has_order:
            raise ValueError(
                "g_idx orders the columns by activation, but quantization_config.desc_act is "
                "false; set model.config.quantization_config.desc_act=true"
            )
        return order


def check_scales(scales: Tensor) -> None:
    """Check that scales are usable numbers.

    Raises:
        ValueError: one is infinite, NaN or zero.
    """
    wrong = ~scales.float().isfinite() | (scales.float() == 0)
    if bool(wrong.any()):
        index = wrong.nonzero()[0].tolist()
        value = float(scales[tuple(index)])
        raise ValueError(
            f"scale {index} is {value}; scales must be finite and not zero: the file is damaged, "
            "or was made with a calibration that failed"
        )


def stored_dtype(headers: Headers, suffix: str, default: str) -> str:
    """The dtype of the first stored tensor whose name ends with `suffix`, or `default`."""
    for name, header in headers.items():
        if name.endswith(suffix):
            return str(header.dtype).removeprefix("torch.")
    return default


def static_inputs(headers: Headers) -> InputsStated | None:
    """Activations with the scales that a checkpoint stores; None if it stores none."""
    shapes = [h.shape for name, h in headers.items() if name.endswith(".input_scale")]
    return InputsStated(InputScales.static, dims=len(shapes[0])) if shapes else None
