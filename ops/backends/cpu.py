"""The CPU attention backend: this package's C++ kernel (ops/native/attention/attention.cpp).

The kernel has its own order of keys and values within a block, which ops/native/attention/tile.h
describes. So a cache that it has written cannot be read by another backend.

Loading the library makes the kernel the op's CPU implementation, so a call runs no Python. `run`
serves only the first call of a process that has not loaded the library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.ops.attention import AttentionMetadata, AttentionSpec
from ostinato.ops.native.library import load

__all__ = ("BACKEND",)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256


class CpuBackend:
    """Prefill and decode in one call. A row's bits depend on its own context only."""

    name = "cpu"
    is_batch_invariant = True
    warm_up_seqs = (1,)

    def why_unsupported(self, spec: AttentionSpec) -> str | None:
        """The reason, or None. If the library cannot be built, only `load` reports it."""
        if spec.device.type != "cpu":
            return f"it runs on the CPU, not on {spec.device.type}"
        if spec.dtype not in _DTYPES:
            return f"dtype must be float32, bfloat16 or float16, not {spec.dtype}"
        if spec.converts_cache and spec.cache_dtype is not torch.int8:
            return (
                f"it keeps keys and values in the model's type {spec.dtype} or in int8, but "
                f"cache.dtype asks for {spec.cache_dtype}"
            )
        for size in (spec.head_dim, spec.value_dim or spec.head_dim):
            if size % 8 or not 8 <= size <= _MAX_HEAD_DIM:
                return f"head sizes must be multiples of 8 up to {_MAX_HEAD_DIM}, not {size}"
        if spec.block_size % 8:
            return f"block_size must be a multiple of 8, not {spec.block_size}"
        return None

    def workspace_bytes(
        self, spec: AttentionSpec, *, num_tokens: int, num_seqs: int, max_model_len: int
    ) -> int:
        return 0  # a thread holds only a tile or two

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
        """Load the library, then call the op again: the dispatcher now finds the C++ kernel."""
        load("core")
        return torch.ops.ostinato.paged_attention.default(
            q,
            k,
            v,
            k_cache,
            v_cache,
            *metadata,
            scale,
            sliding_window,
            soft_cap,
            alibi_slopes,
            sinks,
            self.name,
        )

    def run_cross(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        """Load the library, then call `cross_attention` again, as `run` does."""
        load("core")
        return torch.ops.ostinato.cross_attention.default(
            q, k_cache, v_cache, seq_lens, block_table, scale, self.name
        )


BACKEND = CpuBackend()
