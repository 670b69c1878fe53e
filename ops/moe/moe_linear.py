"""Linear layers with one matrix for each expert, over plain, packed and quantised weights.

The ops are `ostinato::moe_linear`, `packed_moe_linear`, `compressed_moe_linear` and
`quantized_moe_linear`.

Each token is multiplied by the matrices of the k experts that `route` chose for it. An MLP of
experts is two such layers and an activation between them:

    gate and up   [T, K] -> [T * k, N]: one row for each token and slot
    down          [T * k, K] -> [T, N]: the slots of a token, weighted and added

A token's slots are added in their order, in float32. The CPU kernels sum each product in the order
of ops/linear/packed_linear.py or ops/quantized.py. So with them the bits of a token's result do not
depend on other tokens. In all kernels no tensor's size depends on data, and the host reads no
result.

The CPU kernels are ops/native/moe/moe_linear.cpp, over packed and compressed weights, and
quantized_moe_linear.cpp. Until they are loaded the same ops run as plain torch. On a GPU,
`moe_linear` runs the kernels of triton_moe_linear.py, and `quantized_moe_linear` those of
ops/gpu_quantized/.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from ostinato.ops.linear.compressed_linear import compressed_linear_reference
from ostinato.ops.linear.packed_linear import packed_linear_reference
from ostinato.ops.quantized_reference import QuantFormat, quantized_linear_reference
from ostinato.ops.register import register_op

__all__ = (
    "TILE_MEANS",
    "compressed_moe_linear",
    "moe_linear",
    "packed_moe_linear",
    "quantized_moe_linear",
    "tile_tokens",
)

TILE_MEANS = (16, 128)
"""Mean rows of an expert: up to the first number a GPU takes the smallest of its three tiles, and
up to the second number the middle one."""


def tile_tokens(num_experts: int, top_k: int) -> tuple[int, ...]:
    """For each tile of a GPU, the fewest tokens of a step that takes it."""
    return (1, *(mean * num_experts // top_k + 1 for mean in TILE_MEANS))


def moe_linear(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    routing_weights: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Each row times the matrices of its experts.

    Args:
        x: [T, K], the same for all slots of a token, or [T * k, K], one row for each slot.
        ids: [T, k] int32, the experts of each token. CUDA does not check them.
        weight: [experts, N, K] in x's dtype.
        bias: [experts, N] in x's dtype, added before anything is rounded, or None.
        routing_weights: [T, k] float32; None = the slots are not added.
        residual: [T, N] in x's dtype, added in float32 before rounding; needs routing weights.

    Returns:
        Without routing weights [T * k, N] in x's dtype; with them [T, N].

    Raises:
        ValueError: on CUDA, the rows of x or the weight are not contiguous. On other devices, an id
            is not an expert.
    """
    return _moe_linear(x, ids, weight, bias, routing_weights, residual)


def packed_moe_linear(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    *,
    routing_weights: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`moe_linear` over packed matrices, on a CPU.

    Args:
        x, ids, bias, routing_weights, residual: as for `moe_linear`; x is float32 or bfloat16.
        weight: [experts, ...], the result of `pack_linear_weight` for each matrix [N, K].
        out_features: N; the packed weight is padded beyond it.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or an id is not an expert.
    """
    return _packed_moe_linear(x, ids, weight, bias, out_features, routing_weights, residual)


def compressed_moe_linear(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    *,
    routing_weights: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`packed_moe_linear` over compressed matrices, with the same bits.

    Args:
        x, ids, bias, out_features, routing_weights, residual: as for `packed_moe_linear`; x is
            bfloat16.
        weight: [experts, ...], the matrices of `compress_linear_weight`.
        exceptions: those of all experts (`join_experts` of ops/linear/compressed_linear.py).

    Raises:
        ValueError: a shape, dtype or stride is not as above, or an id is not an expert.
    """
    return _compressed_moe_linear(
        x, ids, weight, exceptions, bias, out_features, routing_weights, residual
    )


def quantized_moe_linear(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    form: QuantFormat,
    *,
    routing_weights: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`moe_linear` over quantised matrices; on a CPU x is quantised too (ops/quantized.py).

    Args:
        x, ids, bias, routing_weights, residual: as for `moe_linear`; x is float32 or bfloat16, on
            CUDA also float16.
        weight: [experts, ...], the result of `quantize_linear_weight` for each matrix [N, K].
        out_features: N; the weight is padded beyond it.
        form: the format of the weight.

    Raises:
        ValueError: a shape, dtype or stride is not as above. On a CPU also: an id is not an expert.
    """
    return _quantized_moe_linear(
        x, ids, weight, bias, out_features, routing_weights, residual, *form
    )


def _sum_over_experts(
    x: Tensor,
    ids: Tensor,
    num_experts: int,
    multiply: Callable[[Tensor, int], Tensor],
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """The arithmetic of the ops in plain torch, expert by expert; the host reads the ids.

    Args:
        x, ids, routing_weights, residual: as for `moe_linear`.
        num_experts: the number of experts.
        multiply: (rows [n, K], expert) -> their products with its matrix, float32 [n, N].

    Raises:
        ValueError: an id is not an expert.
    """
    if bool(((ids < 0) | (ids >= num_experts)).any()):
        raise ValueError(f"ids must be experts, 0 to {num_experts - 1}, got {ids}")
    num_slots = ids.shape[1]
    flat = ids.reshape(-1)
    pairs = torch.arange(flat.numel(), device=x.device)
    rows = pairs // num_slots if x.shape[0] == ids.shape[0] else pairs
    products = [
        (chosen := (flat == expert).nonzero()[:, 0], multiply(x[rows[chosen]], expert))
        for expert in flat.unique().tolist()
    ]
    width = multiply(x[:0], 0).shape[1]
    sums = torch.zeros(flat.numel(), width, device=x.device)
    for chosen, product in products:
        sums[chosen] = product
    if routing_weights is None:
        return sums.to(x.dtype)
    result = torch.zeros(ids.shape[0], width, device=x.device)
    for slot, weights in enumerate(routing_weights.unbind(1)):
        result = result + weights[:, None] * sums[slot::num_slots]
    if residual is not None:
        result = result + residual.float()
    return result.to(x.dtype)


def _moe_linear_reference(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    def multiply(rows: Tensor, expert: int) -> Tensor:
        added = None if bias is None else bias[expert].float()
        return torch.nn.functional.linear(rows.float(), weight[expert].float(), added)

    return _sum_over_experts(x, ids, len(weight), multiply, routing_weights, residual)


def _moe_linear_on_cuda(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    kernels = import_module("ostinato.ops.moe.triton_moe_linear")
    return kernels.moe_linear_on_cuda(x, ids, weight, bias, routing_weights, residual)


def _packed_moe_linear_reference(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    def multiply(rows: Tensor, expert: int) -> Tensor:
        added = None if bias is None else bias[expert]
        return packed_linear_reference(rows, weight[expert], added, out_features, True)

    return _sum_over_experts(x, ids, len(weight), multiply, routing_weights, residual)


def _compressed_moe_linear_reference(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    def multiply(rows: Tensor, expert: int) -> Tensor:
        added = None if bias is None else bias[expert]
        matrix = weight[expert]
        return compressed_linear_reference(rows, matrix, exceptions, added, out_features, True)

    return _sum_over_experts(x, ids, len(weight), multiply, routing_weights, residual)


def _quantized_moe_linear_reference(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    routing_weights: Tensor | None,
    residual: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    form = QuantFormat(bits, group_size, symmetric, scales, kind)

    def multiply(rows: Tensor, expert: int) -> Tensor:
        added = None if bias is None else bias[expert]
        return quantized_linear_reference(
            rows, weight[expert], added, out_features, True, None, None, *form
        )

    return _sum_over_experts(x, ids, len(weight), multiply, routing_weights, residual)


def _quantized_moe_linear_on_cuda(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    routing_weights: Tensor | None,
    residual: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    kernels = import_module("ostinato.ops.gpu_quantized.triton_quantized_moe")
    form = QuantFormat(bits, group_size, symmetric, scales, kind)
    return kernels.quantized_moe_on_cuda(
        x, ids, weight, bias, out_features, routing_weights, residual, form
    )


def _packed_moe_linear_fake(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    tokens, slots = ids.shape
    return x.new_empty((tokens if routing_weights is not None else tokens * slots, out_features))


def _compressed_moe_linear_fake(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    return _packed_moe_linear_fake(x, ids, weight, bias, out_features, routing_weights, residual)


def _moe_linear_fake(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    return _packed_moe_linear_fake(x, ids, weight, bias, weight.shape[1], routing_weights, residual)


def _quantized_moe_linear_fake(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    routing_weights: Tensor | None,
    residual: Tensor | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    scales: str,
    kind: str,
) -> Tensor:
    return _packed_moe_linear_fake(x, ids, weight, bias, out_features, routing_weights, residual)


_moe_linear = register_op(
    "moe_linear",
    {"CompositeExplicitAutograd": _moe_linear_reference, "CUDA": _moe_linear_on_cuda},
    fake=_moe_linear_fake,
)
_packed_moe_linear = register_op(
    "packed_moe_linear",
    {"CompositeExplicitAutograd": _packed_moe_linear_reference},
    fake=_packed_moe_linear_fake,
)
_compressed_moe_linear = register_op(
    "compressed_moe_linear",
    {"CompositeExplicitAutograd": _compressed_moe_linear_reference},
    fake=_compressed_moe_linear_fake,
)
_quantized_moe_linear = register_op(
    "quantized_moe_linear",
    {
        "CompositeExplicitAutograd": _quantized_moe_linear_reference,
        "CUDA": _quantized_moe_linear_on_cuda,
    },
    fake=_quantized_moe_linear_fake,
)
