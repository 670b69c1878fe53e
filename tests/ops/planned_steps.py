"""Drives a planned backend as the engine does: static buffers, padding, a plan before each step."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.graphs.buckets import GraphKey
from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.step_tensors import StepInputs
from ostinato.ops.attention import AttentionBackend, AttentionPlanner
from tests.ops.attention_steps import Shape, Step, make_step, run


class Engine:
    """The static buffers of an engine, and a function that copies a step into them."""

    def __init__(
        self, shape: Shape, *, max_num_tokens: int, max_num_seqs: int, max_blocks: int
    ) -> None:
        self.shape = shape
        self.buffers = StaticBuffers(
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            max_blocks_per_seq=max_blocks,
            block_size=shape.block_size,
            device=shape.device,
        )

    def load(self, lengths: list[tuple[int, int]], key: GraphKey, seed: int = 0) -> Step:
        """A random step in the buffers, padded to `key`."""
        step = make_step(lengths, self.shape, seed)
        host, rows, num_tokens = self.buffers.host, len(lengths), step.num_tokens
        host.query_start_loc[: rows + 1] = step.metadata.query_start_loc.cpu().numpy()
        host.seq_lens[:rows] = step.metadata.seq_lens.cpu().numpy()
        width = step.metadata.block_table.shape[1]
        host.block_table[:rows, :width] = step.metadata.block_table.cpu().numpy()
        host.slot_mapping[:num_tokens] = step.metadata.slot_mapping.cpu().numpy()
        self.buffers.pad(num_tokens, rows, rows, key)
        self.buffers.upload(key.num_seqs)

        def padded(tensor: Tensor) -> Tensor:
            extra = torch.randn(key.num_tokens - num_tokens, *tensor.shape[1:]).to(tensor)
            return torch.cat([tensor, extra])

        batch = self.buffers.batch(key.num_tokens, key.num_seqs, 1)
        metadata = StepInputs({}, batch).attention(0)
        return step._replace(
            q=padded(step.q), k=padded(step.k), v=padded(step.v), metadata=metadata
        )

    def run(
        self,
        backend: AttentionBackend,
        planner: AttentionPlanner,
        lengths: list[tuple[int, int]],
        key: GraphKey,
        seed: int = 0,
    ) -> tuple[Step, Tensor]:
        """Plan and run one step; returns it and its output, padding rows included."""
        step = self.load(lengths, key, seed)
        planner.plan(key, self.buffers.host, self.buffers.plan)
        return step, run(backend, step, self.shape)[0]
