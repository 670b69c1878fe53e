"""Captured CUDA graphs equal the eager model, compile nothing late and share their memory."""

from __future__ import annotations

import random

import pytest
import torch

from ostinato.conf.schema import GraphForm
from ostinato.graphs.buckets import GraphKey
from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.models.step_tensors import StepSizes
from ostinato.ops.fused.fused_linear import warm_up_tokens
from tests.gpu.tiny_llama import (
    DECODE_SIZES,
    MAX_BLOCKS,
    MAX_SEQS,
    MAX_TOKENS,
    MIXED_SIZES,
    Graphs,
    Step,
    make_graphs,
)

pytestmark = pytest.mark.gpu

# Padded and unpadded shapes take different matrix kernels, which round differently. Logits and
# cache entries are about 0.3 in size. The tolerances are a few roundings of each type.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCES)

# Each step leaves stale rows that the next step must not read.
STEPS: list[tuple[Step, str]] = [
    ([(0, 20), (0, 5)], "captured"),  # 25 tokens in the mixed bucket of 32
    ([(20, 1), (5, 1), (300, 1)], "captured"),  # 3 sequences in the decode bucket of 4
    ([(21, 1), (6, 30), (600, 1), (0, 9)], "captured"),  # decode and prefill in the bucket of 64
    ([(start, 1) for start in range(0, 640, 80)], "captured"),  # a full decode bucket
    ([(639, 1)], "captured"),
    ([(0, 200), (22, 1)], "captured"),  # 201 tokens in the mixed bucket of 320
    ([(0, 400), (24, 1)], "miss"),  # too large for any bucket
    ([(200, 40), (23, 1)], "captured"),
    ([(240, 1)], "captured"),
]


def assert_caches_equal(one: Graphs, other: Graphs, tolerance: float) -> None:
    for pair, other_pair in zip(one.kv_cache, other.kv_cache, strict=True):
        for tensor, other_tensor in zip(pair, other_pair, strict=True):
            # Padding is written to block 0; all other blocks must agree.
            torch.testing.assert_close(tensor[1:], other_tensor[1:], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", [None, GraphForm.layer, GraphForm.model])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_replay_equals_eager_through_joins_and_leaves(
    dtype: torch.dtype, form: GraphForm | None
) -> None:
    captured = make_graphs(dtype, captured=True, form=form)
    eager = make_graphs(dtype, captured=False)
    captured.runner.capture()
    miss = "eager" if form is None else "compiled"
    for step, kind in STEPS:
        before = dict(captured.runner.steps_by_kind)
        captured.poison()
        got, expected = captured.run(step), eager.run(step)
        assert got.shape == expected.shape, step
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        kind = miss if kind == "miss" else kind
        assert captured.runner.steps_by_kind[kind] == before[kind] + 1, step
    assert_caches_equal(captured, eager, TOLERANCES[dtype])


@torch.inference_mode()
def test_a_decode_step_in_a_mixed_bucket_equals_eager() -> None:
    """A step of one token a sequence has the eager logits in a decode and in a mixed bucket."""
    captured = make_graphs(torch.float32, captured=True)
    eager = make_graphs(torch.float32, captured=False)
    captured.runner.capture()
    step: Step = [(start, 1) for start in (3, 100, 630)]
    expected = eager.run(step)
    uniform = captured.run(step)
    # The inputs of the uniform run are still in the buffers, padded to the bucket of 4.
    captured.buffers.wait_for_upload()
    mixed = captured.runner.run(3, 3, 3, tokens_per_seq=0)
    torch.testing.assert_close(uniform, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mixed, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_replays_repeat_bit_for_bit(dtype: torch.dtype) -> None:
    captured = make_graphs(dtype, captured=True)
    captured.runner.capture()
    for step, kind in STEPS:
        if kind == "captured":
            assert torch.equal(captured.run(step), captured.run(step)), step


@torch.inference_mode()
def test_capture_writes_to_the_null_block_only() -> None:
    graphs = make_graphs(torch.float32, captured=True)
    untouched = make_graphs(torch.float32, captured=False)
    graphs.runner.capture()
    torch.cuda.synchronize()
    assert_caches_equal(graphs, untouched, 0.0)


@torch.inference_mode()
def test_buckets_share_their_memory() -> None:
    """Buckets share the memory of their logits, which is large with a large vocabulary."""
    graphs = make_graphs(torch.bfloat16, captured=True, vocab_size=32768)
    allocated: list[int] = []
    keys: list[GraphKey] = []

    def progress(key: GraphKey) -> None:
        keys.append(key)
        allocated.append(torch.cuda.memory_allocated())

    graphs.runner.capture(progress)
    assert keys == [
        *(GraphKey(size, MAX_SEQS, 0) for size in sorted(MIXED_SIZES, reverse=True)),
        *(GraphKey(size, size, 1) for size in sorted(DECODE_SIZES, reverse=True)),
    ]
    assert allocated == [allocated[0]] * len(keys)


@pytest.mark.parametrize("form", list(GraphForm))
@torch.inference_mode()
def test_nothing_compiles_after_the_capture(form: GraphForm) -> None:
    monitor = CompileMonitor()
    try:
        graphs = make_graphs(torch.bfloat16, captured=True, form=form)
        tokens = warm_up_tokens(torch.bfloat16)
        graphs.runner.warm_up([StepSizes(count, 1, 1) for count in tokens])
        graphs.runner.capture()
        assert monitor.compiles.total() > 0
        monitor.mark_ready()
        numbers = random.Random(0)
        for _ in range(200):
            assert torch.isfinite(graphs.run(random_step(numbers))).all()
        assert monitor.late_compiles == []
        assert graphs.runner.steps_by_kind["captured"] > 0
        assert graphs.runner.steps_by_kind["compiled"] > 0
    finally:
        monitor.close()


@torch.inference_mode()
def test_steps_leave_no_memory_behind() -> None:
    graphs = make_graphs(torch.float16, captured=True, form=GraphForm.layer)
    graphs.runner.capture()
    numbers = random.Random(1)
    for _ in range(100):
        graphs.run(random_step(numbers))
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        graphs.run(random_step(numbers))
    assert torch.cuda.memory_allocated() == before


def random_step(numbers: random.Random) -> Step:
    """Half of the steps are decode only. The others have chunks of prompts, up to MAX_TOKENS."""
    most = MAX_BLOCKS * 16 - 1
    step: Step = [(numbers.randint(0, most), 1) for _ in range(numbers.randint(1, MAX_SEQS))]
    if numbers.random() < 0.5:
        return step
    room = MAX_TOKENS - len(step)
    for index in range(numbers.randint(1, len(step))):
        new = numbers.randint(0, room)
        room -= new
        step[index] = (numbers.randint(0, most - new), 1 + new)
    return step
