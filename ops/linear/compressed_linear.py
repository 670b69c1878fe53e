"""Linear layers over compressed weights: bfloat16 in 12 bits, without loss.

A bfloat16 has a sign, 8 bits of exponent and 7 of mantissa. The exponents of a trained matrix have
few different values ("70% Size, 100% Accuracy", Zhang et al., 2025, arXiv:2504.11651). So each
value is stored as 8 bits of sign and mantissa, and a code of 4 bits for one of 15 successive
exponents or for zero. Other values are exceptions, which are stored as they are. A decode step
reads a quarter less memory.

The layout is described in ops/native/linear/compressed.h. Panels are those of packed_linear.py. The
kernels widen the weights in registers or in the first level cache, and sum in the order of the ops
for packed weights. So the results have the same bits.

    weight      [panels, bytes of a panel] uint8
    exceptions  [bytes] uint8, values of other exponents; panels that have many, as a whole

The kernels are ops/native/linear/compressed_linear.cpp and compress.cpp. Until they are loaded, and
on other devices, the same ops run as plain torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ostinato.ops.activation import ACTIVATIONS, plain_activation
from ostinato.ops.linear.packed_linear import (
    PANEL,
    empty_packed,
    pack_linear_rows,
    packed_linear_reference,
    packed_rows,
    unpack_linear_weight,
    why_unpackable,
    zero_padding,
)
from ostinato.ops.native.library import load_core
from ostinato.ops.register import register_op

__all__ = (
    "compress_linear_reference",
    "compress_linear_rows",
    "compress_linear_weight",
    "compressed_gated_linear",
    "compressed_linear",
    "compressed_linear_reference",
    "compressed_rows",
    "compressed_shape",
    "decompress_linear_weight",
    "join_exceptions",
    "join_experts",
    "why_incompressible",
)

_CHUNK_VALUES = 32  # of K in a chunk
_LINE = 64  # values of a step, and bytes of a line
_HEADER_BYTES = 64
_CODES = 16
_OFFSET = slice(16, 24)  # places of the header's fields
_COUNT = slice(24, 28)
_WHOLE = 0xFFFFFFFF  # in `count`: the panel is stored as a whole


def why_incompressible(weight: Tensor) -> str | None:
    """Why `weight` cannot be compressed, or None when it can."""
    if weight.dtype != torch.bfloat16:
        return f"only bfloat16 weights are compressed, but the weight is {weight.dtype}"
    return why_unpackable(weight)


def compressed_shape(out_features: int, in_features: int) -> tuple[int, int]:
    """The shape of a compressed matrix [out_features, in_features]."""
    chunks = -(-in_features // _CHUNK_VALUES)
    return -(-out_features // PANEL), _HEADER_BYTES + chunks * _CHUNK_VALUES * PANEL * 3 // 2


def compress_linear_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The compressed form of a linear weight [N, K]: its bytes and exceptions.

    Builds and loads the native library on first use.

    Raises:
        ValueError: `why_incompressible(weight)`.
        NativeBuildError: the kernels cannot be built here.
    """
    compressed = weight.new_empty(compressed_shape(*weight.shape), dtype=torch.uint8)
    return compressed, compress_linear_rows(compressed, weight, 0)


def compress_linear_rows(compressed: Tensor, weight: Tensor, first_row: int) -> Tensor:
    """Compress some rows of a matrix.

    Builds and loads the native library on first use.

    Args:
        compressed: the matrix, of which the panels of these rows are written.
        weight: the rows [n, K]. If n is not a multiple of 32, they are the last of the matrix.
        first_row: the first of them in the matrix, a multiple of 32.

    Returns:
        Their exceptions. Those of all rows of the matrix must be joined (`join_exceptions`).

    Raises:
        ValueError: `why_incompressible(weight)`; the rows do not fit into `compressed`.
        NativeBuildError: the kernels cannot be built here.
    """
    if (reason := why_incompressible(weight)) is not None:
        raise ValueError(f"this weight cannot be compressed: {reason}")
    load_core("core-bfloat16-compressed")
    return _compress_linear(compressed, weight.detach(), first_row)


def join_exceptions(compressed: Tensor, parts: dict[int, Tensor]) -> Tensor:
    """The exceptions of a matrix. Changes the headers in `compressed` accordingly.

    Args:
        compressed: the compressed matrix.
        parts: the results of `compress_linear_rows` by `first_row`, which are all rows.
    """
    first_rows = sorted(parts)
    panels = compressed.tensor_split([row // PANEL for row in first_rows[1:]])
    return join_experts(panels, [parts[row] for row in first_rows])


def join_experts(compressed: Iterable[Tensor], parts: list[Tensor]) -> Tensor:
    """The exceptions of several matrices. Changes the headers in `compressed` accordingly.

    Args:
        compressed: the compressed matrices, such as [experts, ...].
        parts: the exceptions of each.
    """
    before = 0
    for panels, exceptions in zip(compressed, parts, strict=True):
        panels[:, :_HEADER_BYTES].view(torch.int64)[:, _OFFSET.start // 8] += before
        before += len(exceptions)
    return torch.cat(parts)


def decompress_linear_weight(
    weight: Tensor, exceptions: Tensor, out_features: int, in_features: int
) -> Tensor:
    """The matrix [out_features, in_features] that was compressed, bit for bit."""
    packed = _widened(weight, exceptions)
    return unpack_linear_weight(packed, out_features, in_features)


def compressed_linear(
    x: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    *,
    residual: Tensor | None = None,
    float32_output: bool = False,
) -> Tensor:
    """`packed_linear` with a compressed weight, with the same bits.

    Args:
        x: [T, K] bfloat16, last dimension contiguous, any row stride.
        weight, exceptions: what `compress_linear_weight` made of W [out_features, K].
        bias, out_features, residual, float32_output: as for `packed_linear`.

    Returns:
        [T, out_features] contiguous, bfloat16 or float32.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    return _compressed_linear(x, weight, exceptions, bias, out_features, float32_output, residual)


def compressed_gated_linear(
    x: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    activation: str,
) -> Tensor:
    """`packed_gated_linear` with a compressed weight, with the same bits.

    Args:
        x, weight, exceptions, bias: as for `compressed_linear`.
        out_features, activation: as for `packed_gated_linear`.

    Returns:
        [T, N / 2] contiguous bfloat16.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    kind = ACTIVATIONS[activation]
    return _compressed_gated_linear(x, weight, exceptions, bias, out_features, kind)


def compressed_rows(
    weight: Tensor, exceptions: Tensor, ids: Tensor, out_features: int, in_features: int
) -> Tensor:
    """`packed_rows` with a compressed weight.

    Raises:
        ValueError: an id is out of range.
    """
    return _compressed_rows(weight, exceptions, ids, out_features, in_features)


def _in_line(values: Tensor) -> Tensor:
    """Values [..., 64] of a step in the order of their bytes in a line."""
    return values.unflatten(-1, (2, 4, 8)).transpose(-3, -2).flatten(-3)


def _out_of_line(places: Tensor) -> Tensor:
    """The inverse of `_in_line`."""
    return places.unflatten(-1, (4, 2, 8)).transpose(-3, -2).flatten(-3)


def compress_linear_reference(compressed: Tensor, weight: Tensor, first_row: int) -> Tensor:
    """`compress_linear_rows` in plain torch. It chooses exponents in another way."""
    packed = empty_packed(weight)
    pack_linear_rows(packed, weight, 0)
    zero_padding(packed, len(weight))
    aside: list[Tensor] = []
    for index, panel in enumerate(packed.view(torch.int16).to(torch.int32) & 0xFFFF):
        panel_bytes, exceptions = _compressed_panel(panel.flatten(1), sum(map(len, aside)))
        compressed[first_row // PANEL + index] = panel_bytes
        aside.append(exceptions)
    joined = torch.cat(aside)
    return joined if len(joined) else torch.zeros(64, dtype=torch.uint8)


def _compressed_panel(values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """The bytes of a panel, values [steps, 64] as int32, and its exceptions."""
    steps_in_chunk = _CHUNK_VALUES // 2
    values = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % steps_in_chunk))
    exponents = values >> 7 & 0xFF
    highest = max(int(exponents.max()), _CODES - 1)
    table = torch.tensor([0, *range(highest - _CODES + 2, highest + 1)], dtype=torch.uint8)
    is_coded = (exponents == 0) | (exponents >= highest - _CODES + 2)
    codes = torch.where(is_coded & (exponents > 0), exponents - (highest - _CODES + 1), 0)
    header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
    header[:_CODES] = table
    header[_OFFSET] = torch.tensor([offset]).view(torch.uint8)
    places = (~is_coded).flatten().nonzero()[:, 0]
    bits = values.flatten()[places]
    header[_COUNT] = torch.tensor([len(places)], dtype=torch.int32).view(torch.uint8)
    exceptions = torch.stack((places.to(torch.int32), bits), 1).flatten().view(torch.uint8)
    sign_and_mantissa = _in_line((values >> 8 & 0x80) | (values & 0x7F)).unflatten(0, (-1, 2))
    pairs = _in_line(codes).unflatten(0, (-1, 2))
    lines = torch.cat(((pairs[:, 0] | pairs[:, 1] << 4)[:, None], sign_and_mantissa), 1)
    padded = torch.nn.functional.pad(exceptions, (0, -len(exceptions) % 64))
    return torch.cat((header, lines.to(torch.uint8).flatten())), padded


def _widened(weight: Tensor, exceptions: Tensor) -> Tensor:
    """The packed form [panels, steps, 32, 2] of a compressed weight, with whole chunks."""
    headers, lines = weight[:, :_HEADER_BYTES], weight[:, _HEADER_BYTES:]
    lines = lines.unflatten(1, (-1, 3, _LINE)).to(torch.int32)  # [panels, pairs of steps, 3, 64]
    codes, sign_and_mantissa = lines[:, :, 0], lines[:, :, 1:]
    codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
    exponents = headers[:, :_CODES].to(torch.int32).gather(1, codes.long())
    exponents = exponents.view(sign_and_mantissa.shape)
    bits = (sign_and_mantissa & 0x80) << 8 | exponents << 7 | (sign_and_mantissa & 0x7F)
    values = _out_of_line(bits).flatten(1).to(torch.int16)
    for panel, header in zip(values, headers, strict=True):
        begin = int(header[_OFFSET].view(torch.int64))
        count = int(header[_COUNT].view(torch.int32)) & _WHOLE
        if count == _WHOLE:
            panel.copy_(exceptions[begin : begin + 2 * len(panel)].view(torch.int16))
        else:
            entries = exceptions[begin : begin + 8 * count].view(torch.int16).view(-1, 4)
            places = entries[:, :2].contiguous().view(torch.int32).flatten().long()
            panel[places] = entries[:, 2]
    return values.view(torch.bfloat16).unflatten(1, (-1, PANEL, 2))


def _compress_fake(compressed: Tensor, weight: Tensor, first_row: int) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return weight.new_empty((size,), dtype=torch.uint8)


def compressed_linear_reference(
    x: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None = None,
) -> Tensor:
    """`compressed_linear` in plain torch."""
    packed = _widened(weight, exceptions)
    return packed_linear_reference(x, packed, bias, out_features, float32_output, residual)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    float32_output: bool,
    residual: Tensor | None = None,
) -> Tensor:
    dtype = torch.float32 if float32_output else x.dtype
    return x.new_empty((x.shape[0], out_features), dtype=dtype)


def _gated_reference(
    x: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    kind: str,
) -> Tensor:
    both = compressed_linear_reference(x, weight, exceptions, bias, out_features, False)
    return plain_activation(both, kind, True)


def _gated_fake(
    x: Tensor,
    weight: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    out_features: int,
    kind: str,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features // 2))


def _rows_reference(
    weight: Tensor, exceptions: Tensor, ids: Tensor, out_features: int, in_features: int
) -> Tensor:
    return packed_rows(_widened(weight, exceptions), ids, out_features, in_features)


def _rows_fake(
    weight: Tensor, exceptions: Tensor, ids: Tensor, out_features: int, in_features: int
) -> Tensor:
    return weight.new_empty((ids.shape[0], in_features), dtype=torch.bfloat16)


_compress_linear = register_op(
    "compress_linear",
    {"CompositeExplicitAutograd": compress_linear_reference},
    fake=_compress_fake,
    mutates=("compressed",),
)
_compressed_linear = register_op(
    "compressed_linear",
    {"CompositeExplicitAutograd": compressed_linear_reference},
    fake=_linear_fake,
)
_compressed_gated_linear = register_op(
    "compressed_gated_linear", {"CompositeExplicitAutograd": _gated_reference}, fake=_gated_fake
)
_compressed_rows = register_op(
    "compressed_rows", {"CompositeExplicitAutograd": _rows_reference}, fake=_rows_fake
)
