"""Random attention steps for comparing backends: (query rows, context) per sequence.

Memory that a backend must not read holds NaN: the null block, blocks of no sequence and the unused
ends of blocks. Block-table entries past a context are far out of range.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.attention import AttentionBackend, AttentionMetadata
from ostinato.ops.backends.reference import BACKEND as REFERENCE
from ostinato.ops.backends.reference import _to_cache

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
    max_blocks: int = 0  # B; 0 = the number that the longest context needs
    num_rows: int = 0  # S; 0 = the number of sequences
    num_padding: int = 0  # tokens past the last sequence's

    def per_head(self) -> tuple[Tensor | None, Tensor | None]:
        """The ALiBi slopes and sinks that the shape has; [Hq] float32, all different."""
        heads = torch.arange(1, self.num_heads + 1, device=self.device, dtype=torch.float32)
        slopes = 0.3 * 0.8**heads if self.has_alibi else None
        sinks = 3.0 * torch.cos(heads) if self.has_sinks else None
        return slopes, sinks


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
    starts, slots = [0], []
    for row, (query_len, context) in enumerate(lengths):
        blocks = [free.pop() for _ in range(counts[row])]
        block_table[row, : len(blocks)] = torch.tensor(blocks)
        slots += [blocks[p // size] * size + p % size for p in range(context - query_len, context)]
        starts.append(starts[-1] + query_len)
        for cache in (k_cache, v_cache):
            cache[blocks[-1:], :, (context - 1) % size + 1 :] = float("nan")
    for cache in (k_cache, v_cache):
        cache[[0, *free]] = float("nan")
    num_tokens = starts[-1]
    starts += [num_tokens] * (num_rows - len(lengths))
    slots += [0] * shape.num_padding
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
    )
    return Step(q, k, v, k_cache, v_cache, metadata, num_tokens)


class CpuOrder:
    """Converts caches [num_blocks, Hkv, block_size, D] to the CPU kernel's layout and back.

    Groups of 16 tokens (8 where blocks are no multiple of 16) hold keys as [D / e, tokens, e] and
    values as [tokens / e, D, e], where e elements take four bytes. In int8 e is 1, and the scales
    of a group follow its values.
    """

    def __init__(self, cache: Tensor) -> None:
        _, _, self._block_size, self._head_dim = cache.shape
        self._tokens = 16 if self._block_size % 16 == 0 else 8
        self._is_int8 = cache.dtype is torch.int8
        self._elements = 1 if self._is_int8 else 4 // cache.element_size()

    def keys(self, cache: Tensor) -> Tensor:
        if self._is_int8:
            places = self._grouped(cache, (self._tokens, self._head_dim))
            return self._joined(places[..., :-4].transpose(3, 4), places[..., -4:], cache)
        parts = (self._tokens, self._head_dim // self._elements, self._elements)
        return self._grouped(cache, parts).transpose(3, 4).reshape(cache.shape).contiguous()

    def values(self, cache: Tensor) -> Tensor:
        if self._is_int8:
            places = self._grouped(cache, (self._tokens, self._head_dim))
            return self._joined(places[..., :-4], places[..., -4:], cache)
        parts = (self._tokens // self._elements, self._elements, self._head_dim)
        return self._grouped(cache, parts).transpose(4, 5).reshape(cache.shape).contiguous()

    def keys_by_token(self, cache: Tensor) -> Tensor:
        if self._is_int8:
            numbers, scales = self._parts(cache, (self._head_dim - 4, self._tokens))
            return torch.cat((numbers.transpose(3, 4), scales), -1).reshape(cache.shape)
        parts = (self._head_dim // self._elements, self._tokens, self._elements)
        return self._grouped(cache, parts).transpose(3, 4).reshape(cache.shape).contiguous()

    def values_by_token(self, cache: Tensor) -> Tensor:
        if self._is_int8:
            numbers, scales = self._parts(cache, (self._tokens, self._head_dim - 4))
            return torch.cat((numbers, scales), -1).reshape(cache.shape)
        parts = (self._tokens // self._elements, self._head_dim, self._elements)
        return self._grouped(cache, parts).transpose(4, 5).reshape(cache.shape).contiguous()

    @staticmethod
    def _joined(numbers: Tensor, scales: Tensor, cache: Tensor) -> Tensor:
        return torch.cat((numbers.flatten(3), scales.flatten(3)), -1).reshape(cache.shape)

    def _parts(self, cache: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        group = self._grouped(cache, (self._tokens * self._head_dim,))
        numbers, scales = group[..., : -4 * self._tokens], group[..., -4 * self._tokens :]
        return numbers.unflatten(-1, shape), scales.unflatten(-1, (self._tokens, 4))

    def _grouped(self, cache: Tensor, parts: tuple[int, ...]) -> Tensor:
        return cache.reshape(*cache.shape[:2], self._block_size // self._tokens, *parts)


def run(backend: AttentionBackend, step: Step, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(output, k_cache, v_cache) after the call, caches by token; `step` is left as it was."""
    k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
    key_order, value_order = CpuOrder(k_cache), CpuOrder(v_cache)
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
    metadata = AttentionMetadata(*(tensor.cpu() for tensor in step.metadata))
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
