"""The op `ostinato::fused_linear`: a linear layer with a norm before it and an epilogue, on CUDA.

A decode step of a few sequences reads every weight for a few rows. Its kernels take microseconds,
so each launch and each intermediate result counts. On CUDA, one Triton kernel computes the RMS norm
of the input, the product, the gated activation and the residual (triton_fused_linear.py). Elsewhere
the op runs as plain torch, with which tests compare the kernel.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.activation import ACTIVATIONS, activate
from ostinato.ops.norm import plain_rms_norm
from ostinato.ops.register import register_op

__all__ = ("FUSED_DTYPES", "TILE_ROWS", "fused_linear", "most_rows", "warm_up_tokens")

TILE_ROWS = {torch.bfloat16: (16, 64, 256), torch.float32: (16, 64)}
"""For each dtype of activations that the kernel takes, the most rows of each of its tiles.

On an H200, a bfloat16 product with 256 rows takes about as long to compute as its weights take to
read. Up to that size, a fused kernel saves more by its fewer launches than it loses to cuBLAS.
Float32 is multiplied without tensor cores: with 64 rows, the product already takes longer than the
reading of the weights.

The kernel multiplies x by the norm's weight before it divides by the root mean square, so one pass
over x gives both the products and the sum of squares. In float16, such a product could overflow.
"""

FUSED_DTYPES = tuple(TILE_ROWS)


def most_rows(dtype: torch.dtype) -> int:
    """The most tokens of a step that runs the fused kernels; 0 = the dtype has none."""
    return TILE_ROWS.get(dtype, (0,))[-1]


def warm_up_tokens(dtype: torch.dtype) -> tuple[int, ...]:
    """Sizes of warm-up steps in tokens. Together they run each GPU program and tile once.

    The largest step is first, because GPU kernels are tuned for the first shape. It is too large
    for the fused kernels, so it runs the program for larger steps.
    """
    tiles = TILE_ROWS.get(dtype, ())
    return (2 * max(64, most_rows(dtype)), *reversed(tiles[1:]), 1)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """`activation(rms_norm(x) @ W.T + bias) + residual`, each part only if its argument is given.

    Args:
        x: [T, K] in bfloat16 or float32, last dimension contiguous.
        weight: [N, K] in x's dtype, contiguous; with an activation [2 N, K], gate and up.
        bias: [N] (or [2 N]) in x's dtype.
        norm_weight: [K] in x's dtype or float32, the scale of an RMS norm of x; None = no norm.
        eps: the norm adds it to the mean square.
        activation: a key of `ACTIVATIONS`, for the gated linear unit `activation(gate) * up`;
            empty = none.
        residual: [T, N] in x's dtype, last dimension contiguous.

    Returns:
        [T, N] contiguous, in x's dtype. On CUDA it is rounded once; plain torch rounds after each
        part.
    """
    kind = ACTIVATIONS[activation] if activation else ""
    return _op(x, weight, bias, norm_weight, eps, kind, residual)


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    if norm_weight is not None:
        x = plain_rms_norm(x, norm_weight, eps)
    result = F.linear(x, weight, bias)
    if activation:
        name = next(name for name, kind in ACTIVATIONS.items() if kind == activation)
        result = activate(result, name, gated=True)
    return result if residual is None else result + residual


def _on_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    kernel = import_module("ostinato.ops.fused.triton_fused_linear")
    return kernel.launch(x, weight, bias, norm_weight, eps, activation, residual)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // (2 if activation else 1)))


_op = register_op(
    "fused_linear", {"CompositeExplicitAutograd": _plain, "CUDA": _on_cuda}, fake=_fake
)
