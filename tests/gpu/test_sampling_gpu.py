"""Sampling on a CUDA device: the tokens are those of the CPU, and its memory is as planned."""

from __future__ import annotations

import pytest
import torch

from ostinato.graphs.recorder import CudaRecorder
from ostinato.graphs.sampling_graph import GraphSampler
from ostinato.graphs.timing import make_timer
from ostinato.ops.sampling.plain_sampling import sample_full
from ostinato.ops.sampling.sample_rows import sampling_workspace_bytes
from ostinato.ops.sampling.triton_unsorted_draw import draw_unsorted
from ostinato.runtime.memory.measured_memory import CudaMemory
from tests.graphs.sampling_steps import MAX_SEQS, VOCAB, check_draws

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("captured", [False, True])
@torch.inference_mode()
def test_draws_are_those_of_the_cpu(captured: bool) -> None:
    static = torch.zeros(MAX_SEQS, VOCAB, device=CUDA)
    token_sampler = GraphSampler(static, recorder=CudaRecorder() if captured else None)
    assert token_sampler.capture() == []
    check_draws(token_sampler, static, num_steps=100)
    before = torch.cuda.memory_allocated()
    check_draws(token_sampler, static, num_steps=100)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("rows", [1, 3, 256])
@torch.inference_mode()
def test_full_draws_of_a_large_vocabulary_are_those_of_float64(rows: int) -> None:
    generator = torch.Generator(CUDA).manual_seed(rows)
    logits = torch.randn(rows, 151_936, device=CUDA, generator=generator) * 2.5
    uniforms = torch.rand(rows, device=CUDA, dtype=torch.float64, generator=generator)
    ones = torch.ones_like(uniforms)
    drawn = draw_unsorted(logits, ones, ones * 0.6, uniforms)
    expected = [
        sample_full(row / 0.6, u)
        for row, u in zip(logits.split(32), uniforms.split(32), strict=True)
    ]
    assert torch.equal(drawn, torch.cat(expected))
    assert torch.equal(draw_unsorted(logits, ones * 0.0, ones, uniforms), logits.argmax(-1))


@torch.inference_mode()
def test_a_draw_stays_within_its_memory() -> None:
    rows, vocab_size = 64, 151_936
    token_sampler = GraphSampler(torch.randn(rows, vocab_size, device=CUDA))
    token_sampler.run_largest()  # libraries allocate their workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_sampler.run_largest()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= sampling_workspace_bytes(rows, vocab_size)


@pytest.mark.whole_device
def test_the_peak_of_a_call() -> None:
    def call() -> None:
        torch.empty(64 << 20, dtype=torch.uint8, device=CUDA)

    memory = CudaMemory()
    free = memory.free()
    assert 64 << 20 <= memory.peak_of(call) <= 96 << 20
    assert abs(memory.free() - free) <= 4 << 20  # the call's memory was given back


def test_a_timer_reads_the_devices_clock() -> None:
    timer = make_timer(CUDA)
    for _ in range(3):
        timer.begin()
        torch.cuda._sleep(20_000_000)  # cycles: some 10 ms
        timer.end()
    torch.cuda.synchronize()
    assert 0.015 < timer.seconds < 0.15
