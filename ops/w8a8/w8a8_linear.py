"""Linear layers whose weights and activations both have 8 bits, for GPUs.

The ops are `ostinato::w8a8_linear` and `w8a8_moe_linear`. A weight is stored as float8_e4m3fn
or int8 [N, K] with float32 scales [groups, N]. Activations are rounded to the weight's type
(round_rows.py) and multiplied by the GPU's matrix units for 8 bits. On CUDA the kernels are those
of triton_w8a8_linear.py and triton_w8a8_moe.py. On other devices plain torch computes the
same formula.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ostinato.ops.register import register_op
from ostinato.ops.w8a8.round_rows import InputScales, round_rows

__all__ = ("w8a8_linear", "w8a8_moe_linear")


def w8a8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group_size: int,
    inputs: InputScales,
    *,
    input_scale: Tensor | None = None,
    residual: Tensor | None = None,
    powers: bool = False,
    float32_output: bool = False,
) -> Tensor:
    """x @ W.T + bias + residual, with x rounded to the 8-bit type of W.

    Args:
        x: [T, K] float32, bfloat16 or float16; last dimension contiguous, any row stride.
        weight: [N, K] float8_e4m3fn or int8, contiguous.
        scales: [groups, N] float32, contiguous: the scale of each group of each row of W.
        bias: [N] in x's dtype, added in float32 before rounding, or None.
        group_size: columns that share a scale; a power of two of at least 32, or K.
        inputs: which part of x has a scale of its own; see `InputScales`.
        input_scale: [n] float32; with `static` the largest of these is the scale of x.
        residual: [T, N] in x's dtype, last dimension contiguous, or None.
        powers: the scales of x are rounded up to powers of two.
        float32_output: return the float32 sums themselves, for logits and partial sums.

    Returns:
        [T, N] contiguous, in x's dtype or float32. A row with an infinity or a NaN is NaN.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    return _w8a8_linear(
        x,
        weight,
        scales,
        input_scale,
        bias,
        residual,
        float32_output,
        group_size,
        inputs.value,
        powers,
    )


def w8a8_moe_linear(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group_size: int,
    inputs: InputScales,
    *,
    input_scale: Tensor | None = None,
    routing_weights: Tensor | None = None,
    residual: Tensor | None = None,
    powers: bool = False,
) -> Tensor:
    """`moe_linear` (ops/moe/moe_linear.py) with 8-bit weights and activations.

    Args:
        x, ids, bias, routing_weights, residual: as for `moe_linear`; x is float32, bfloat16 or
            float16.
        weight: [experts, N, K] float8_e4m3fn or int8.
        scales: [experts, groups, N] float32.
        input_scale: [experts, n] float32; with `static` the largest of these is the scale of x.
        group_size, inputs, powers: as for `w8a8_linear`.

    Raises:
        ValueError: a shape, dtype or stride is not as above. On a CPU also: an id is not an expert.
    """
    return _w8a8_moe_linear(
        x,
        ids,
        weight,
        scales,
        input_scale,
        bias,
        routing_weights,
        residual,
        group_size,
        inputs.value,
        powers,
    )


def _products(
    rounded: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, group_size: int
) -> Tensor:
    """[T, N] float32, group by group."""
    result = torch.zeros(len(rounded), len(weight), device=rounded.device)
    for group, (part, matrix) in enumerate(
        zip(rounded.split(group_size, 1), weight.split(group_size, 1), strict=True)
    ):
        sums = (part.double() @ matrix.double().T).float()
        scale = x_scales[:, group % x_scales.shape[1]]
        result = result + sums * scales[group] * scale[:, None]
    return result


def _linear_reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    float32_output: bool,
    group_size: int,
    inputs: str,
    powers: bool,
) -> Tensor:
    kind = InputScales(inputs)
    rounded, x_scales = round_rows(x, weight.dtype, kind, group_size, input_scale, powers=powers)
    result = _products(rounded, x_scales, weight, scales, group_size)
    for added in (bias, residual):
        if added is not None:
            result = result + added.float()
    return result if float32_output else result.to(x.dtype)


def _moe_reference(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    inputs: str,
    powers: bool,
) -> Tensor:
    if bool(((ids < 0) | (ids >= len(weight))).any()):
        raise ValueError(f"ids must be experts, 0 to {len(weight) - 1}, got {ids}")
    kind, slots = InputScales(inputs), ids.shape[1]
    rounded, x_scales = round_rows(x, weight.dtype, kind, group_size, input_scale, powers=powers)
    flat = ids.reshape(-1)
    pairs = torch.arange(flat.numel(), device=x.device)
    rows = pairs // slots if len(x) == len(ids) else pairs
    sums = torch.zeros(flat.numel(), weight.shape[1], device=x.device)
    for expert in flat.unique().tolist():
        chosen = (flat == expert).nonzero()[:, 0]
        mine = rounded[rows[chosen]], x_scales[rows[chosen]]
        product = _products(*mine, weight[expert], scales[expert], group_size)
        sums[chosen] = product if bias is None else product + bias[expert].float()
    if routing_weights is None:
        return sums.to(x.dtype)
    result = (sums.view(len(ids), slots, -1) * routing_weights[:, :, None]).sum(1)
    return (result if residual is None else result + residual.float()).to(x.dtype)


def _linear_on_cuda(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    float32_output: bool,
    group_size: int,
    inputs: str,
    powers: bool,
) -> Tensor:
    kernels = import_module("ostinato.ops.w8a8.triton_w8a8_linear")
    return kernels.w8a8_linear_on_cuda(
        x,
        weight,
        scales,
        input_scale,
        bias,
        residual,
        float32_output,
        group_size,
        InputScales(inputs),
        powers,
    )


def _moe_on_cuda(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    inputs: str,
    powers: bool,
) -> Tensor:
    kernels = import_module("ostinato.ops.w8a8.triton_w8a8_moe")
    return kernels.w8a8_moe_on_cuda(
        x,
        ids,
        weight,
        scales,
        input_scale,
        bias,
        routing_weights,
        residual,
        group_size,
        InputScales(inputs),
        powers,
    )


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    float32_output: bool,
    group_size: int,
    inputs: str,
    powers: bool,
) -> Tensor:
    dtype = torch.float32 if float32_output else x.dtype
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _moe_fake(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    inputs: str,
    powers: bool,
) -> Tensor:
    rows = ids.shape[0] * (1 if routing_weights is not None else ids.shape[1])
    return x.new_empty((rows, weight.shape[1]))


_w8a8_linear = register_op(
    "w8a8_linear",
    {"CompositeExplicitAutograd": _linear_reference, "CUDA": _linear_on_cuda},
    fake=_linear_fake,
)
_w8a8_moe_linear = register_op(
    "w8a8_moe_linear",
    {"CompositeExplicitAutograd": _moe_reference, "CUDA": _moe_on_cuda},
    fake=_moe_fake,
)
