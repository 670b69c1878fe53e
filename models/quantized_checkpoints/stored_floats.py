"""The weight methods of stored floats of 8 and 4 bits.

`Float8`: `weight` float8_e4m3fn [out, in], and scales that multiply it: one for the matrix, one for
each row, or one for each block. A CPU does not round activations, so its products are more exact
than in libraries that round activations to 8 bits. On CUDA see rounded_inputs.py.

`Float4`: floats of 4 bits (e2m1), two in a byte, the first in the lower half. A group's scale is a
float of 8 bits. In NVFP4 the whole matrix has a second scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ostinato.models.quantized_checkpoints.stored_groups import StoredGroups
from ostinato.models.weight_methods.weight_method import (
    FLOATS,
    IN,
    OUT,
    Axis,
    DummyTensor,
    MatrixSpec,
    Part,
    StoredTensor,
)
from ostinato.ops.checkpoint_values.stored_values import Packing

__all__ = ("Float4", "Float8")

_ONE = Axis("", size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8(StoredGroups):
    """`weight` and its scales, whose name differs between libraries."""

    kind: ClassVar[str] = "e4m3"

    bits: int = 8
    group_size: int = -1
    symmetric: bool = True
    scale_dtype: str = "float32"
    scale_name: str = "weight_scale"
    scale_dims: int = 1  # dimensions of a scale for the whole matrix
    strategy: str = "tensor"  # or "channel", "block"
    block_rows: int = 128  # rows of a "block"; group_size is its columns

    @property
    def name(self) -> str:
        what = {"tensor": "the matrix", "channel": "a row"}.get(
            self.strategy, f"a block of {self.block_rows} x {self.group_size}"
        )
        return f"floats of 8 bits with a scale for {what}"

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        axes = {
            "tensor": (_ONE,) * self.scale_dims,
            "channel": (OUT, _ONE),
            "block": (Axis("out", self.block_rows), Axis("in", self.group_size)),
        }[self.strategy]
        scales = (*FLOATS, torch.float8_e8m0fnu)
        return {
            "weight": StoredTensor((OUT, IN), (torch.float8_e4m3fn,), converted=False),
            self.scale_name: StoredTensor(axes, scales, converted=False),
        }

    @property
    def packing(self) -> Packing:
        return Packing.bytes

    def checked(self, name: str, value: Tensor, part: Part) -> tuple[str, Tensor]:
        if name == "weight":
            values = value.view(torch.uint8)
            # The bits of the two NaNs are the largest byte with a sign and the largest without.
            if int(values.view(torch.int8).amax()) == 127 or int(values.amax()) == 255:
                raise ValueError("a weight is NaN; the file is damaged")
            return "values", values
        scales = value.float()
        if self.strategy == "tensor":
            return "scales", scales.reshape(1, 1).expand(part.stored[0], 1)
        if self.strategy == "block":
            return "scales", scales.repeat_interleave(self.block_rows, 0)[: part.stored[0]]
        return "scales", scales

    def dummy(self, tensor: DummyTensor) -> Tensor | None:
        if tensor.name == "weight":
            bits = torch.randint(0, 120, tensor.size, dtype=torch.uint8, generator=tensor.generator)
            return bits.view(torch.float8_e4m3fn)
        return torch.full(tensor.size, 1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float4(StoredGroups):
    """Floats of 4 bits, as one of three libraries stores them."""

    kind: ClassVar[str] = "e2m1"

    bits: int = 4
    symmetric: bool = True
    library: str  # "compressed-tensors", "modelopt" or "gpt-oss"

    @property
    def name(self) -> str:
        return f"floats of 4 bits in groups of {self.group_size}"

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        bytes_only, groups = (torch.uint8,), Axis("in", self.group_size)
        if self.library == "gpt-oss":
            half = Axis("", size=self.group_size // 2)
            return {
                "blocks": StoredTensor((OUT, groups, half), bytes_only, converted=False),
                "scales": StoredTensor((OUT, groups), bytes_only, converted=False),
            }
        weight = StoredTensor((OUT, Axis("in", 2)), bytes_only, converted=False)
        scales = StoredTensor((OUT, groups), (torch.float8_e4m3fn,), converted=False)
        if self.library == "modelopt":
            whole = StoredTensor((), (torch.float32,), converted=False)
            return {"weight": weight, "weight_scale": scales, "weight_scale_2": whole}
        whole = StoredTensor((_ONE,), (torch.float32,), converted=False)
        return {"weight_packed": weight, "weight_scale": scales, "weight_global_scale": whole}

    @property
    def packing(self) -> Packing:
        return Packing.rows

    def checked(self, name: str, value: Tensor, part: Part) -> tuple[str, Tensor]:
        if name in ("blocks", "weight", "weight_packed"):
            return "values", value
        if name == "scales":
            return "scales", torch.ldexp(torch.ones(value.shape), value.int() - 127)
        if name == "weight_scale":
            return "scales", value.float()
        whole = value.float().reshape(1, 1)
        if not bool((whole.isfinite() & (whole != 0)).all()):
            raise ValueError(f"{name} is {float(whole)}; it must be finite and not zero")
        return "whole", whole.expand(part.stored[0], 1)

    def finish(self, tensors: dict[str, Tensor], spec: MatrixSpec) -> dict[str, Tensor]:
        found = dict(tensors)
        for name in [name for name in tensors if name.startswith("scales ")]:
            scales, whole = tensors[name], tensors.get(name.replace("scales", "whole"))
            if whole is not None:
                # compressed-tensors stores the inverse of the second scale
                scales = scales * whole if self.library == "modelopt" else scales / whole
            found[name] = scales / 2  # the kernel's table has the floats times 2
        return super(Float4, self).finish(found, spec)

    def _placed(self, entry: str) -> StoredTensor:
        if entry == "whole":
            return StoredTensor((OUT, _ONE))
        return super(Float4, self)._placed(entry)

    def dummy(self, tensor: DummyTensor) -> Tensor | None:
        if tensor.name == "scales":
            return torch.full(tensor.size, 120, dtype=torch.uint8)
        if tensor.name == "weight_scale":
            return torch.full(tensor.size, 0.0078125).to(torch.float8_e4m3fn)
        return (
            torch.ones(tensor.size)
            if tensor.name in ("weight_scale_2", "weight_global_scale")
            else None
        )
