"""A decoder that compiles in seconds, with the features that tests of programs and capture need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.kv_cache import KVCache, KVCacheSpec
from ostinato.models.step_tensors import DEFAULT_ROPE, ForwardBatch, RopeRows, StepInputs
from ostinato.ops.attention import paged_attention

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 4, 2, 8, 50
BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, MAX_BLOCKS = 8, 6, 64, 8


class ToyLayer(DecoderLayer):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.qkv = nn.Parameter(torch.randn(rows, HIDDEN, generator=generator) * 0.2, False)
        self.out = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.2, False)

    def static_key(self) -> tuple[Any, ...]:
        return ("toy",)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        qkv = hidden @ self.qkv.T + step.rope[DEFAULT_ROPE].cos.sum(-1, keepdim=True)
        q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        context = paged_attention(
            q, k, v, k_cache, v_cache, step.attention(0), scale=0.3, backend="reference"
        )
        context = context.flatten(1)
        if rows is not None:
            context, hidden = context[rows], hidden[rows]
        return torch.tanh(hidden + context @ self.out.T)


class ToyModel(CausalLM):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator), False)
        self.layers = nn.ModuleList(ToyLayer(generator) for _ in range(num_layers))

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        angle = batch.positions[:, None].float() * torch.tensor([[0.1, 0.01]])
        rope = {DEFAULT_ROPE: RopeRows(angle.cos(), angle.sin())}
        return self.embedding[batch.token_ids], StepInputs(rope, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        return hidden * 2.0

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.T


def make_cache(num_layers: int = 3, num_blocks: int = 64) -> KVCache:
    spec = KVCacheSpec(
        num_layers=num_layers,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
    )
    return spec.allocate(num_blocks, torch.device("cpu"))


def make_buffers() -> StaticBuffers:
    return StaticBuffers(
        max_num_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_blocks_per_seq=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
    )


def fill(buffers: StaticBuffers, sequences: list[tuple[int, list[int]]]) -> tuple[int, int]:
    """Put (context already computed, new token ids) per sequence into the buffers.

    Each sequence owns as many blocks as its table holds.
    The first sequence owns block 1 and those that follow.
    Returns (num_tokens, num_seqs).
    """
    host, begin = buffers.host, 0
    block_size, max_blocks = buffers.block_size, host.block_table.shape[1]
    for index, (start, token_ids) in enumerate(sequences):
        end, stop = begin + len(token_ids), start + len(token_ids)
        first = 1 + index * max_blocks
        host.block_table[index] = range(first, first + max_blocks)
        host.token_ids[begin:end] = token_ids
        host.positions[begin:end] = range(start, stop)
        host.slot_mapping[begin:end] = range(first * block_size + start, first * block_size + stop)
        host.query_start_loc[index : index + 2] = begin, end
        host.seq_lens[index] = stop
        host.logits_indices[index] = end - 1
        begin = end
    return begin, len(sequences)
