"""Random attention steps for comparing backends: (query rows, context) per sequence.

Memory that must not reach a result holds NaN: the null block, blocks of no sequence, the unused ends
of blocks, and blocks that lie outside of the window of all rows. Block-table entries past a context are far out of range.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.attention import AttentionBackend, AttentionMetadata
from ostinato.ops.backends.reference import BACKEND as REFERENCE
from ostinato.ops.backends.reference import _to_cache
from ostinato.ops.native.instruction_sets import detect_isa, instruction_set
from tests.ops.level_backend import LevelBackend

STALE_BLOCK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and dtypes of a step's tensors."""

    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 0  # 0 = head_dim
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None = dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sliding_window: int = 0
    soft_cap: float = 0.0
    has_alibi: bool = False
    has_sinks: bool = False
    # Positions are cut into runs of this many. The tokens of every second run see each other, as far
    # as they are in the step. 0 = no token sees a later one.
    run_tokens: int = 0
    max_blocks: int = 0  # B; 0 = the number that the longest context needs
    num_rows: int = 0  # S; 0 = the number of sequences
    num_padding: int = 0  # tokens past the last sequence's

    def per_head(self) -> tuple[Tensor | None, Tensor | None]:
        """The ALiBi slopes and sinks that the shape has; [Hq] float32, all different."""
        heads = torch.arange(1, self.num_heads + 1, device=self.device, dtype=torch.float32)
        slopes = 0.3 * 0.8**heads if self.has_alibi else None
        sinks = 3.0 * torch.cos(heads) if self.has_sinks else None
        return slopes, sinks

    def first_seen(self, position: int) -> int:
        """The first key that the row at a position sees."""
        if self.sliding_window < 0:
            return position - position % -self.sliding_window
        return max(0, position + 1 - self.sliding_window) if self.sliding_window else 0

    def visible_ends(self, positions: range, context: int) -> list[int]:
        """The `AttentionMetadata.visible_ends` of the tokens at these positions."""
        runs = [position // self.run_tokens for position in positions]
        return [min((one + 1) * self.run_tokens, context) if one % 2 else 0 for one in runs]


class Step(NamedTuple):
    """One call's tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    num_tokens: int  # padding excluded


def to_cache(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_blocks, Hkv, block_size, D] as a cache of this dtype."""
    return _to_cache(cache, dtype) if dtype is torch.int8 else cache.to(dtype)


def blocks_for(length: int, block_size: int) -> int:
    return -(-length // block_size)


def make_step(lengths: list[tuple[int, int]], shape: Shape, seed: int = 0) -> Step:
    """A step of sequences with (query rows, tokens in context). Contexts include the query rows.

    (0, 0) is a row whose sequence is absent.
    """
    generator = torch.Generator().manual_seed(seed)
    size = shape.block_size
    counts = [blocks_for(context, size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    num_rows = shape.num_rows or len(lengths)
    block_table = torch.full((num_rows, shape.max_blocks or max(counts)), STALE_BLOCK)
    value_dim = shape.value_dim or shape.head_dim
    k_cache, v_cache = (
        torch.randn(num_blocks, shape.num_kv_heads, size, head_size, generator=generator)
        for head_size in (shape.head_dim, value_dim)
    )
    starts, slots, ends = [0], [], []
    for row, (query_len, context) in enumerate(lengths):
        blocks = [free.pop() for _ in range(counts[row])]
        block_table[row, : len(blocks)] = torch.tensor(blocks)
        slots += [blocks[p // size] * size + p % size for p in range(context - query_len, context)]
        if shape.run_tokens:
            ends += shape.visible_ends(range(context - query_len, context), context)
        starts.append(starts[-1] + query_len)
        outside = shape.first_seen(context - query_len) // size
        for cache in (k_cache, v_cache):
            cache[blocks[-1:], :, (context - 1) % size + 1 :] = float("nan")
            cache[blocks[:outside]] = float("nan")
    for cache in (k_cache, v_cache):
        cache[[0, *free]] = float("nan")
    num_tokens = starts[-1]
    starts += [num_tokens] * (num_rows - len(lengths))
    slots += [0] * shape.num_padding
    ends += [0] * shape.num_padding
    seq_lens = [context for _, context in lengths] + [0] * (num_rows - len(lengths))
    rows = num_tokens + shape.num_padding
    q, k, v = (
        torch.randn(rows, heads, head_size, generator=generator)
        for heads, head_size in (
            (shape.num_heads, shape.head_dim),
            (shape.num_kv_heads, shape.head_dim),
            (shape.num_kv_heads, value_dim),
        )
    )
    q, k, v = (tensor.to(shape.device, shape.dtype) for tensor in (q, k, v))
    k_cache, v_cache = (
        to_cache(cache, shape.cache_dtype or shape.dtype).to(shape.device)
        for cache in (k_cache, v_cache)
    )
    metadata = AttentionMetadata(
        torch.tensor(starts, dtype=torch.int32, device=shape.device),
        torch.tensor(seq_lens, dtype=torch.int32, device=shape.device),
        block_table.to(shape.device, torch.int32),
        torch.tensor(slots, dtype=torch.int64, device=shape.device),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor(ends, dtype=torch.int32, device=shape.device) if shape.run_tokens else None,
    )
    return Step(q, k, v, k_cache, v_cache, metadata, num_tokens)


class CpuOrder:
    """Converts caches [num_blocks, Hkv, block_size, D] to the CPU kernel's layout and back.

    Groups of 16 tokens (8 where blocks are no multiple of 16) hold keys as [D / e, tokens, e] and
    values as [tokens / e, D, e], where e elements take four bytes. In int8 e is 1, except in
    kernels with matrix tiles of bytes, and the scales of a group follow its values.
    """

    def __init__(self, cache: Tensor, *, has_byte_tiles: bool = False) -> None:
        _, _, self._block_size, size = cache.shape
        is_int8 = cache.dtype is torch.int8
        self._tokens = 16 if self._block_size % 16 == 0 else 8
        self._scale_size = 4 if is_int8 else 0
        self._head_dim = size - self._scale_size
        self._elements = 1 if is_int8 and not has_byte_tiles else 4 // cache.element_size()

    def keys(self, cache: Tensor) -> Tensor:
        numbers, scales = self._places(cache)
        columns = numbers.unflatten(4, (-1, self._elements)).transpose(3, 4)
        return self._joined(columns, scales, cache)

    def values(self, cache: Tensor) -> Tensor:
        numbers, scales = self._places(cache)
        rows = numbers.unflatten(3, (-1, self._elements)).transpose(4, 5)
        return self._joined(rows, scales, cache)

    def keys_by_token(self, cache: Tensor) -> Tensor:
        numbers, scales = self._parts(cache)
        columns = numbers.unflatten(-1, (-1, self._tokens, self._elements))
        tokens = columns.transpose(3, 4).flatten(4)
        return torch.cat((tokens, scales), -1).reshape(cache.shape)

    def values_by_token(self, cache: Tensor) -> Tensor:
        numbers, scales = self._parts(cache)
        rows = numbers.unflatten(-1, (-1, self._head_dim, self._elements))
        tokens = rows.transpose(4, 5).flatten(3, 4)
        return torch.cat((tokens, scales), -1).reshape(cache.shape)

    @staticmethod
    def _joined(numbers: Tensor, scales: Tensor, cache: Tensor) -> Tensor:
        return torch.cat((numbers.flatten(3), scales.flatten(3)), -1).reshape(cache.shape)

    def _places(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers [..., tokens, D] and scales [..., tokens, bytes] of a cache by token."""
        places = self._grouped(cache).unflatten(3, (self._tokens, -1))
        return places[..., : self._head_dim], places[..., self._head_dim :]

    def _parts(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers [..., tokens * D] and scales [..., tokens, bytes] of a cache of the kernel."""
        group = self._grouped(cache)
        end = self._tokens * self._head_dim
        scales = group[..., end:].reshape(*group.shape[:3], self._tokens, self._scale_size)
        return group[..., :end], scales

    def _grouped(self, cache: Tensor) -> Tensor:
        return cache.reshape(*cache.shape[:2], self._block_size // self._tokens, -1)


def _has_byte_tiles(backend: AttentionBackend, dtype: torch.dtype) -> bool:
    """Whether the backend multiplies an int8 cache by matrix tiles of bytes."""
    isa = backend.isa if isinstance(backend, LevelBackend) else detect_isa()
    has_tiles = any("OSTINATO_AMX" in flag for flag in instruction_set(isa).flags)
    return has_tiles and dtype is torch.bfloat16


def run(backend: AttentionBackend, step: Step, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(output, k_cache, v_cache) after the call, caches by token; `step` is left as it was."""
    k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
    has_byte_tiles = _has_byte_tiles(backend, step.q.dtype)
    key_order = CpuOrder(k_cache, has_byte_tiles=has_byte_tiles)
    value_order = CpuOrder(v_cache, has_byte_tiles=has_byte_tiles)
    if backend.name == "cpu":
        k_cache, v_cache = key_order.keys(k_cache), value_order.values(v_cache)
    out = backend.run(
        step.q,
        step.k,
        step.v,
        k_cache,
        v_cache,
        step.metadata,
        shape.head_dim**-0.5,
        shape.sliding_window,
        shape.soft_cap,
        *shape.per_head(),
    )
    if backend.name == "cpu":
        k_cache = key_order.keys_by_token(k_cache)
        v_cache = value_order.values_by_token(v_cache)
    return out, k_cache, v_cache


def known(cache: Tensor) -> Tensor:
    """Everything but the null block, as float32 with a number for NaN."""
    return cache[1:].float().nan_to_num(7.0)


TOLERANCE = {
    # Sums in another order, in float32.
    torch.float32: 5e-6,
    # Half a unit in the last place of values up to 4, after weights were rounded to the type too.
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def check(backend: AttentionBackend, lengths: list[tuple[int, int]], shape: Shape) -> Tensor:
    """Compare `backend` with the reference on a step; returns the backend's output."""
    step = make_step(lengths, shape)
    out, k_cache, v_cache = run(backend, step, shape)
    # The reference gets the same numbers in float32, so all roundings are the backend's.
    wide = replace(shape, dtype=torch.float32, device=torch.device("cpu"))
    q, k, v = (tensor.float().cpu() for tensor in step[:3])
    caches = step.k_cache.cpu(), step.v_cache.cpu()
    if shape.cache_dtype is None:
        caches = caches[0].float(), caches[1].float()
    metadata = AttentionMetadata(
        *(None if tensor is None else tensor.cpu() for tensor in step.metadata)
    )
    widened = Step(q, k, v, *caches, metadata, step.num_tokens)
    expected, _, _ = run(REFERENCE, widened, wide)
    _, k_expected, v_expected = run(REFERENCE, step, shape)
    real = slice(0, step.num_tokens)
    assert out.shape == (*step.q.shape[:2], step.v.shape[2])
    assert out.dtype == shape.dtype
    assert out.is_contiguous()
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(
        out[real].float().cpu(), expected[real], atol=tolerance, rtol=tolerance
    )
    # Padding tokens write to block 0, which no sequence reads.
    for cache, cache_expected in ((k_cache, k_expected), (v_cache, v_expected)):
        assert torch.equal(known(cache), known(cache_expected))
    return out
