"""Registration of ops with torch; the only module of the package that calls `torch.library`.

A call of an op that `Library.define` and `impl` registered costs about 3 µs. A call of an op
registered with `torch.library.custom_op` costs about 19 µs. The difference is measurable in a step
of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ("by_device", "define_alias", "fake_of", "register_op")

_LIBRARY = torch.library.Library("ostinato", "DEF")
_aliases: dict[str, torch.library.Library] = {}
_fakes: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


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
        kernels: dispatch key -> implementation, all with the fake's signature. The key is "CPU" or
            "CUDA", or "CompositeExplicitAutograd" for every device without its own kernel. An op
            with a C++ kernel uses "CompositeExplicitAutograd", because ops/native/library.py adds
            the "CPU" kernel.
        fake: computes shapes and strides without data. Its annotations define the schema.
        mutates: names of the arguments that a kernel writes to.
    """
    _LIBRARY.define(name + torch.library.infer_schema(fake, mutates_args=mutates))
    for key, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"ostinato::{name}", fake, lib=_LIBRARY)
    overload: torch._ops.OpOverload = getattr(torch.ops.ostinato, name).default
    _fakes[overload] = fake
    return overload


def fake_of(op: object) -> Callable[..., Any] | None:
    """The fake function of an op of this package, given by its overload; None for other objects."""
    return _fakes.get(op) if isinstance(op, torch._ops.OpOverload) else None


def define_alias(namespace: str, name: str) -> bool:
    """Define `<namespace>::<name>` with the schema of `ostinato::<name>`.

    Kernels of another instruction set are installed under such names.

    Returns:
        False if no imported module has registered `ostinato::<name>`; then nothing is defined.
    """
    packet = getattr(torch.ops.ostinato, name, None)
    if packet is None:
        return False
    if namespace not in _aliases:
        _aliases[namespace] = torch.library.Library(namespace, "DEF")
    schema = str(packet.default._schema)
    _aliases[namespace].define(schema.removeprefix("ostinato::"))
    return True


def by_device(op: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `op` if its first argument is a CPU tensor, else `plain`.

    torch's dispatcher cannot make this choice, because it chooses when a program runs. A program
    that Inductor compiles for a GPU must contain the plain torch functions, so that Inductor can
    fuse them with their neighbours. It cannot look into an op of this package. This function
    chooses while the program is traced, and costs nothing afterwards.

    Args:
        op: what `register_op` returned.
        plain: plain torch functions, with the same arguments and the same result.
    """

    def call(x: torch.Tensor, *arguments: Any) -> Any:
        return op(x, *arguments) if x.device.type == "cpu" else plain(x, *arguments)

    return call
