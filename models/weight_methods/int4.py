"""The weight method `int4`: integers of 4 bits, quantised while the weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ostinato.models.weight_methods.grouped import GroupQuantized

__all__ = ("Int4", "on_load")


@dataclass(frozen=True, slots=True)
class Int4(GroupQuantized):
    """Integers of 4 bits, whose scale is shared by a group of 32 weights by default."""

    bits: ClassVar[int] = 4

    group_size: int = 32
    symmetric: bool = True


def on_load(group_size: int | None, symmetric: bool) -> Int4:
    """The method for `model.quantization=int4`; a group size of None is the default."""
    return Int4(group_size or 32, symmetric)
