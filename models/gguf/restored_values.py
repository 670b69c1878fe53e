"""Undoes what llama.cpp's converter does to values: one function for each change.

All functions work on rows. A row is a row of values, or of the blocks, integers or scales of a
quantised matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = (
    "decay_logarithms",
    "heads_by_key",
    "parts_by_key",
    "rotary_halves",
    "without_one",
)


def rotary_halves(value: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head from llama.cpp's order to that of Hugging Face.

    llama.cpp puts the two rows of a rotary pair side by side, Hugging Face half a head apart.

    Raises:
        ValueError: there are no pairs of rows for each head.
    """
    _check_rows(value, 2 * num_heads, is_multiple=True)
    pairs = value.view(num_heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def without_one(value: Tensor) -> Tensor:
    """Subtract 1 from a norm: GGUF files store the scale, some checkpoints `scale - 1`.

    In float64 nothing is lost: adding 1 again gives the same float32.
    """
    return value.double() - 1.0


def decay_logarithms(value: Tensor) -> Tensor:
    """`A_log` from `-exp(A_log)`, in float64.

    Raises:
        ValueError: a value is above 0 or is not a number.
    """
    if not bool((value <= 0).all()):
        raise ValueError("decays must be at most 0")
    return torch.log(-value.double())


def heads_by_key(
    value: Tensor, k_heads: int, v_heads: int, head_rows: int, *, first: int = 0
) -> Tensor:
    """Order the heads of values by the heads of keys that they share, as Hugging Face does.

    llama.cpp stores the first head of values of each head of keys, then the second ones, and so on.

    Args:
        value: [first + v_heads * head_rows, ...].
        k_heads: heads of keys.
        v_heads: heads of values, a multiple of `k_heads`.
        head_rows: rows of a head of values.
        first: rows before those of values, which keep their order.

    Raises:
        ValueError: the number of rows is another one.
    """
    _check_rows(value, first + v_heads * head_rows)
    heads = value[first:].reshape(v_heads // k_heads, k_heads, head_rows, *value.shape[1:])
    ordered = heads.transpose(0, 1).reshape(-1, *value.shape[1:])
    return torch.cat((value[:first], ordered)) if first else ordered


def parts_by_key(value: Tensor, k_heads: int, sizes: Sequence[int]) -> list[Tensor]:
    """Take apart a matrix whose rows are stored by heads of keys, each with rows of all parts.

    Args:
        value: [k_heads * sum(sizes), ...].
        k_heads: heads of keys.
        sizes: the rows of each part that a head of keys has.

    Returns:
        Two tensors: all parts but the last, one after the other, and the last part.

    Raises:
        ValueError: the number of rows is another one.
    """
    _check_rows(value, k_heads * sum(sizes))
    by_head = value.reshape(k_heads, sum(sizes), *value.shape[1:])
    *others, last = (part.reshape(-1, *value.shape[1:]) for part in by_head.split(list(sizes), 1))
    return [torch.cat(others), last]


def _check_rows(value: Tensor, rows: int, *, is_multiple: bool = False) -> None:
    """Compare the number of rows with that of the metadata."""
    fits = rows and (len(value) % rows == 0 if is_multiple else len(value) == rows)
    if not fits:
        what = f"a multiple of {rows}" if is_multiple else f"{rows}"
        raise ValueError(f"it has {len(value)} rows, but by the metadata it must have {what}")
