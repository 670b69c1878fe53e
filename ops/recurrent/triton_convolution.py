"""What the Triton kernels of recurrent layers share: tiles of rows, convolution, slots.

The convolution of a layer is computed for tiles of up to BLOCK_T rows of one sequence. Only the
first rows of a sequence read the inputs that its slot holds, and they all lie in its first tile. So
the program of this tile also writes the new inputs to the slots. No other program reads or writes
these channels of the sequence, and one launch is enough.

The number of programs depends on the step's shape alone: one for the first tile of each sequence,
and as many for further tiles as any lengths can need. Programs without a tile return.

S is the number of sequences, T the number of rows (padding included), C the number of channels.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = (
    "check_layout",
    "convolution_constants",
    "convolve_tile",
    "keep_inputs",
    "num_row_tiles",
    "sequence_part",
    "silu_of",
    "softplus_of",
    "step_slots",
    "tile_of_sequence",
)

_BLOCK_T = 16  # rows of a tile, unless a convolution is wider
_BLOCK_S = 256  # sequences whose tiles a program counts at once


@triton.jit
def silu_of(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus_of(x):
    """log(1 + exp(x)) with a small relative error, also where exp(x) is small.

    The rounding error of 1 + exp(x) is divided out (Higham, Accuracy and Stability of Numerical
    Algorithms, section 1.14.1).
    """
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + grown
    is_lost = total == 1.0
    exact = tl.log(total) * (grown / tl.where(is_lost, 1.0, total - 1.0))
    return tl.where(x > 20.0, x, tl.where(is_lost, grown, exact))


@triton.jit
def step_slots(state_slots, seq):
    """The columns of `state_slots` (ops/recurrent/states.py) for a sequence, as int64."""
    row = state_slots + seq * 4
    read, write = tl.load(row).to(tl.int64), tl.load(row + 1).to(tl.int64)
    checkpoint, num_tokens = tl.load(row + 2).to(tl.int64), tl.load(row + 3)
    return read, write, checkpoint, num_tokens


@triton.jit
def sequence_part(begin, end, write, checkpoint, checkpoint_tokens, is_last):
    """The rows before or after the checkpoint, and the slot that is written after them.

    Args:
        is_last: 0 = the rows before the checkpoint, 1 = those after it.

    Returns:
        (first row, row after the last, slot, whether the slot is written). Without a checkpoint
        the part before it has no rows.
    """
    has_checkpoint = checkpoint != 0
    middle = begin + tl.where(has_checkpoint, checkpoint_tokens, 0)
    is_after = is_last != 0
    first, stop = tl.where(is_after, middle, begin), tl.where(is_after, end, middle)
    return first, stop, tl.where(is_after, write, checkpoint), has_checkpoint | is_after


@triton.jit
def tile_of_sequence(
    query_start_loc, num_seqs, num_rows, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr
):
    """The tile of rows of this program, which is `tl.program_id(0)` of `num_row_tiles`.

    The rows of padding count as the rows of a sequence `num_seqs`.

    Returns:
        (sequence, its first row, the row after its last, the first row of the tile). Without a
        tile, the first row of the tile is the row after the last.
    """
    program = tl.program_id(0)
    seq = program
    tile = program * 0
    if program > num_seqs:  # a tile that is not the first of its sequence
        wanted = program - num_seqs - 1
        seq = num_seqs + 1
        passed = 0
        for first in range(0, num_seqs + 1, BLOCK_S):
            each = first + tl.arange(0, BLOCK_S)
            start = tl.load(query_start_loc + each, mask=each <= num_seqs, other=num_rows)
            stop = tl.load(query_start_loc + each + 1, mask=each < num_seqs, other=num_rows)
            tiles = tl.maximum(tl.cdiv(stop - start, BLOCK_T) - 1, 0)
            ends = passed + tl.cumsum(tiles, 0)
            is_own = (ends - tiles <= wanted) & (wanted < ends)
            seq += tl.sum(tl.where(is_own, each - num_seqs - 1, 0))
            tile += tl.sum(tl.where(is_own, wanted - (ends - tiles) + 1, 0))
            passed += tl.sum(tiles)
    begin = tl.load(query_start_loc + seq, mask=seq <= num_seqs, other=num_rows)
    end = tl.load(query_start_loc + seq + 1, mask=seq < num_seqs, other=num_rows)
    return seq, begin, end, tl.minimum(begin + tile * BLOCK_T, end)


@triton.jit
def _inputs(x, row, channel, is_inside, x_stride, FACTOR: tl.constexpr):
    """[rows, channels] in the dtype of x; see `convolve_tile`."""
    place = x + row[:, None].to(tl.int64) * x_stride + channel[None, :]
    value = tl.load(place, mask=is_inside, other=0.0)
    if FACTOR > 0:
        factor = tl.load(place + FACTOR, mask=is_inside, other=0.0)
        value = (value.to(tl.float32) * factor.to(tl.float32)).to(x.dtype.element_ty)
    return value


@triton.jit
def _recent_inputs(
    x, conv_state, read, begin, row, is_row, channel, is_channel, x_stride,
    C: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The inputs of rows of a sequence; rows before `begin` are those that the slot holds."""
    is_new = (is_row & (row >= begin))[:, None] & is_channel[None, :]
    new = _inputs(x, row, OFFSET + channel, is_new, x_stride, FACTOR)
    # A slot that is not read has no rows. The interpreter does not mix masks and scalars.
    is_old = (is_row & (row < tl.where(read != 0, begin, -WIDTH)))[:, None] & is_channel[None, :]
    held = (row - begin + (WIDTH - 1))[:, None]
    slot = conv_state + read * ((WIDTH - 1) * C)
    old = tl.load(slot + held * C + channel[None, :], mask=is_old, other=0.0)
    return tl.where(is_new, new, old)


@triton.jit
def convolve_tile(
    x,  # [T, at least OFFSET + C]
    conv_weight,  # [C, WIDTH]
    conv_bias,  # [C] or None
    conv_state,  # [slots, WIDTH - 1, C]
    read,  # int64
    begin,
    end,
    row,  # [BLOCK_T], rows of one tile
    channel,  # [BLOCK_C]
    is_channel,  # [BLOCK_C]
    x_stride,
    C: tl.constexpr,
    OFFSET: tl.constexpr,  # the column of x with the first channel
    FACTOR: tl.constexpr,  # inputs are multiplied by those that many columns further; 0 = not
    WIDTH: tl.constexpr,
):
    """[BLOCK_T, BLOCK_C] float32: the convolution of each channel, taps in ascending order."""
    total = tl.zeros([row.shape[0], channel.shape[0]], tl.float32)
    for tap in tl.static_range(WIDTH):
        value = _recent_inputs(
            x, conv_state, read, begin, row + (tap - WIDTH + 1), row < end, channel, is_channel,
            x_stride, C, OFFSET, FACTOR, WIDTH,
        )  # fmt: skip
        weight = tl.load(conv_weight + channel * WIDTH + tap, mask=is_channel, other=0.0)
        total += value.to(tl.float32) * weight.to(tl.float32)[None, :]
    if conv_bias is not None:
        bias = tl.load(conv_bias + channel, mask=is_channel, other=0.0)
        total += bias.to(tl.float32)[None, :]
    return total


@triton.jit
def keep_inputs(
    x, conv_state, state_slots, seq, begin, end, channel, is_channel, x_stride,
    C: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,  # power of two, at least WIDTH - 1
):  # fmt: skip
    """Write a sequence's last inputs to the slots that it writes.

    All threads have read the old inputs before any of them writes new ones.
    """
    read, write, checkpoint, num_tokens = step_slots(state_slots, seq)
    held = tl.arange(0, BLOCK_W)
    is_held = held < WIDTH - 1
    _, middle, _, has_checkpoint = sequence_part(begin, end, write, checkpoint, num_tokens, 0)
    last = _recent_inputs(
        x, conv_state, read, begin, end - (WIDTH - 1) + held, is_held, channel, is_channel,
        x_stride, C, OFFSET, FACTOR, WIDTH,
    )  # fmt: skip
    is_earlier = held < tl.where(has_checkpoint, WIDTH - 1, 0)
    earlier = _recent_inputs(
        x, conv_state, read, begin, middle - (WIDTH - 1) + held, is_earlier, channel, is_channel,
        x_stride, C, OFFSET, FACTOR, WIDTH,
    )  # fmt: skip
    tl.debug_barrier()
    place = conv_state + held[:, None] * C + channel[None, :]
    size: tl.constexpr = (WIDTH - 1) * C
    tl.store(place + write * size, last, mask=is_held[:, None] & is_channel[None, :])
    is_kept = is_earlier[:, None] & is_channel[None, :]
    tl.store(place + checkpoint * size, earlier, mask=is_kept)


def convolution_constants(width: int) -> dict[str, Any]:
    """The constants of a kernel that convolves."""
    return {
        "WIDTH": width,
        "BLOCK_W": triton.next_power_of_2(max(width - 1, 1)),
        "BLOCK_T": max(_BLOCK_T, triton.next_power_of_2(width)),
        "BLOCK_S": _BLOCK_S,
    }


def num_row_tiles(num_seqs: int, num_rows: int) -> int:
    """Programs that have enough tiles of at least BLOCK_T rows for any step of this shape."""
    return num_seqs + 1 + num_rows // _BLOCK_T


def check_layout(op: str, rows: dict[str, Tensor], whole: dict[str, Tensor | None]) -> None:
    """Check the strides of an op's arguments.

    Args:
        op: its name, for the error.
        rows: arguments that must have contiguous rows.
        whole: arguments that must be contiguous.

    Raises:
        ValueError: one is not.
    """
    for name, tensor in rows.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{op}: the rows of {name} must be contiguous, but its strides are "
                f"{tensor.stride()}"
            )
    for name, tensor in whole.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} must be contiguous, but its strides are {tensor.stride()}"
            )
