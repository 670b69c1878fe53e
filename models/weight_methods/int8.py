"""The weight method `int8`: integers of 8 bits, quantised while the weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ostinato.models.weight_methods.grouped import GroupQuantized

__all__ = ("Int8", "on_load")


@dataclass(frozen=True, slots=True)
class Int8(GroupQuantized):
    """Integers of 8 bits, whose scale is shared by a group of 128 weights by default."""

    bits: ClassVar[int] = 8

    group_size: int = 128
    symmetric: bool = True


def on_load(group_size: int | None, symmetric: bool) -> Int8:
    """The method for `model.quantization=int8`; a group size of None is the default."""
    return Int8(group_size or 128, symmetric)
