"""Lays a loaded model's weights out for the CPU's matrix kernels (ops/linear.py), in place."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ostinato.models.layers import Embedding, Linear
from ostinato.ops.linear import why_unpackable

__all__ = ("pack_model",)


def pack_model(
    model: nn.Module,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    fill: bool = True,
) -> int:
    """Replace every weight that a matrix product reads by its packed form, one at a time.

    An embedding that is also the output head is packed too and stays a single copy; other
    embeddings are left as they are. So is a weight that can not be packed (`why_unpackable`:
    another device, or float16). Peak memory is the model and its largest weight once more.

    Args:
        model: with its final weights, not yet compiled.
        on_progress: called with (bytes done, bytes in total) after each weight.
        fill: False = give the weights the packed form only, contents unset: a model to trace.

    Returns:
        How many weights are packed now.

    Raises:
        NativeBuildError: the kernels can not be built on this machine.
    """
    targets = [
        module
        for module in model.modules()
        if (isinstance(module, Linear) or (isinstance(module, Embedding) and module.is_head))
        and not module.packed
        and module.quantized is None
        and why_unpackable(module.weight) is None
    ]
    total, done = sum(module.weight.nbytes for module in targets), 0
    for module in targets:
        done += module.weight.nbytes
        module.pack(fill=fill)
        if on_progress is not None:
            on_progress(done, total)
    return len(targets)
