"""Draws one token per row of logits; rows with different sampling parameters share a batch.

A `SamplePath` is a method of drawing. The path of a row depends on its parameters alone, not on its
logits or on other rows. So the host computes the path, and the paths of a step form a program of
fixed shapes that can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.ops.register import register_op
from ostinato.ops.sampling.plain_sampling import (
    MAX_CANDIDATES,
    sample_candidates,
    sample_filtered,
    sample_full,
    sample_sorted,
)

__all__ = (
    "RowSampling",
    "SampleInputs",
    "SamplePath",
    "rows_at_once",
    "sample_each",
    "sample_path",
    "sample_rows",
    "sampling_inputs",
    "sampling_workspace_bytes",
)

# Logits that are sampled at once. Sampling needs some 60 bytes for each logit, so a large batch and
# vocabulary would take gigabytes without this limit.
_DRAWN_ELEMENTS = 1 << 22
_BYTES_PER_ELEMENT = 64


class SamplePath(IntEnum):
    """The method by which a row's token is found."""

    greedy = 0  # the likeliest
    full = 1  # from the whole vocabulary, unsorted
    narrow = 2  # from the MAX_CANDIDATES likeliest
    wide = 3  # from the whole vocabulary in order


class RowSampling(NamedTuple):
    """The parameters of one row's draw; the fields of `SampleInputs`, in order."""

    path: SamplePath
    temperature: float  # above 0, for greedy rows too
    top_k: int  # V = off
    top_p: float
    min_p: float
    uniform: float  # in [0, 1)


class SampleInputs(NamedTuple):
    """`RowSampling` for R rows, [R] float64 each; paths and top-k are whole numbers."""

    paths: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor


def sample_path(
    *, temperature: float, top_k: int, top_p: float, min_p: float, vocab_size: int
) -> SamplePath:
    """The path of a row. A `top_k` of V, a `top_p` of 1 and a `min_p` of 0 mean off."""
    if temperature == 0.0:
        return SamplePath.greedy
    limited = top_k < vocab_size
    if limited and top_k <= MAX_CANDIDATES:
        return SamplePath.narrow
    return SamplePath.wide if limited or top_p < 1.0 or min_p > 0.0 else SamplePath.full


def sample_rows(logits: Tensor, inputs: SampleInputs, paths: Iterable[SamplePath]) -> Tensor:
    """Sample with fixed shapes and without waiting for the device, as a CUDA graph needs.

    Args:
        logits: [R, V] float32.
        inputs: the parameters of the R rows.
        paths: all paths in `inputs.paths` except greedy. Each path is computed for every row.

    Returns:
        [R] int64 token ids.
    """
    token_ids = _draw_unsorted(logits, inputs.paths, inputs.temperatures, inputs.uniforms)
    for path in sorted(set(paths) & _STATIC.keys()):
        drawn = _in_chunks(_STATIC[path], logits, inputs)
        token_ids = torch.where(inputs.paths == float(path), drawn, token_ids)
    return token_ids


def sampling_inputs(draws: Sequence[RowSampling]) -> Tensor:
    """The parameters of R draws as `sample_each` takes them: [6, R] float64 on the CPU."""
    # NumPy converts a few Python numbers several times as fast as torch.
    columns = np.array(draws, dtype=np.float64).reshape(-1, len(RowSampling._fields))
    return torch.from_numpy(columns.T.copy())


def sample_each(logits: Tensor, inputs: Tensor) -> Tensor:
    """Sample, for CPUs: each path is computed only for the rows that have it.

    This is the op `ostinato::sample_tokens`, on CPUs a C++ kernel (ops/native/rows/sampling.cpp).
    The kernel and plain torch sum probabilities in different orders. So if `uniform` is within a
    rounding error of the border between two tokens, one can draw the first token and the other the
    second.

    Args:
        logits: [R, V] float32.
        inputs: the parameters and random numbers of the R rows, from `sampling_inputs`.

    Returns:
        [R] int64 token ids.
    """
    return _sample_tokens(logits, inputs.to(logits.device))


def _plain_sample_tokens(logits: Tensor, inputs: Tensor) -> Tensor:
    rows = SampleInputs(*inputs)
    token_ids = logits.argmax(-1)
    for path in (SamplePath.full, SamplePath.narrow, SamplePath.wide):
        where = (rows.paths == float(path)).nonzero().squeeze(-1)
        if len(where):
            chosen = SampleInputs(*(column[where] for column in rows))
            token_ids[where] = _in_chunks(_WAITING[path], logits, chosen, where)
    return token_ids


def _sample_tokens_fake(logits: Tensor, inputs: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


def sampling_workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """The most bytes that a draw of `num_rows` rows allocates at once."""
    return _BYTES_PER_ELEMENT * min(num_rows, rows_at_once(vocab_size)) * vocab_size


def rows_at_once(vocab_size: int) -> int:
    """Rows of logits that are sampled at once, to bound the memory of the draw."""
    return max(1, _DRAWN_ELEMENTS // vocab_size)


_Draw = Callable[[Tensor, SampleInputs], Tensor]


def _full(logits: Tensor, inputs: SampleInputs) -> Tensor:
    return sample_full(logits, inputs.uniforms)


def _filter_arguments(inputs: SampleInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs.uniforms, inputs.top_k, inputs.top_p, inputs.min_p


def _narrow(logits: Tensor, inputs: SampleInputs) -> Tensor:
    return sample_candidates(logits, *_filter_arguments(inputs))


def _sorted(logits: Tensor, inputs: SampleInputs) -> Tensor:
    return sample_sorted(logits, *_filter_arguments(inputs))


def _filtered(logits: Tensor, inputs: SampleInputs) -> Tensor:
    return sample_filtered(logits, *_filter_arguments(inputs))


_STATIC: dict[SamplePath, _Draw] = {SamplePath.narrow: _narrow, SamplePath.wide: _sorted}
# These may wait for the device.
_WAITING = {**_STATIC, SamplePath.full: _full, SamplePath.wide: _filtered}


def _in_chunks(
    draw: _Draw, logits: Tensor, inputs: SampleInputs, where: Tensor | None = None
) -> Tensor:
    """`draw` of `logits / temperatures`, in chunks. `where`: the rows to draw, None = all."""
    num_rows, step = len(inputs.paths), rows_at_once(logits.shape[-1])
    parts = []
    for begin in range(0, num_rows, step):
        rows = slice(begin, begin + step)
        part = SampleInputs(*(column[rows] for column in inputs))
        scaled = logits[rows] if where is None else logits[where[rows]]
        parts.append(draw(scaled / part.temperatures[:, None].float(), part))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plain_draw_unsorted(
    logits: Tensor, paths: Tensor, temperatures: Tensor, uniforms: Tensor
) -> Tensor:
    """The likeliest token of each greedy row, and a token of the whole vocabulary for other rows.

    Args:
        logits: [R, V] float32.
        paths: [R] float64; other paths than greedy and full are drawn as full.
        temperatures: [R] float64 above 0.
        uniforms: [R] float64 in [0, 1).

    Returns:
        [R] int64 token ids.
    """
    off = torch.zeros_like(paths)
    drawn = _in_chunks(_full, logits, SampleInputs(paths, temperatures, off, off, off, uniforms))
    return torch.where(paths == float(SamplePath.greedy), logits.argmax(-1), drawn)


def _draw_unsorted_on_cuda(
    logits: Tensor, paths: Tensor, temperatures: Tensor, uniforms: Tensor
) -> Tensor:
    kernel = import_module("ostinato.ops.sampling.triton_unsorted_draw")
    return kernel.draw_unsorted(logits, paths, temperatures, uniforms)


def _draw_unsorted_fake(
    logits: Tensor, paths: Tensor, temperatures: Tensor, uniforms: Tensor
) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


_draw_unsorted = register_op(
    "draw_unsorted",
    {"CompositeExplicitAutograd": _plain_draw_unsorted, "CUDA": _draw_unsorted_on_cuda},
    fake=_draw_unsorted_fake,
)
_sample_tokens = register_op(
    "sample_tokens", {"CompositeExplicitAutograd": _plain_sample_tokens}, fake=_sample_tokens_fake
)
