"""The weight methods of GGUF files, whose weights stay integers with scales.

A quantised matrix is laid out for the kernels of ops/quantized.py without rounding
(models/gguf/stored_formats.py), on a CPU and on CUDA. If a matrix stacks quantised and float
tensors, its quantised tensors are dequantised while they are loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ostinato.models.gguf.gguf_file import TENSOR_TYPES
from ostinato.models.gguf.stored_formats import FORMATS, common_format, pack_rows
from ostinato.models.quantized_checkpoints.policy import Headers
from ostinato.models.sharding import Span, why_cut
from ostinato.models.weight_methods.grouped import QuantizedMatrix
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import (
    IN,
    OUT,
    Axis,
    DummyTensor,
    MatrixRole,
    MatrixSpec,
    ParameterSpec,
    Part,
    StoredTensor,
    WeightMethod,
)
from ostinato.ops.checkpoint_values.stored_blocks import BLOCK_LAYOUTS
from ostinato.ops.quantized import pack_quantized_weight
from ostinato.ops.quantized_reference import QuantFormat

__all__ = ("AsStored", "GGUFPolicy", "from_checkpoint")


@dataclass(frozen=True, slots=True)
class AsStored(QuantizedMatrix):
    """Tensors of the GGUF `types`: `values`, `scales` and, in some formats, `minimums`.

    A matrix of one type of `BLOCK_LAYOUTS`, whose rows are whole blocks, has `blocks` instead. They
    are packed without a copy that has a byte for each value. On a CPU they are written to their
    place in the weight as soon as they are read.
    """

    types: tuple[str, ...]  # types of the stacked matrices, sorted
    keeps_blocks: bool = False

    def form(self, spec: MatrixSpec) -> QuantFormat:
        return common_format(self.types)

    @property
    def name(self) -> str:
        return f"{' and '.join(self.types)} as stored"

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        if self.keeps_blocks:
            _, values, num_bytes = _sizes(self.types[0])
            axes = (OUT, Axis("in", values), Axis("", size=num_bytes))
            return {"blocks": StoredTensor(axes, (torch.uint8,), converted=False)}
        form = common_format(self.types)
        groups = StoredTensor((OUT, Axis("in", form.group_size)), (torch.float32,), converted=False)
        values = StoredTensor((OUT, IN), (torch.uint8,), converted=False)
        found = {"values": values, "scales": groups}
        return found if form.symmetric else found | {"minimums": groups}

    def why_indivisible(self, columns: Span) -> str | None:
        return why_cut(columns, common_format(self.types).group_size)

    def parameters(self, spec: MatrixSpec) -> dict[str, ParameterSpec]:
        shape = common_format(self.types).packed_shape(spec.out_features, spec.in_features)
        return {"weight": ParameterSpec(tuple(shape), torch.uint8)}

    def dummy(self, tensor: DummyTensor) -> Tensor | None:
        # read as float16, such bytes are small numbers
        if tensor.name != "blocks":
            return None
        return torch.randint(0, 32, tensor.size, dtype=torch.uint8, generator=tensor.generator)

    def loads_in_place(self, spec: MatrixSpec) -> bool:
        return self.keeps_blocks and spec.device.type == "cpu"

    def load(
        self, tensors: dict[str, Tensor], name: str, value: Tensor, part: Part, spec: MatrixSpec
    ) -> None:
        if self.loads_in_place(spec):
            rows = part.cut(value, self.stored[name])
            self._pack(tensors["weight"], rows, part.first_row, spec)
        else:
            super(AsStored, self).load(tensors, name, value, part, spec)

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        if self.loads_in_place(spec):
            return tensors
        if self.keeps_blocks:
            shape, dtype = self.parameters(spec)["weight"]
            weight = torch.empty(shape, dtype=dtype)
            self._pack(weight, tensors["blocks"], 0, spec)
            return {"weight": weight}
        packed = pack_quantized_weight(
            tensors["values"], tensors["scales"], tensors.get("minimums"), self.form(spec)
        )
        return {"weight": packed}

    def _pack(self, weight: Tensor, blocks: Tensor, first_row: int, spec: MatrixSpec) -> None:
        pack_rows(weight, self.types[0], blocks.contiguous(), first_row, spec.out_features)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFPolicy:
    """Chooses `AsStored` for a matrix if all of its parts are quantised."""

    uses_cpu_kernels: ClassVar[bool] = True
    ignored: ClassVar[tuple[str, ...]] = ()
    has_cache_scales: ClassVar[bool] = False

    types: Mapping[str, Collection[str]]  # types of matrices, by their module in a checkpoint
    unquantized: WeightMethod
    # Modules whose columns have another order in the file. A block can hold values of two heads, so
    # columns are put in order after blocks have become integers.
    reordered: frozenset[str] = frozenset()
    is_batch_invariant: bool = True

    @property
    def quantization(self) -> str:
        names = {name for types in self.types.values() for name in types}
        return f"{', '.join(sorted(names & FORMATS.keys()))} as stored"

    def method_for(
        self, names: tuple[str, ...], role: MatrixRole, spec: MatrixSpec
    ) -> WeightMethod:
        types = {each for name in names for each in self.types.get(name, ())}
        if not types or not types <= FORMATS.keys():
            return Plain() if role is MatrixRole.embedding else self.unquantized
        is_one = len(types) == 1 and types <= BLOCK_LAYOUTS.keys()
        is_whole = is_one and spec.in_features % BLOCK_LAYOUTS[next(iter(types))].values == 0
        keeps_blocks = is_whole and self.reordered.isdisjoint(names)
        method = AsStored(tuple(sorted(types)), keeps_blocks=keeps_blocks)
        reason = method.why_unusable(spec.device, spec.dtype)
        if reason is not None and spec.device.type != "meta":
            raise ValueError(f"the file's weights are quantised ({method.name}), but {reason}")
        return method


def _sizes(type_name: str) -> tuple[str, int, int]:
    """The name, and the values and bytes of a block."""
    return next(sizes for sizes in TENSOR_TYPES.values() if sizes[0] == type_name)


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> GGUFPolicy:
    """The policy for `quant_method: gguf`, which models/gguf/gguf_config.py states.

    Args:
        stated: `types` of the matrices, by their modules' names in a Hugging Face checkpoint; and
            `reordered`, the modules whose columns have another order in the file.
        unquantized: the method of float matrices.
        headers: empty, because they are read from safetensors files only.
    """
    is_invariant = unquantized.is_batch_invariant
    return GGUFPolicy(
        types=stated["types"],
        unquantized=unquantized,
        reordered=frozenset(stated["reordered"]),
        is_batch_invariant=is_invariant,
    )
