"""Linear layers fused with what is before and after them, for steps of few rows, on CUDA.

A decode step of a few sequences reads every weight for a few rows. Its kernels take microseconds,
so each launch and each intermediate result counts. On CUDA, a Triton kernel computes a product with
its bias, gated activation and residual (triton_fused_linear.py). An RMS norm before a product is
computed in two parts: `linear_and_scale` or `scale_rows` scale each column of x and sum the squares
of x, and `fused_linear` divides the products by the root mean square. On other devices the ops run
as plain torch. Tests compare the kernels with this.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.activation import ACTIVATIONS, activate
from ostinato.ops.norm import plain_rms_norm
from ostinato.ops.register import register_op

__all__ = (
    "FUSED_DTYPES",
    "TILE_ROWS",
    "fused_linear",
    "linear_and_scale",
    "most_rows",
    "norm_linear",
    "plain_scaled_rows",
    "scale_rows",
    "scale_rows_and_clear",
    "warm_up_tokens",
)

TILE_ROWS = (16, 64)
"""The most rows of each tile of the kernel. Tensor cores take 16 rows at least.

On an H200, 64 rows of bfloat16 take about as long as with cuBLAS: 0.96 to 1.09 of its time for the
matrices of Llama-8B, 0.9 to 1.2 for those of Qwen3-0.6B. The fused kernels save launches. With 128
rows, cuBLAS is faster by a factor of 1.5 and more (benchmarks/results/nvidia-h200).
"""

FUSED_DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes of activations that the kernel takes. In float16, x * norm_weight could overflow."""


def most_rows(dtype: torch.dtype) -> int:
    """The most tokens of a step that runs the fused kernels; 0 = the dtype has none."""
    return TILE_ROWS[-1] if dtype in FUSED_DTYPES else 0


def warm_up_tokens(dtype: torch.dtype) -> tuple[int, ...]:
    """Sizes of warm-up steps in tokens. Together they run each GPU program and tile once.

    The largest step is first, because GPU kernels are tuned for the first shape. It is too large
    for the fused kernels, so it runs the program for larger steps.
    """
    tiles = TILE_ROWS if dtype in FUSED_DTYPES else ()
    return (2 * max(64, most_rows(dtype)), *reversed(tiles[1:]), 1)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """`activation(x @ W.T / rms + bias) + residual`, each part only if its argument is given.

    Args:
        x: [T, K] in bfloat16 or float32, last dimension contiguous.
        weight: [N, K] in x's dtype, contiguous; with an activation [2 N, K], gate and up.
        bias: [N] (or [2 N]) in x's dtype.
        squares: [T, S] float32. The sum of a row, divided by K, is the mean square of the values
            from which x was scaled; None = nothing is divided.
        eps: the root adds it to the mean square.
        activation: a key of `ACTIVATIONS`, for the gated linear unit `activation(gate) * up`;
            empty = none.
        residual: [T, N] in x's dtype, last dimension contiguous.

    Returns:
        [T, N] contiguous, in x's dtype. On CUDA it is rounded once; plain torch rounds after each
        part.
    """
    kind = ACTIVATIONS[activation] if activation else ""
    return _linear_op(x, weight, bias, squares, eps, kind, residual)


def linear_and_scale(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`y = x @ W.T + bias + residual`, and what the product after a norm of y needs.

    Args:
        x: as for `fused_linear`.
        weight: as for `fused_linear`, without an activation.
        bias: as for `fused_linear`.
        residual: as for `fused_linear`.
        norm_weight: [N] in x's dtype or float32, the scale of an RMS norm of y.

    Returns:
        y [T, N]; y * norm_weight [T, N] in x's dtype; and [T, S] float32, whose sum over S is the
        sum of the squares of y.
    """
    return _scaled_op(x, weight, bias, residual, norm_weight)


def scale_rows(x: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the product after a norm of x needs.

    Args:
        x: [T, K] in bfloat16 or float32, last dimension contiguous.
        norm_weight: [K] in x's dtype or float32, the scale of the RMS norm.

    Returns:
        x * norm_weight [T, K] in x's dtype; and [T, S] float32, whose sum over S is the sum of the
        squares of x.
    """
    return _rows_op(x, norm_weight, 0)[:2]


def scale_rows_and_clear(
    x: Tensor, norm_weight: Tensor, num_counters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`scale_rows`, and int32 zeros for later kernels, from the same launch.

    Args:
        x: as for `scale_rows`.
        norm_weight: as for `scale_rows`.
        num_counters: a power of two.

    Returns:
        The two results of `scale_rows`, and [num_counters] int32 zeros.
    """
    return _rows_op(x, norm_weight, num_counters)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    num_counters: int,
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x) @ W.T + bias` for any number of rows, and zeros for later kernels.

    On CUDA it has two launches. Up to `most_rows` rows run those of `scale_rows` and
    `fused_linear`, more rows a norm and cuBLAS.

    Args:
        x: [T, K] in bfloat16 or float32, last dimension contiguous.
        norm_weight: [K] in x's dtype or float32, the scale of the RMS norm.
        eps: the norm adds it to the mean square.
        weight: [N, K] in x's dtype, contiguous.
        bias: [N] in x's dtype, or None.
        num_counters: a power of two.

    Returns:
        [T, N] contiguous, in x's dtype; and [num_counters] int32 zeros.
    """
    return _norm_op(x, norm_weight, eps, weight, bias, num_counters)


def _plain_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    if squares is not None:
        factor = torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + eps)
        result = (F.linear(x, weight).float() * factor).to(x.dtype)
        result = result if bias is None else result + bias
    else:
        result = F.linear(x, weight, bias)
    if activation:
        name = next(name for name, kind in ACTIVATIONS.items() if kind == activation)
        result = activate(result, name, gated=True)
    return result if residual is None else result + residual


def _plain_scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    result = F.linear(x, weight, bias) + residual
    return (result, *plain_scaled_rows(result, norm_weight))


def plain_scaled_rows(x: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    """`scale_rows` in plain torch."""
    wide = x.float()
    return (wide * norm_weight).to(x.dtype), wide.square().sum(1, keepdim=True)


def _plain_rows(x: Tensor, norm_weight: Tensor, num_counters: int) -> tuple[Tensor, Tensor, Tensor]:
    counters = torch.zeros(num_counters, dtype=torch.int32, device=x.device)
    return (*plain_scaled_rows(x, norm_weight), counters)


def _plain_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    num_counters: int,
) -> tuple[Tensor, Tensor]:
    counters = torch.zeros(num_counters, dtype=torch.int32, device=x.device)
    return F.linear(plain_rms_norm(x, norm_weight, eps), weight, bias), counters


def _kernels() -> Any:
    return import_module("ostinato.ops.fused.triton_fused_linear")


def _linear_on_cuda(*arguments: Any) -> Tensor:
    return _kernels().launch(*arguments)


def _scaled_on_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _kernels().launch_linear_and_scale(*arguments)


def _rows_on_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _kernels().launch_scale_rows(*arguments)


def _norm_on_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _kernels().launch_norm_linear(*arguments)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // (2 if activation else 1)))


def _scaled_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    result = x.new_empty((x.shape[0], weight.shape[0]))
    return result, torch.empty_like(result), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _rows_fake(x: Tensor, norm_weight: Tensor, num_counters: int) -> tuple[Tensor, Tensor, Tensor]:
    squares = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    return x.new_empty(x.shape), squares, x.new_empty(num_counters, dtype=torch.int32)


def _norm_fake(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    num_counters: int,
) -> tuple[Tensor, Tensor]:
    result = x.new_empty((x.shape[0], weight.shape[0]))
    return result, x.new_empty(num_counters, dtype=torch.int32)


_linear_op = register_op(
    "fused_linear",
    {"CompositeExplicitAutograd": _plain_linear, "CUDA": _linear_on_cuda},
    fake=_linear_fake,
)
_scaled_op = register_op(
    "linear_and_scale",
    {"CompositeExplicitAutograd": _plain_scaled, "CUDA": _scaled_on_cuda},
    fake=_scaled_fake,
)
_rows_op = register_op(
    "scale_rows",
    {"CompositeExplicitAutograd": _plain_rows, "CUDA": _rows_on_cuda},
    fake=_rows_fake,
)
_norm_op = register_op(
    "norm_linear",
    {"CompositeExplicitAutograd": _plain_norm_linear, "CUDA": _norm_on_cuda},
    fake=_norm_fake,
)
