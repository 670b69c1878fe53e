"""Linear layers over packed weights: `ostinato::pack_linear`, `packed_linear`, `packed_rows`.

`packed_gated_linear` is the first half of a gated MLP: a linear layer with its activation.

Reading the weights takes most of a decode step. So they are laid out once, at load time, in the
order in which the kernel reads them. The packed tensor replaces the original. It is contiguous,
[ceil(N / 32), ceil(K / e), 32, e], with e = 2 for bfloat16 and 1 for float32. Entry [p, s, r] has
the elements s * e to s * e + e - 1 of row 32 * p + r of the [N, K] matrix. The 32 rows of one p are
a panel. Padding past N and K is zero.

In the kernels, an output element is a float32 sum, whose order depends only on K and on the
instruction set. So the bits of a row depend neither on other rows nor on the number of threads.

The kernels are ops/native/linear/linear.cpp and pack.cpp. Until they are loaded, and on other
devices, the same ops run as plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear
from torch.nn.functional import pad

from ostinato.ops.activation import ACTIVATIONS, plain_activation
from ostinato.ops.native.library import load_core
from ostinato.ops.register import register_op

__all__ = (
    "PANEL",
    "empty_packed",
    "pack_linear_rows",
    "pack_linear_weight",
    "packed_gated_linear",
    "packed_linear",
    "packed_linear_reference",
    "packed_rows",
    "unpack_linear_weight",
    "why_unpackable",
    "zero_padding",
)

PANEL = 32  # rows of the matrix that are stored together
_ELEMENTS_PER_STEP = {torch.bfloat16: 2, torch.float32: 1}


def why_unpackable(weight: Tensor) -> str | None:
    """Why `weight` cannot be packed (its layer then keeps `F.linear`), or None when it can."""
    if weight.device.type != "cpu":
        return f"packed weights are read by CPU kernels, but the weight is on {weight.device}"
    if weight.dtype not in _ELEMENTS_PER_STEP:
        return (
            f"the CPU's matrix kernels take float32 and bfloat16, but the weight is {weight.dtype}"
        )
    if weight.dim() != 2:
        return f"a linear weight has 2 dimensions, but this one has {weight.dim()}"
    if weight.numel() == 0:
        return f"the weight is empty: {tuple(weight.shape)}"
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        return f"rows must be contiguous, but the strides are {weight.stride()}"
    return None


def pack_linear_weight(weight: Tensor) -> Tensor:
    """A packed copy of a linear weight [N, K]; the caller drops the original.

    Builds and loads the native library on first use.

    Raises:
        ValueError: `why_unpackable(weight)`.
        NativeBuildError: the kernels cannot be built here.
    """
    reason = why_unpackable(weight)
    if reason is not None:
        raise ValueError(f"this weight cannot be packed: {reason}")
    packed = empty_packed(weight.detach())
    pack_linear_rows(packed, weight, 0)
    zero_padding(packed, len(weight))
    return packed


def empty_packed(weight: Tensor) -> Tensor:
    """Uninitialised memory in the shape of `pack_linear_weight(weight)`."""
    return weight.new_empty(_packed_shape(weight))


def pack_linear_rows(packed: Tensor, weight: Tensor, first_row: int) -> None:
    """Pack some rows of a matrix, without a copy of the whole matrix.

    Builds and loads the native library on first use.

    Args:
        packed: the packed matrix. Its other rows and its padding rows are left as they are.
        weight: the rows [n, K] of the matrix.
        first_row: the first of them in the matrix.

    Raises:
        ValueError: `why_unpackable(weight)`; or `packed` has another shape or dtype.
        NativeBuildError: the kernels cannot be built here.
    """
    reason = why_unpackable(weight)
    if reason is not None:
        raise ValueError(f"this weight cannot be packed: {reason}")
    load_core(f"core-{str(weight.dtype).removeprefix('torch.')}")
    _pack_linear(packed, weight.detach(), first_row)


def zero_padding(packed: Tensor, out_features: int) -> None:
    """Write zeros to the padding rows of a packed matrix [out_features, K]."""
    if used := out_features % PANEL:
        packed[-1, :, used:] = 0


def unpack_linear_weight(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The matrix [out_features, in_features] that was packed, bit for bit."""
    rows = packed.transpose(1, 2).reshape(packed.shape[0] * PANEL, -1)
    return rows[:out_features, :in_features].contiguous()


def packed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    *,
    residual: Tensor | None = None,
    float32_output: bool = False,
) -> Tensor:
    """x @ W.T + bias + residual with a packed W.

    Args:
        x: [T, K] in the weight's dtype, last dimension contiguous, any row stride.
        weight: what `pack_linear_weight` made of W [out_features, K].
        bias: [out_features] in x's dtype, added in float32 before rounding, or None.
        out_features: N; the packed weight is padded beyond it.
        residual: [T, out_features] in x's dtype, last dimension contiguous, added in float32 before
            rounding, or None.
        float32_output: return the float32 sums themselves, for logits and partial sums. `residual`
            must be None.

    Returns:
        [T, out_features] contiguous, in x's dtype or float32.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    return _packed_linear(x, weight, bias, out_features, float32_output, residual)


def packed_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, activation: str
) -> Tensor:
    """`activate(packed_linear(x, ...), activation, gated=True)`, with the same bits.

    With 16 rows and more, gates and factors are not written to memory.

    Args:
        x, weight, bias: as for `packed_linear`.
        out_features: N, the rows of the gates and as many of the factors; a multiple of 64.
        activation: a key of `ACTIVATIONS`.

    Returns:
        [T, N / 2] contiguous, in x's dtype.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    return _packed_gated_linear(x, weight, bias, out_features, ACTIVATIONS[activation])


def packed_rows(weight: Tensor, ids: Tensor, out_features: int, in_features: int) -> Tensor:
    """Rows of the matrix that was packed, for an embedding that shares the output layer's weight.

    Args:
        weight: what `pack_linear_weight` made of W [out_features, in_features].
        ids: [T] int64 or int32, 0 <= id < out_features.

    Returns:
        [T, in_features] contiguous, in the weight's dtype.

    Raises:
        ValueError: an id is out of range.
    """
    return _packed_rows(weight, ids, out_features, in_features)


def _packed_shape(weight: Tensor) -> tuple[int, int, int, int]:
    """The shape of a packed matrix [N, K]."""
    elements = _ELEMENTS_PER_STEP[weight.dtype]
    rows, columns = weight.shape
    return -(-rows // PANEL), -(-columns // elements), PANEL, elements


def _pack_reference(packed: Tensor, weight: Tensor, first_row: int) -> None:
    _, steps, _, elements = packed.shape
    padded = pad(weight, (0, -weight.shape[1] % elements))
    rows = torch.arange(first_row, first_row + len(weight))
    packed[rows // PANEL, :, rows % PANEL] = padded.view(len(weight), steps, elements)


def _pack_fake(packed: Tensor, weight: Tensor, first_row: int) -> None:
    return None


def packed_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None = None,
) -> Tensor:
    """`packed_linear` in plain torch: unpack, multiply in float32, round once."""
    matrix = unpack_linear_weight(weight, out_features, x.shape[1]).float()
    result = dense_linear(x.float(), matrix, None if bias is None else bias.float())
    if residual is not None:
        result = result + residual.float()
    return result if float32_output else result.to(x.dtype)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None = None,
) -> Tensor:
    dtype = torch.float32 if float32_output else x.dtype
    return x.new_empty((x.shape[0], out_features), dtype=dtype)


def _gated_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, kind: str
) -> Tensor:
    return plain_activation(
        packed_linear_reference(x, weight, bias, out_features, False), kind, True
    )


def _gated_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, kind: str
) -> Tensor:
    return x.new_empty((x.shape[0], out_features // 2))


def _rows_reference(weight: Tensor, ids: Tensor, out_features: int, in_features: int) -> Tensor:
    if bool(((ids < 0) | (ids >= out_features)).any()):
        raise ValueError(f"ids must be rows of the weight, 0 to {out_features - 1}, got {ids}")
    rows = weight[ids // PANEL, :, ids % PANEL]
    return rows.reshape(ids.shape[0], -1)[:, :in_features].contiguous()


def _rows_fake(weight: Tensor, ids: Tensor, out_features: int, in_features: int) -> Tensor:
    return weight.new_empty((ids.shape[0], in_features))


_pack_linear = register_op(
    "pack_linear",
    {"CompositeExplicitAutograd": _pack_reference},
    fake=_pack_fake,
    mutates=("packed",),
)
_packed_linear = register_op(
    "packed_linear", {"CompositeExplicitAutograd": packed_linear_reference}, fake=_linear_fake
)
_packed_gated_linear = register_op(
    "packed_gated_linear", {"CompositeExplicitAutograd": _gated_reference}, fake=_gated_fake
)
_packed_rows = register_op(
    "packed_rows", {"CompositeExplicitAutograd": _rows_reference}, fake=_rows_fake
)
