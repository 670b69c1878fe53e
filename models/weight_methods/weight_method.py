"""The interface of a weight method: how one linear weight is stored, loaded and multiplied.

A checkpoint stores a matrix [out, in] as one tensor (`weight`) or as several (`qweight`, `scales`,
...). A weight method names those tensors, turns them into the parameters that its kernel reads, and
calls that kernel. It holds settings only. The tensors belong to `LinearBase`
(models/layers/linear_layers.py), which has no code for a particular method.

    stored     the tensors of one matrix in a checkpoint
    load       takes one of these tensors
    finish     makes the parameters when all tensors have been taken
    apply      x @ W.T + bias + residual
    apply_experts  the same with the matrices of experts
    rows       rows of W, for embeddings
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ostinato.models.sharding import Span
from ostinato.ops.activation import activate

__all__ = (
    "FLOATS",
    "IN",
    "OUT",
    "Axis",
    "DummyTensor",
    "MatrixRole",
    "MatrixSpec",
    "ParameterSpec",
    "Part",
    "StoredTensor",
    "WeightMethod",
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class MatrixRole(StrEnum):
    """The use of a matrix in its model."""

    layer = "layer"  # multiplied in a layer
    router = "router"  # multiplied in a layer, to choose experts
    head = "head"  # multiplied to give logits
    embedding = "embedding"  # its rows are looked up
    tied = "tied"  # both: an embedding that is also the output head
    vision = "vision"  # multiplied in a vision tower


class MatrixSpec(NamedTuple):
    """The matrix of one module on this rank."""

    out_features: int
    in_features: int
    dtype: torch.dtype  # the dtype of activations
    device: torch.device


class DummyTensor(NamedTuple):
    """A stored tensor of a dummy checkpoint."""

    name: str  # a key of `WeightMethod.stored`
    size: tuple[int, ...]
    matrix: tuple[int, int]  # rows and columns of the matrix that it belongs to
    generator: torch.Generator  # of the CPU; all random numbers of the tensor are from it


class ParameterSpec(NamedTuple):
    """A parameter's memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Axis(NamedTuple):
    """One dimension of a stored tensor: output features, input features, or a fixed size."""

    features: str  # "out", "in", or "" for a fixed size
    per_element: int = 1  # features of one element: 8 for a word of eight 4-bit weights
    size: int = 0  # the fixed size

    def length(self, out_features: int, in_features: int) -> int:
        """The length of this dimension, if the stored matrix is [out_features, in_features]."""
        if not self.features:
            return self.size
        features = out_features if self.features == "out" else in_features
        return -(-features // self.per_element)


OUT, IN = Axis("out"), Axis("in")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the tensors in which a checkpoint stores a matrix."""

    axes: tuple[Axis, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS  # the accepted dtypes
    converted: bool = True  # converted to the activations' dtype when it is copied

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """The tensor's shape, if the stored matrix is [out_features, in_features]."""
        return tuple(axis.length(out_features, in_features) for axis in self.axes)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A stored matrix and its place in a module's matrix, which can stack several stored ones."""

    index: int  # among the module's parts
    count: int  # the number of the module's parts
    stored: tuple[int, int]  # [out, in] of the stored matrix
    rows: Tensor | slice  # rows of the stored matrix that this module holds, in the module's order
    columns: Span  # columns of the stored matrix that this module holds
    first_row: int  # where the part begins in the module's matrix
    num_rows: int
    expert: int = 0  # index among this rank's experts, if the module has any

    def why_uncut(self, stored: StoredTensor) -> str | None:
        """Why `cut` cannot cut a stored tensor, in one line; None if it can."""
        for axis in stored.axes:
            each = axis.per_element
            if axis.features == "out" and each != 1:
                if not isinstance(self.rows, slice):
                    return f"its rows cannot be reordered: it packs {each} rows in one element"
                first, stop = self.rows.start, self.rows.stop
                if (first, stop) != (0, self.stored[0]) and (first % each or stop % each):
                    return f"rows {first} to {stop} would split an element, which packs {each} rows"
            if axis.features == "in" and not self.columns.is_whole:
                start, size, _ = self.columns
                if start % each or size % each:
                    return (
                        f"columns {start} to {start + size} would split an element, which packs "
                        f"{each} columns"
                    )
        return None

    def cut(self, tensor: Tensor, stored: StoredTensor) -> Tensor:
        """The part of a stored tensor that this module holds; a view if possible.

        Raises:
            ValueError: the tensor packs several features in an element, and the cut or the order of
                rows would split an element.
        """
        if (reason := self.why_uncut(stored)) is not None:
            raise ValueError(reason)
        for dim, axis in enumerate(stored.axes):
            if axis.features == "out":
                tensor = self._rows_of(tensor, dim, axis.per_element)
            elif axis.features == "in" and not self.columns.is_whole:
                start, size, _ = self.columns
                tensor = tensor.narrow(dim, start // axis.per_element, size // axis.per_element)
        return tensor

    def _rows_of(self, tensor: Tensor, dim: int, per_element: int) -> Tensor:
        if not isinstance(self.rows, slice):
            return tensor.index_select(dim, self.rows.to(tensor.device))
        start, stop = self.rows.start, self.rows.stop
        if (start, stop) == (0, self.stored[0]):
            return tensor
        return tensor.narrow(dim, start // per_element, (stop - start) // per_element)


class WeightMethod(ABC):
    """How a weight is stored, loaded and multiplied.

    Subclasses are frozen dataclasses: equal methods give equal programs.
    """

    is_quantized: ClassVar[bool] = False  # the parameters are rounded values
    # The bits of a row of the result do not depend on the other rows.
    is_batch_invariant: ClassVar[bool] = False
    # The parameter whose size depends on the values. `join_experts` makes one for all experts.
    of_any_size: ClassVar[str | None] = None

    @property
    @abstractmethod
    def stored(self) -> Mapping[str, StoredTensor]:
        """The tensors of one matrix in a checkpoint, by the last part of their names."""

    @property
    def static_key(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        return (self,)

    @property
    @abstractmethod
    def name(self) -> str:
        """The method's name for users, such as `int4 in groups of 32`."""

    def why_unusable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why no kernel supports this device with activations of this dtype; None if one does."""
        return None

    def why_indivisible(self, columns: Span) -> str | None:
        """Why a rank cannot hold these columns of a matrix, in one line; None if it can."""
        return None

    def loads_in_place(self, spec: MatrixSpec) -> bool:
        """Whether `load` writes the parameters, in their final form."""
        return False

    @abstractmethod
    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        """The parameters that the kernel reads, by name."""

    def num_bytes(self, spec: MatrixSpec) -> int:
        """Bytes of the parameters."""
        return sum(parameter.num_bytes for parameter in self.parameters(spec).values())

    def load(
        self, tensors: dict[str, Tensor], name: str, value: Tensor, part: Part, spec: MatrixSpec
    ) -> None:
        """Keep a stored tensor until `finish`.

        Tensors that have no `out` dimension are stacked, one for each part of the module:
        [parts, ...].

        Args:
            tensors: the tensors of this matrix that were loaded so far, by stored name; filled
                here. If the method `loads_in_place`, the parameters themselves.
            name: a key of `stored`.
            value: the tensor as stored, in any of the accepted dtypes.
            part: the rows and columns that this rank holds, and their place in the matrix.
            spec: the module's matrix.

        Raises:
            ValueError: the value cannot be cut to `part`, or the method does not support it.
        """
        self.place(tensors, name, value, self.stored[name], part, spec)

    def place(
        self,
        tensors: dict[str, Tensor],
        name: str,
        value: Tensor,
        stored: StoredTensor,
        part: Part,
        spec: MatrixSpec,
    ) -> None:
        """Put the rows and columns of a tensor that this rank holds into `tensors`.

        A tensor is kept without a copy if it is that of a module's only part, has no entry in
        `tensors` yet, is contiguous and needs no conversion. Other tensors are copied to their
        place in the entry of `tensors`.

        Args:
            tensors, name, value, part, spec: as for `load`.
            stored: the dimensions of `value`.

        Raises:
            ValueError: the value cannot be cut to `part`.
        """
        value = part.cut(value, stored)
        dtype = spec.dtype if stored.converted else value.dtype
        out = [dim for dim, axis in enumerate(stored.axes) if axis.features == "out"]
        is_kept = part.count == 1 and name not in tensors and value.is_contiguous()
        if is_kept and value.dtype == dtype and value.device == spec.device:
            # `finish` converts the matrix, so it is not copied here as well.
            tensors[name] = value if out else value[None]
            return
        if name not in tensors:
            shape = stored.shape(spec.out_features, spec.in_features)
            if not out:
                shape = (part.count, *shape)
            tensors[name] = torch.empty(shape, dtype=dtype, device=spec.device)
        target = tensors[name]
        for dim in out:
            per_element = stored.axes[dim].per_element
            target = target.narrow(dim, part.first_row // per_element, value.shape[dim])
        if not out:
            target = target[part.index]
        target.copy_(value)

    def dummy(self, tensor: DummyTensor) -> Tensor | None:
        """The content of a stored tensor; None = the caller fills it with random numbers."""
        return None

    @abstractmethod
    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        """The parameters of a matrix whose stored tensors have all been loaded.

        Raises:
            ValueError: the stored tensors do not fit each other.
            NativeBuildError: the kernels cannot be built on this machine.
        """

    def join_experts(self, weights: Mapping[str, Tensor], parts: list[Tensor]) -> Tensor:
        """The parameter `of_any_size` for all experts.

        Args:
            weights: the experts' other parameters [experts, ...]. They may be changed.
            parts: the parameter of each expert.
        """
        return torch.cat(parts)

    @abstractmethod
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
        """x @ W.T + bias + residual.

        Args:
            weights: the parameters by name.
            spec: the module's matrix.
            x: [T, in_features] in the activations' dtype.
            bias: [out_features] in that dtype, or None.
            residual: [T, out_features] in that dtype, or None.
            float32_output: return float32, for logits and partial sums; `residual` is then None.

        Returns:
            [T, out_features] in the activations' dtype or float32.
        """

    def apply_gated(
        self,
        weights: Mapping[str, Tensor],
        spec: MatrixSpec,
        x: Tensor,
        bias: Tensor | None,
        activation: str,
    ) -> Tensor:
        """A gated linear unit: activation(first half of `apply`) * second half.

        Args:
            weights, spec, x, bias: as for `apply`.
            activation: a key of `ACTIVATIONS` (ops/activation.py).

        Returns:
            [T, out_features / 2] in the activations' dtype.
        """
        both = self.apply(weights, spec, x, bias, None, float32_output=False)
        return activate(both, activation, gated=True)

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
        """Each row times the matrices of its experts; see `moe_linear` (ops/moe/moe_linear.py).

        Args:
            weights: the parameters by name, [experts, ...].
            spec: describes one expert's matrix.
            x, ids, bias, routing_weights, residual: as for `moe_linear`.

        Raises:
            ValueError: no kernel of this method multiplies experts.
        """
        raise ValueError(
            f"weights as {self.name} have no kernel for mixtures of experts; use the "
            "unquantized checkpoint of the model"
        )

    @abstractmethod
    def rows(self, weights: Mapping[str, Tensor], spec: MatrixSpec, ids: Tensor) -> Tensor:
        """Rows of the matrix: ids [T] int64 -> [T, in_features] in the activations' dtype."""

    @abstractmethod
    def dense(self, weights: Mapping[str, Tensor], spec: MatrixSpec) -> Tensor:
        """The matrix that the parameters stand for: [out_features, in_features].

        It is float32 for quantised weights.
        """
