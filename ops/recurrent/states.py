"""What the recurrent ops share: the slots in which sequences keep their states, and convolution.

A recurrent layer keeps two tensors for a sequence: the last inputs of its convolution, and a state
that all earlier tokens were folded into. Each is one row of a tensor with a row for every slot. A
step reads the states of a sequence from one slot and writes them to another one or to the same one.
So a sequence can continue from a slot that other sequences read too, and nothing is copied.

The states of a sequence do not depend on the steps that its tokens are divided into: every kernel
takes the tokens one after the other. So chunks of a prompt, a prefix that is found in the cache and
decodes give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = (
    "StateRows",
    "convolve",
    "silu",
    "state_rows",
)


class StateRows(NamedTuple):
    """The tokens of one sequence in a step, and its slots: the four columns of `state_slots`."""

    begin: int  # the first row of the step
    end: int
    read: int  # the slot that is read; 0 = the sequence begins, its states are zero
    write: int  # the slot that the states after the last token are written to
    checkpoint: int  # a slot for the states after some of the step's tokens; 0 = none
    checkpoint_tokens: int  # after how many of them; at least 1, less than all

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(first row, row after the last, slot that is written after them), in their order."""
        begin = self.begin
        if self.checkpoint:
            middle = begin + self.checkpoint_tokens
            yield begin, middle, self.checkpoint
            begin = middle
        yield begin, self.end, self.write


def state_rows(query_start_loc: Tensor, state_slots: Tensor) -> list[StateRows]:
    """The sequences of a step that have tokens."""
    starts, slots = query_start_loc.tolist(), state_slots.tolist()
    return [
        StateRows(begin, end, *row)
        for begin, end, row in zip(starts, starts[1:], slots, strict=False)
        if end > begin
    ]


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, earlier: Tensor
) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel by itself.

    Args:
        x: [N, C] float32, the inputs of N tokens.
        weight: [C, W]; the last column is the newest token's.
        bias: [C] or None.
        earlier: [W - 1, C] float32, the inputs before.

    Returns:
        [N, C] float32, and the last W - 1 inputs.
    """
    inputs = torch.cat((earlier, x))
    columns = inputs.unfold(0, weight.shape[1], 1)  # [N, C, W]
    out = (columns * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return out, inputs[len(x) :]


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in float32."""
    return F.silu(x.float())
