"""Activation functions by the names that model configurations use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ("ACTIVATIONS", "gated", "quick_gelu")


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), the cheap approximation of GELU (arXiv:1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up (arXiv:2002.05202): x [..., 2 I] holds gate and up; gives [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up
