"""A random Llama with shapes for GPU kernels, as an engine configuration and as bare graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.conf.root import RunConfig
from ostinato.conf.schema import GraphForm
from ostinato.graphs.buckets import BucketTable
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.capture import GraphRunner
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.recorder import CudaRecorder, Recorder
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.kv_cache import KVCache
from ostinato.models.registry import build_model
from ostinato.models.step_tensors import given_tensors
from ostinato.ops.attention import PlannedBackend, PlannedTable, load_backend, select_backend
from tests.graphs.toy import fill
from tests.runtime.tiny import MODEL as TINY_MODEL
from tests.runtime.tiny import tiny_config

MODEL = {
    **TINY_MODEL,
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
VOCAB_SIZE = 300
# Contexts have up to 640 tokens (16 x 40). Attention splits the longer ones into partitions.
BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, MAX_BLOCKS = 16, 8, 512, 40
# Steps of 320 tokens do not use the layers' form for few rows, so cuBLAS is captured, too.
DECODE_SIZES, MIXED_SIZES = (1, 2, 4, 8), (32, 64, 320)

# A step: (context already computed, number of new tokens) of each sequence.
Step = list[tuple[int, int]]


def cuda_config(*overrides: str) -> RunConfig:
    """`tiny_config` on the CUDA device, captured, float32 unless the overrides say otherwise."""
    return tiny_config(
        "device.name=cuda",
        "graphs.mode=captured",
        "cache.block_size=16",
        "scheduler.max_num_batched_tokens=96",
        *overrides,
        model__config=MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """A graph runner with what it owns."""

    runner: GraphRunner
    buffers: StaticBuffers
    kv_cache: KVCache

    def run(self, step: Step) -> Tensor:
        """Logits of every sequence's last token. The token ids follow from `step` alone."""
        tokens = [
            [(7 * start + 13 * n + 3) % VOCAB_SIZE for n in range(new)] for start, new in step
        ]
        contexts = [start for start, _ in step]
        self.buffers.wait_for_upload()
        num_tokens, num_seqs = fill(self.buffers, list(zip(contexts, tokens, strict=True)))
        tokens_per_seq = 1 if all(new == 1 for _, new in step) else 0
        logits = self.runner.run(num_tokens, num_seqs, num_seqs, tokens_per_seq=tokens_per_seq)
        return logits.clone()

    def poison(self) -> None:
        """Overwrite every input with a number that would show in the results."""
        self.buffers.wait_for_upload()
        for name in given_tensors(self.buffers.host):
            getattr(self.buffers.host, name).fill(7)


def make_graphs(
    dtype: torch.dtype,
    *,
    captured: bool,
    form: GraphForm | None = None,
    device: torch.device | None = None,
    recorder: Recorder | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> Graphs:
    """Graphs of a random model over random cache contents.

    With the same `dtype` and `vocab_size`, model and contents are the same.

    Args:
        dtype: the dtype of weights, activations and cache.
        captured: whether the runner has a table of buckets, which `runner.capture` captures.
        form: None = eager.
        device: None = the CUDA device.
        recorder: None = CUDA graphs.
        vocab_size: the size of the model's vocabulary; ids in prompts stay below VOCAB_SIZE.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    config = LlamaForCausalLM.read_config({**MODEL, "vocab_size": vocab_size}, {})
    spec = config.attention_spec(BLOCK_SIZE, dtype, device)
    backend = select_backend("auto", spec)
    model = build_model(config, dtype=dtype, device=device, attention_backend=backend)
    init_dummy_weights(model, seed=0)
    num_blocks = 1 + MAX_SEQS * MAX_BLOCKS
    kv_cache = config.kv_cache_spec(BLOCK_SIZE, dtype).allocate(num_blocks, device)
    generator = torch.Generator().manual_seed(0)
    for tensor in (tensor for pair in kv_cache for tensor in pair):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    buffers = StaticBuffers(
        max_num_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_blocks_per_seq=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        device=device,
    )
    program = None
    if form is not None:
        program = compile_model(model, form, buffers.batch(16, 2, 2), kv_cache)(model)
    table = BucketTable(decode_sizes=DECODE_SIZES, mixed_sizes=MIXED_SIZES, max_num_seqs=MAX_SEQS)
    planned, planner = load_backend(backend), None
    if isinstance(planned, PlannedBackend):
        planner = planned.make_planner(
            spec, table.keys, tables=[PlannedTable(BLOCK_SIZE, MAX_BLOCKS)]
        )
    runner = GraphRunner(
        model,
        kv_cache,
        buffers,
        program=program,
        table=table if captured else None,
        recorder=(recorder or CudaRecorder()) if captured else None,
        planner=planner,
    )
    return Graphs(runner=runner, buffers=buffers, kv_cache=kv_cache)
