"""The only caller of `torch.library`: one schema per op, an honest mutation list, a correct fake.

`Library.define/impl` costs about 3 microseconds a call where `torch.library.custom_op` costs about
19; times layers and ops, that difference is a visible share of a small model's step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ("define_twin", "register_op")

_LIBRARY = torch.library.Library("ostinato", "DEF")
_twins: dict[str, torch.library.Library] = {}


def register_op(
    name: str,
    kernels: dict[str, Callable[..., Any]],
    *,
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> torch._ops.OpOverload:
    """Define `ostinato::<name>` and return its overload.

    Args:
        name: op name inside the `ostinato` namespace.
        kernels: dispatch key -> implementation, all with the fake's signature. "CPU" and "CUDA",
            or "CompositeExplicitAutograd" for every device without a kernel of its own; an op with
            a C++ kernel uses the latter, because ops/native/library.py adds the "CPU" one.
        fake: shape propagation; must give the real strides, and its annotations define the schema.
        mutates: names of the arguments that a kernel writes to.
    """
    _LIBRARY.define(name + torch.library.infer_schema(fake, mutates_args=mutates))
    for key, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"ostinato::{name}", fake, lib=_LIBRARY)
    overload: torch._ops.OpOverload = getattr(torch.ops.ostinato, name).default
    return overload


def define_twin(namespace: str, name: str) -> bool:
    """Define `<namespace>::<name>` with the schema of `ostinato::<name>` for other kernels.

    Returns:
        False, defining nothing, when no imported module has registered `ostinato::<name>`.
    """
    packet = getattr(torch.ops.ostinato, name, None)
    if packet is None:
        return False
    if namespace not in _twins:
        _twins[namespace] = torch.library.Library(namespace, "DEF")
    schema = str(packet.default._schema)
    _twins[namespace].define(schema.removeprefix("ostinato::"))
    return True
