"""Attention of a decoder to the states of an encoder, whose keys and values are kept in caches.

Shapes: T tokens of a step, D hidden size, Hq query heads, Hkv key and value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import CrossSpace, KVCacheSpec
from ostinato.models.layers.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.step_tensors import CROSS, CrossRows, StepInputs
from ostinato.ops.cross_attention import cross_attention, write_cross_cache

__all__ = ("CrossAttention", "CrossTable")


class CrossTable(nn.Module):
    """Maps the windows of a step's tokens to the blocks that cross attention reads."""

    blocks: Tensor  # [E] int64: 0, 1, 2, ...

    def __init__(self, space: CrossSpace, options: BuildOptions) -> None:
        super().__init__()
        self.num_keys = space.num_keys
        blocks = torch.arange(space.blocks_per_window, device=options.device)
        self.register_buffer("blocks", blocks, persistent=False)

    def forward(self, windows: Tensor) -> CrossRows:
        """[T, 1] int64 -> lengths [T, 1] and block tables [T, E], int32. Window 0 has one key."""
        table = windows * self.blocks.shape[0] + self.blocks
        lengths = (windows > 0) * (self.num_keys - 1) + 1
        return CrossRows(lengths.to(torch.int32), table.to(torch.int32))


class CrossAttention(nn.Module):
    """Attention to the states of an encoder (arXiv:1706.03762), from the caches of this layer.

    Keys have no bias in the checkpoints of Whisper. Their bias here is zero.

    Attributes:
        k_cache: [num_blocks, Hkv, block_size, d], in the layout of the attention backend.
        v_cache: like `k_cache`.
    """

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, config: ModelConfig, options: BuildOptions, space: CrossSpace) -> None:
        super().__init__()
        heads = options.shard.span(config.num_heads, "num_attention_heads")
        kv_heads = options.shard.kv_heads(config.num_kv_heads)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size
        self.head_dim = config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.backend = options.attention_backend
        self.space = space
        queries, keys = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        size = config.hidden_size
        self.q_proj = Linear(size, queries, options, bias=True)
        self.kv_proj = MergedLinear(size, (keys, keys), options, bias=True)
        self.o_proj = Linear(queries, size, options, bias=True)
        spec = KVCacheSpec(
            num_layers=1,
            num_kv_heads=kv_heads.size,
            head_dim=config.head_dim,
            block_size=space.block_size,
            dtype=space.dtype,
        )
        ((k_cache, v_cache),) = spec.allocate(space.num_blocks, options.device)
        self.register_buffer("k_cache", k_cache, persistent=False)
        self.register_buffer("v_cache", v_cache, persistent=False)

    def forward(self, x: Tensor, step: StepInputs, residual: Tensor, rows: Tensor | None) -> Tensor:
        """[T, D] -> [T, D], plus the residual.

        With `rows` [R], x and the residual are those of these tokens, and so is the result.
        """
        # A layer with only views, row selections and ops of this package runs without Inductor
        # (graphs/compiler/fx_program.py).
        seq_lens, block_table = step.rope[CROSS]
        if rows is not None:
            seq_lens = F.embedding(rows, seq_lens)
            block_table = F.embedding(rows, block_table)
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        out = cross_attention(
            q,
            self.k_cache,
            self.v_cache,
            seq_lens.view(-1),
            block_table,
            scale=self.scale,
            backend=self.backend,
        )
        return self.o_proj(out.view(-1, self.num_heads * self.head_dim), residual)

    def store(self, states: Tensor, window: int, rows_per_unit: int) -> Generator[None, None, None]:
        """Write the keys and values of a window [num_keys, D] into the caches, in units."""
        first = window * self.space.blocks_per_window * self.space.block_size
        for begin in range(0, len(states), rows_per_unit):
            part = states[begin : begin + rows_per_unit]
            both = self.kv_proj(part).view(-1, 2 * self.num_kv_heads, self.head_dim)
            k, v = both.split((self.num_kv_heads, self.num_kv_heads), 1)
            slots = torch.arange(first + begin, first + begin + len(part), device=states.device)
            write_cross_cache(k, v, self.k_cache, self.v_cache, slots, backend=self.backend)
            yield

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return (
            "cross attention",
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.scale,
            self.backend,
            self.q_proj.static_key,
            self.o_proj.static_key,
        )
