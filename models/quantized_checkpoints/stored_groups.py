"""The base of the weight methods whose integers and scales are stored in the checkpoint.

Each format converts its stored tensors to these:

    values  integers from 0 to 2**bits - 1, as they are stored (`Packing` of ops/checkpoint_values/)
    scales  [out, groups], in the checkpoint's dtype
    zeros   the integers that stand for zero, of the scales' shape, int32; none if symmetric
    g_idx   [in] int32, the group of each column; none if the columns are in the groups' order

`finish` packs them for the kernel. Until then the values are views of the mapped file. All of them
are unpacked in two cases only: if this rank's part would split a word, and by `unpacked`. Nothing
is rounded: a weight is `(value - zero) * scale` of the stored numbers. A group of more than 256
columns becomes several groups with the same scale, because only sums of up to 256 products are
exact in every instruction set.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
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
from ostinato.ops.checkpoint_values.stored_values import (
    Packing,
    StoredValues,
    pack_stored,
    unpack_values,
)
from ostinato.ops.quantized_reference import QuantFormat
from ostinato.ops.w8a8.round_rows import InputScales

__all__ = ("G_IDX", "InputsStated", "StoredGroups", "check_scales", "static_inputs", "stored_dtype")

_MOST = 256  # values in the largest group that the kernels take
G_IDX = StoredTensor((IN,), dtypes=(torch.int32, torch.int64), converted=False)


class InputsStated(NamedTuple):
    """How activations are to be rounded to 8 bits, as a checkpoint states it."""

    scales: InputScales
    powers: bool = False  # the scales are powers of two
    dims: int = 0  # dimensions of a stored scale
    stored_as: str = "input_scale"  # the name of a stored scale


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

    @property
    @abstractmethod
    def packing(self) -> Packing:
        """How the values are stored."""

    @property
    def is_signed(self) -> bool:
        """Whether values stored as bytes have a sign."""
        return False

    @abstractmethod
    def checked(self, name: str, value: Tensor, part: Part) -> tuple[str, Tensor]:
        """One stored tensor in the form of the module's docstring.

        Args:
            name: a key of `stored`.
            value: the tensor.
            part: the stored matrix.

        Returns:
            The name `values`, `scales`, `zeros` or `g_idx`, and the tensor: values as they are
            stored, others converted. The name is empty for a tensor that is only checked.

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
        groups = "groups of one row" if self.group_size == -1 else f"groups of {self.group_size}"
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
        value = value.cpu()  # only the CPU has kernels that pack weights
        entry, value = self.checked(name, value, part)
        if entry == "values":
            entry, value = self._cut_values(value, self.stored[name], part)
        elif entry:
            value = part.cut(value, self._placed(entry))
        if entry == "scales":
            check_scales(value)
        if entry == "g_idx" and self.group_size != -1:  # counted from this rank's first group
            value = value - part.columns.start // self.group_size
        if entry:
            tensors[f"{entry} {part.first_row}"] = value

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        order = self._order(_by_rows("g_idx", tensors), spec)
        form = self.form(spec)
        packed = torch.empty(
            tuple(form.packed_shape(spec.out_features, spec.in_features)), dtype=torch.uint8
        )
        # `pack_stored` takes the parts in the order of their rows.
        for first_row in _first_rows("scales", tensors):
            pack_stored(
                packed,
                self._values(tensors, first_row),
                tensors[f"scales {first_row}"],
                tensors.get(f"zeros {first_row}"),
                order,
                form,
                first_row=first_row,
                in_features=spec.in_features,
                group_columns=spec.in_features if self.group_size == -1 else self.group_size,
            )
        if not self.has_order:
            return {"weight": packed}
        whole = torch.arange(spec.in_features, dtype=torch.int32)
        return {"weight": packed, "order": whole if order is None else order}

    def unpacked(self, tensors: Mapping[str, Tensor], spec: MatrixSpec) -> tuple[Tensor, ...]:
        """What `load` has kept, without packing: values and scales, and zeros if there are any.

        Args:
            tensors: filled by `load`.
            spec: the module's matrix.

        Returns:
            Values [out, in] uint8, and the rest [out, groups], as the module's docstring says.
        """
        values = [
            unpack_values(self._values(tensors, first_row), self.bits)[:, : spec.in_features]
            for first_row in _first_rows("scales", tensors)
        ]
        factors = [_by_rows(kind, tensors) for kind in ("scales", "zeros")]
        return (torch.cat(values), *(torch.cat(each) for each in factors if each))

    def _cut_values(self, values: Tensor, stored: StoredTensor, part: Part) -> tuple[str, Tensor]:
        """This rank's part of values: `values` as they are stored, or `bytes` of single values.

        They become bytes if a word would be split.
        """
        words = max(axis.per_element for axis in stored.axes if axis.features == "out")
        if part.why_uncut(stored) is None and part.first_row % words == 0:
            return "values", part.cut(values, stored)
        rows, columns = part.stored
        single = unpack_values(StoredValues(values, self.packing, self.is_signed), self.bits)
        return "bytes", part.cut(single[:rows, :columns], StoredTensor((OUT, IN)))

    def _values(self, tensors: Mapping[str, Tensor], first_row: int) -> StoredValues:
        """The values of the part that begins at a row, as `load` has kept them."""
        if (single := tensors.get(f"bytes {first_row}")) is not None:
            return StoredValues(single, Packing.bytes)
        return StoredValues(tensors[f"values {first_row}"], self.packing, self.is_signed)

    def groups_axis(self) -> Axis:
        """The dimension of groups of a stored tensor."""
        return Axis("", size=1) if self.group_size == -1 else Axis("in", self.group_size)

    def _placed(self, entry: str) -> StoredTensor:
        """The dimensions of a tensor other than the values, as `checked` returns it."""
        return G_IDX if entry == "g_idx" else StoredTensor((OUT, self.groups_axis()))

    def _order(self, g_idx: list[Tensor], spec: MatrixSpec) -> Tensor | None:
        """For each column of the kernel the stored column, int32; None = the same column."""
        if not g_idx:
            return None
        if any(not torch.equal(each, g_idx[0]) for each in g_idx[1:]):
            raise ValueError(
                "g_idx orders the columns of the stacked matrices (such as q_proj, k_proj and "
                "v_proj) differently; quantise them with the same calibration text"
            )
        size = spec.in_features if self.group_size == -1 else self.group_size
        groups = torch.arange(spec.in_features, dtype=g_idx[0].dtype) // size
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
        return order.int()


def _first_rows(entry: str, tensors: Mapping[str, Tensor]) -> list[int]:
    """Where the parts with this entry begin in the module's matrix, in ascending order."""
    start = f"{entry} "
    return sorted(int(name.removeprefix(start)) for name in tensors if name.startswith(start))


def _by_rows(entry: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of an entry, in the order of their rows in the module's matrix."""
    return [tensors[f"{entry} {first_row}"] for first_row in _first_rows(entry, tensors)]


def check_scales(scales: Tensor) -> None:
    """Check that scales are usable numbers.

    Raises:
        ValueError: one is infinite, NaN or zero.
    """
    # Python's comparisons with NaN are false.
    least, most = (float(each) for each in scales.float().abs().aminmax())
    if not (least > 0 and most < math.inf):
        wrong = ~scales.float().isfinite() | (scales.float() == 0)
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
    """The rounding of activations by scales that a checkpoint stores; None if it stores none."""
    for kind in ("input_scale", "activation_scale"):
        shapes = [h.shape for name, h in headers.items() if name.endswith(f".{kind}")]
        if shapes:
            return InputsStated(InputScales.static, dims=len(shapes[0]), stored_as=kind)
    return None
