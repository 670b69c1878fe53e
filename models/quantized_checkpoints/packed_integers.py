"""The integers of compressed-tensors' checkpoints: `pack-quantized` and `int-quantized`.

pack-quantized:

    weight_packed      int32 [out, in * bits / 32]: a word has successive inputs
    weight_zero_point  int32 [out * bits / 32, groups]: a word has successive outputs
    weight_shape       int64 [2]: out, in

int-quantized:

    weight             int8 [out, in]
    weight_zero_point  int8 [out, groups]

both:

    weight_scale       [out, groups]; one number if the matrix has one scale
    weight_g_idx       int32 [in]: the group of each input; with `actorder` only

Packed integers are stored with 2**(bits - 1) added. A weight is `(q - z) * scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.models.quantized_checkpoints.stored_groups import G_IDX, StoredGroups
from ostinato.models.weight_methods.weight_method import (
    FLOATS,
    IN,
    OUT,
    Axis,
    DummyTensor,
    Part,
    StoredTensor,
)
from ostinato.ops.checkpoint_values.stored_values import Packing, unpack_words

__all__ = ("PackedIntegers",)

_WORDS = (torch.int32,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntegers(StoredGroups):
    """Integers with a scale for each group, each row or the whole matrix."""

    is_packed: bool
    has_one_scale: bool = False  # for the whole matrix
    scale_dims: int = 2

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        per_word, groups = 32 // self.bits, self.groups_axis()
        one = Axis("", size=1)
        scale = (one,) * self.scale_dims if self.has_one_scale else (OUT, groups)
        tensors = {"weight_scale": StoredTensor(scale, FLOATS, converted=False)}
        if self.is_packed:
            words = StoredTensor((OUT, Axis("in", per_word)), _WORDS, converted=False)
            tensors["weight_packed"] = words
            tensors["weight_shape"] = StoredTensor(
                (Axis("", size=2),), (torch.int64, torch.int32), converted=False
            )
            zeros = StoredTensor((Axis("out", per_word), groups), _WORDS, converted=False)
        else:
            tensors["weight"] = StoredTensor((OUT, IN), (torch.int8,), converted=False)
            zeros = StoredTensor((OUT, groups), (torch.int8,), converted=False)
        if not self.symmetric:
            tensors["weight_zero_point"] = zeros
        if self.has_order:
            tensors["weight_g_idx"] = G_IDX
        return tensors

    @property
    def packing(self) -> Packing:
        return Packing.rows if self.is_packed else Packing.bytes

    @property
    def is_signed(self) -> bool:
        return not self.is_packed

    def checked(self, name: str, value: Tensor, part: Part) -> tuple[str, Tensor]:
        rows, columns = part.stored
        if name == "weight_packed":
            return "values", value
        if name == "weight":
            if self.bits == 4 and bool(((value < -8) | (value > 7)).any()):
                raise ValueError("an integer of the weight does not fit into 4 bits")
            return "values", value
        if name == "weight_scale":
            return "scales", value.expand(rows, 1) if self.has_one_scale else value
        if name == "weight_g_idx":
            return "g_idx", value
        if name == "weight_zero_point":
            if self.is_packed:
                zeros = unpack_words(value, self.bits, Packing.columns)[:, :rows]
                return "zeros", zeros.T.int()
            return "zeros", value.int() + (1 << (self.bits - 1))
        if name == "weight_shape" and tuple(value.tolist()) != part.stored:
            raise ValueError(
                f"weight_shape is {value.tolist()}, but the model needs {[rows, columns]}"
            )
        return "", value

    def dummy(self, tensor: DummyTensor) -> Tensor | None:
        if tensor.name == "weight_scale":
            return torch.full(tensor.size, 0.02 / (1 << (self.bits - 2)))
        if tensor.name == "weight_shape":
            return torch.tensor(tensor.matrix)
        if tensor.name == "weight" and self.bits == 4:
            return torch.randint(-8, 8, tensor.size, dtype=torch.int8, generator=tensor.generator)
        if tensor.name == "weight_g_idx":
            return torch.arange(tensor.size[0], dtype=torch.int32) // max(self.group_size, 1)
        return None
