"""Normalisation as plain torch functions, which Inductor fuses with their neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("rms_norm",)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide the last dimension by its root mean square, computed in float32, and scale it.

    Args:
        x: [..., D].
        weight: [D], in x's dtype.
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype. Rounded to it before the scale, as the models were trained (Zhang and
        Sennrich 2019, arXiv:1910.07467).
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight
