"""The `triton` attention backend: picks tile shapes and launches the Triton kernels.

A call of the op has at most three launches. The first writes K and V; if the projection is given,
it also rotates the heads. The second attends for sequences with few query rows (decode). The keys
of such a sequence are split into partitions. For each sequence and KV head, the program that writes
the last partition joins them. The third attends for sequences with many query rows (prefill). The
device decides which sequence belongs to which launch. So the launches depend on shapes alone, and a
captured CUDA graph serves any mix of lengths. A row's result depends on its own sequence, and on
the class of the step's number of sequences, which decides how contexts are divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.ops.attention import AttentionMetadata, AttentionSpec, HostMetadata, PlanKey
from ostinato.ops.backends.triton_cache_write import rotary_write_kernel, write_kv_kernel
from ostinato.ops.backends.triton_kernels import attention_kernel
from ostinato.ops.backends.triton_tiles import (
    FIRST_OF_CLASS,
    MAX_TILE_ROWS,
    KernelShape,
    attention_constants,
    ceil_div,
    rotary_constants,
    write_constants,
)
from ostinato.ops.fused.early_start import starts_early

__all__ = ("BACKEND", "TritonBackend", "why_shape_unsupported", "write_kv")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NO_SLOTS = torch.empty(0, dtype=torch.int64)
_ONE_ROW_PER_SEQUENCE = torch.ones(1, dtype=torch.int64)  # see `_Planner`


def _strides(tensor: Tensor) -> tuple[int, int]:
    """Token and head strides in elements.

    A dimension of size 1 may have any stride. Its stride is replaced by that of a dense tensor,
    because Triton would compile the kernel again for an odd stride.
    """
    num_tokens, num_heads, head_dim = tensor.shape
    token, head, _ = tensor.stride()
    return token if num_tokens > 1 else num_heads * head_dim, head if num_heads > 1 else head_dim


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return 227 * 1024  # the interpreter has no limit; this gives the tiles of capability 9.0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(2) != 1:
            raise ValueError(
                f"paged_attention: {name} has strides {tensor.stride()}, its last dimension must "
                f"be contiguous; call .contiguous() on it"
            )


def _check_projection(qkv: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    if qkv.stride(1) != 1:
        raise ValueError(
            f"rotary_attention: qkv has strides {qkv.stride()}, its last dimension must be "
            "contiguous; call .contiguous() on it"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and not table.is_contiguous():
            raise ValueError(
                f"rotary_attention: {name} has strides {table.stride()}, must be contiguous; call "
                ".contiguous() on it"
            )


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache.is_contiguous():
            raise ValueError(
                f"paged_attention: {name} {tuple(cache.shape)} has strides {cache.stride()}, must "
                f"be contiguous; allocate it as its own tensor"
            )


def write_kv(
    out: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    arrivals: Tensor | None = None,
) -> None:
    """Store the step's keys and values at `slot_mapping`; zero the padding rows of `out`.

    Args:
        out: [T, H, Dv] contiguous.
        k: [T, Hkv, D], last dimension contiguous.
        v: [T, Hkv, Dv], last dimension contiguous.
        k_cache: [num_blocks, Hkv, block_size, D] contiguous.
        v_cache: like `k_cache`, of Dv elements.
        metadata: the step's; `query_start_loc` and `slot_mapping` are read.
        arrivals: [T * Hkv + 1] int32, which is zeroed for the attention kernel; None = nothing.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    sizes = (out.shape[1], num_kv_heads, head_dim, v.shape[2], k_cache.shape[2])
    constants = write_constants(*sizes, early=starts_early(k.device))
    write_kv_kernel[(num_tokens, ceil_div(num_kv_heads, constants["BLOCK_H"]))](
        out,
        arrivals,
        k,
        v,
        k_cache,
        v_cache,
        metadata.query_start_loc,
        metadata.slot_mapping,
        metadata.seq_lens.shape[0],
        *_strides(k),
        *_strides(v),
        **constants,
    )


class _Planner:
    """Tells the backend, from the host, whether every sequence of a step has one query row."""

    def plan(self, key: PlanKey, host: HostMetadata, handle: Tensor) -> None:
        handle[0] = 1 if key.tokens_per_seq == 1 else 0

    def close(self) -> None:
        """Does nothing: this planner has no buffers."""


class TritonBackend:
    """Attention by Triton kernels, for sequences of any lengths.

    The host computes one number for each step, `metadata.plan`. It is 1 if no sequence of the step
    has more than one query row, else 0. With 1 the launch for sequences with many query rows is
    left out.
    """

    name = "triton"
    is_batch_invariant = False
    warm_up_seqs = FIRST_OF_CLASS

    def why_unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"needs a CUDA device, but the model is on {spec.device.type}"
        if not torch.cuda.is_available():
            return "needs a CUDA device, none is visible"
        capability = torch.cuda.get_device_capability(spec.device)
        needed = (8, 9) if spec.converts_cache else (8, 0)
        if capability < needed:
            return "needs compute capability {}.{} or newer, but the device has {}.{}".format(
                *needed, *capability
            )
        return why_shape_unsupported(spec)

    def workspace_bytes(
        self, spec: AttentionSpec, *, num_tokens: int, num_seqs: int, max_model_len: int
    ) -> int:
        shape = KernelShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            block_size=spec.block_size,
            itemsize=spec.dtype.itemsize,
            max_context=max_model_len,
            num_seqs=num_seqs,
        )
        return shape.workspace_bytes(num_tokens)

    def make_planner(
        self,
        spec: AttentionSpec,
        keys: Iterable[PlanKey],
        *,
        tables: Sequence[object],
        sliding_windows: Iterable[int] = (),
    ) -> _Planner:
        return _Planner()

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int,
        soft_cap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        _check(q, k, v)
        _check_caches(k_cache, v_cache)
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        if q.shape[0] == 0:
            return out
        arrivals = _arrivals(q, k_cache)
        write_kv(out, k, v, k_cache, v_cache, metadata, arrivals)
        more = (scale, sliding_window, soft_cap, alibi_slopes, sinks)
        _attend(out, arrivals, q, k_cache, v_cache, metadata, *more)
        return out

    def run_projected(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        num_heads: int,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int,
        soft_cap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        _check_projection(qkv, cos, sin)
        _check_caches(k_cache, v_cache)
        num_tokens, num_kv_heads = qkv.shape[0], k_cache.shape[1]
        shape = (num_tokens, num_heads, qkv.shape[1] // (num_heads + 2 * num_kv_heads))
        out, q = (torch.empty(shape, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
        if num_tokens == 0:
            return out
        constants = rotary_constants(
            num_heads,
            num_kv_heads,
            shape[2],
            0 if cos is None else cos.shape[1],
            k_cache.shape[2],
            early=starts_early(qkv.device),
        )
        rows = ceil_div(num_heads + 2 * num_kv_heads, constants["BLOCK_H"])
        arrivals = _arrivals(q, k_cache)
        rotary_write_kernel[(num_tokens, rows)](
            out,
            arrivals,
            q,
            qkv,
            cos,
            sin,
            q_weight,
            k_weight,
            k_cache,
            v_cache,
            metadata.query_start_loc,
            metadata.slot_mapping,
            metadata.seq_lens.shape[0],
            qkv.stride(0) if num_tokens > 1 else qkv.shape[1],
            eps,
            **constants,
        )
        more = (scale, sliding_window, soft_cap, alibi_slopes, sinks)
        _attend(out, arrivals, q, k_cache, v_cache, metadata, *more)
        return out

    def run_cross(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        """Do what `cross_attention` describes. Each row is a sequence with one query row."""
        _check(q, q, q)
        _check_caches(k_cache, v_cache)
        num_tokens = q.shape[0]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if num_tokens == 0:
            return out
        starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device)
        metadata = AttentionMetadata(
            starts, seq_lens, block_table, _NO_SLOTS, plan=_ONE_ROW_PER_SEQUENCE
        )
        arrivals = _arrivals(q, k_cache).zero_()
        _attend(out, arrivals, q, k_cache, v_cache, metadata, scale, 0, 0.0, None, None)
        return out


def _arrivals(q: Tensor, k_cache: Tensor) -> Tensor:
    """Counters: one for each pair of a row and a KV head, then one of items that programs took."""
    return torch.empty(q.shape[0] * k_cache.shape[1] + 1, dtype=torch.int32, device=q.device)


def _attend(
    out: Tensor,
    arrivals: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Attend to the caches, which already hold the step's keys and values."""
    shape = KernelShape(
        num_heads=q.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=q.shape[2],
        value_dim=v_cache.shape[3],
        block_size=k_cache.shape[2],
        itemsize=q.element_size(),
        max_context=metadata.block_table.shape[1] * k_cache.shape[2],
        num_seqs=metadata.seq_lens.shape[0],
        converts_cache=k_cache.dtype != q.dtype,
        shared_memory=_shared_memory(q.device),
    )
    launch = _Launch(
        shape,
        out,
        arrivals,
        q,
        k_cache,
        v_cache,
        metadata,
        scale,
        sliding_window,
        soft_cap,
        alibi_slopes,
        sinks,
    )
    launch.short()
    max_query = int(metadata.plan[0]) or q.shape[0]
    if max_query > shape.max_short_query:
        launch.long()


def why_shape_unsupported(spec: AttentionSpec) -> str | None:
    """The reason the kernels cannot take `spec`'s shapes and type, whatever the device."""
    if spec.dtype not in _DTYPES:
        return f"needs float16, bfloat16 or float32, but the model has {spec.dtype}"
    if spec.converts_cache and spec.cache_dtype is not torch.float8_e4m3fn:
        return f"needs a cache of the model's type or of float8_e4m3fn, not {spec.cache_dtype}"
    for size in (spec.head_dim, spec.value_dim or spec.head_dim):
        if not 16 <= size <= 256 or size % 8:
            return (
                f"needs a head size in [16, 256] that is a multiple of 8, but the model has {size}"
            )
    if spec.num_heads // spec.num_kv_heads > MAX_TILE_ROWS:
        return (
            f"needs at most {MAX_TILE_ROWS} query heads per KV head, but the model has "
            f"{spec.num_heads // spec.num_kv_heads}"
        )
    if spec.block_size & (spec.block_size - 1):
        return f"needs a block size that is a power of two, cache.block_size is {spec.block_size}"
    return None


@dataclass(frozen=True, slots=True)
class _Launch:
    """One call's launches."""

    shape: KernelShape
    out: Tensor
    arrivals: Tensor
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    scale: float
    sliding_window: int
    soft_cap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None

    @property
    def num_seqs(self) -> int:
        return self.metadata.seq_lens.shape[0]

    def short(self) -> None:
        """Attend for the sequences whose query rows fit one tile."""
        shape, num_tokens = self.shape, self.q.shape[0]
        parts = shape.max_partitions
        rows = shape.partial_rows(num_tokens) if parts > 1 else 0
        partial_shape = (rows, shape.num_heads, parts)
        partial_lse = torch.empty(partial_shape, dtype=torch.float32, device=self.q.device)
        partial_out = torch.empty(
            (*partial_shape, shape.value_size), dtype=torch.float32, device=self.q.device
        )
        items = min(num_tokens, self.num_seqs) * shape.num_kv_heads * parts
        programs = min(items, self._processors() * shape.programs_per_processor)
        self._attend(programs, partial_out, partial_lse, is_long=False)

    def long(self) -> None:
        """Attend for the other sequences. Each tile is one program: the GPU balances their cost."""
        shape, num_tokens = self.shape, self.q.shape[0]
        block_q = shape.long.block_m // shape.group
        most_seqs = min(self.num_seqs, num_tokens // (shape.max_short_query + 1))
        programs = (num_tokens // block_q + most_seqs) * shape.num_kv_heads
        self._attend(programs, self.out, self.out, is_long=True)

    def _processors(self) -> int:
        if self.q.device.type != "cuda":
            return 2  # the interpreter: few, so that programs share a list of items
        return torch.cuda.get_device_properties(self.q.device).multi_processor_count

    def _attend(
        self, programs: int, partial_out: Tensor, partial_lse: Tensor, *, is_long: bool
    ) -> None:
        metadata = self.metadata
        attention_kernel[(programs,)](
            self.out,
            partial_out,
            partial_lse,
            self.arrivals,
            self.arrivals[-1:],
            self.q,
            self.k_cache,
            self.v_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            self.alibi_slopes,
            self.sinks,
            metadata.visible_ends,
            self.num_seqs,
            metadata.block_table.stride(0),
            *_strides(self.q),
            self.scale,
            **attention_constants(
                self.shape,
                self.sliding_window,
                self.soft_cap,
                is_long=is_long,
                early=starts_early(self.q.device),
            ),
        )


BACKEND = TritonBackend()
