"""Reads quantised weights in Triton kernels: integers or small floats to exact floats.

The bytes are those of the CPU kernels (ops/native/quantized/layout.h): panels of 32 rows of the
matrix. A panel holds one group of columns after the other. A group holds its factors (32 scales,
then 32 zero points or minimums) and then its values. Values are stored in units of UNIT columns:

    4 bits   a 32-bit word is 8 columns of a row; the low halves of its bytes are the first 4
    8 bits   a 32-bit word is 4 columns of a row

32 words side by side are one unit of 32 rows, so that neighbouring threads read neighbouring words.
A value, before it is multiplied by its scale, is a whole number from -255 to 255 or a float of 8
bits. So it is exact in float16, bfloat16 and float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = (
    "factors_of",
    "one_value",
    "unit_base",
    "unit_values",
    "unit_words",
)

_PANEL = tl.constexpr(32)
_MAGIC = tl.constexpr(0x4B000000)  # the bits of 2**23, a float32 whose lowest bit stands for 1
_MAGIC_VALUE = tl.constexpr(8388608.0)


@triton.jit
def unit_base(
    column, unit, GROUP: tl.constexpr, HEADER: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
):  # fmt: skip
    """The byte offset, int64, of a unit's group, without the offset of the row in its panel.

    `column` (rows of the matrix) and `unit` have shapes that broadcast.
    """
    units = GROUP // UNIT
    group_bytes = HEADER + GROUP * 32 * BITS // 8
    panel = (column // _PANEL).to(tl.int64)
    return panel * PANEL_BYTES + (unit // units) * group_bytes


@triton.jit
def unit_words(
    words, base, column, unit, mask, GROUP: tl.constexpr, HEADER: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """The words of units. `base` is what `unit_base` returned."""
    within = unit % (GROUP // UNIT)
    place = (base + HEADER) // 4 + within * _PANEL + column % _PANEL
    return tl.load(words + place, mask=mask, other=0)


@triton.jit
def factors_of(
    factors, base, column, mask, KIND: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr
):  # fmt: skip
    """Scales, and the zero points or minimums, in float32.

    A zero point includes the format's offset. In a symmetric group it is that offset. Floats (e2m1,
    e4m3) have the zero point 0.
    """
    size: tl.constexpr = factors.dtype.element_ty.primitive_bitwidth // 8
    place = base // size + column % _PANEL
    scale = tl.load(factors + place, mask=mask, other=0.0).to(tl.float32)
    if KIND == "steps":
        offset: tl.constexpr = 8.0 if BITS == 4 else 128.0
    else:
        offset: tl.constexpr = 0.0
    if SYMMETRIC:
        zero = tl.zeros_like(scale) + offset
    else:
        zero = tl.load(factors + place + _PANEL, mask=mask, other=0.0).to(tl.float32) + offset
    return scale, zero


@triton.jit
def _float8_value(code):
    """The float32 value of e4m3 bits that are not a NaN.

    Moved to their places in a float16, the bits give a number that is 2**8 times smaller. GPUs
    before compute capability 8.9 have no conversion from e4m3.
    """
    bits = code.to(tl.uint16)
    bits = ((bits & 128) << 8) | ((bits & 127) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def one_value(word, shift, zero, KIND: tl.constexpr, BITS: tl.constexpr):
    """The value that begins at bit `shift` of a word, in float32.

    It is the integer minus the zero point. With minimums it is the integer, for e2m1 twice the
    float, and for e4m3 the float.
    """
    code = (word >> shift) & ((1 << BITS) - 1)
    if KIND == "e4m3":
        value = _float8_value(code)
    elif KIND == "e2m1":  # twice a float of 4 bits
        exponent = (code >> 1) & 3
        part = code & 1
        size = tl.where(exponent == 0, part, (2 + part) << tl.maximum(exponent - 1, 0))
        value = tl.where(code >= 8, -size, size).to(tl.float32)
    else:
        # 2**23 + code is exact, and so is the difference.
        wide = (code | _MAGIC).to(tl.float32, bitcast=True)
        value = wide - _MAGIC_VALUE if KIND == "minimums" else wide - (_MAGIC_VALUE + zero)
    return value


@triton.jit
def unit_values(
    words, base, column, unit, zero, mask, GROUP: tl.constexpr, HEADER: tl.constexpr,
    UNIT: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """All values of units, in float32.

    Args:
        words: int32 words.
        base: [N, U] or [N, 1], what `unit_base` returned.
        column: [N, 1] rows of the matrix.
        unit: [1, U]
        zero: [N, U] or [N, 1], as `factors_of` returned it.
        mask: [N, U] whether the unit is in the weight; values of other units are finite.

    Returns:
        [N, U, UNIT]
    """
    i = tl.arange(0, UNIT)[None, None, :]
    word = unit_words(words, base, column, unit, mask, GROUP, HEADER, UNIT)
    shift = (i % 4) * 8 + (i // 4) * 4
    return one_value(word[:, :, None], shift, zero[:, :, None], KIND, BITS)
