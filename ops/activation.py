"""Activation functions by the names that model configurations use.

On a CPU they run as the ops `ostinato::activation` and `ostinato::sigmoid_gate`, on other devices
as plain torch (see ops/norm.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.register import by_device, register_op

__all__ = ("ACTIVATIONS", "CLAMPED_GATE", "activate", "plain_activation", "sigmoid_gate")

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Name in a configuration -> name that the op uses."""

CLAMPED_GATE = (1.702, 1.0, 7.0)
"""The constants of `swigluoai`: the slope of the gate, what is added to up, and the limit."""

_GATED = {"swigluoai": "swigluoai"}

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # arXiv:1606.08415
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # arXiv:2109.08668
    "silu": F.silu,
}


def activate(x: Tensor, name: str, *, gated: bool = False) -> Tensor:
    """`function(x)`, or if gated `function(first half of each row) * second half`.

    Args:
        x: [T, I], or [T, 2 I] gate and up (arXiv:2002.05202); last dimension contiguous.
        name: a key of `ACTIVATIONS`; or `swigluoai`, which is always gated (gpt-oss,
            arXiv:2508.10925): `gate * sigmoid(1.702 * gate) * (up + 1)`. Before that, `gate` is
            clamped to at most 7, and `up` is clamped to [-7, 7].
        gated: whether x has gate and up.

    Returns:
        [T, I] contiguous, in x's dtype, computed in float32 on CPUs.
    """
    return _activation(x, (ACTIVATIONS | _GATED)[name], gated)


def plain_activation(x: Tensor, kind: str, gated: bool) -> Tensor:
    """`activate` in plain torch. `kind` is a value of `ACTIVATIONS`."""
    if not gated:
        return _PLAIN[kind](x)
    gate, up = x.chunk(2, dim=-1)
    if kind == "swigluoai":
        slope, offset, limit = CLAMPED_GATE
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + offset) * (gate * torch.sigmoid(gate * slope))
    return _PLAIN[kind](gate) * up


def _activation_fake(x: Tensor, kind: str, gated: bool) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2 if gated else x.shape[1]))


_activation = by_device(
    register_op(
        "activation", {"CompositeExplicitAutograd": plain_activation}, fake=_activation_fake
    ),
    plain_activation,
)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`.

    Args:
        x: [T, I]; last dimension contiguous.
        gate: [T, I] in x's dtype; last dimension contiguous.

    Returns:
        [T, I] contiguous, in x's dtype, computed in float32 on CPUs.
    """
    return _sigmoid_gate(x, gate)


def _plain_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def _gate_fake(x: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_sigmoid_gate = by_device(
    register_op("sigmoid_gate", {"CompositeExplicitAutograd": _plain_gate}, fake=_gate_fake),
    _plain_gate,
)
