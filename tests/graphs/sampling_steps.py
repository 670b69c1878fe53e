"""Draws random sampling parameters, and compares a step's tokens with each row sampled alone."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from ostinato.graphs.sampling_graph import EagerSampler, GraphSampler
from ostinato.ops.sampling.sample_rows import RowSampling, sample_path

VOCAB, MAX_SEQS = 1500, 12


def random_draws(numbers: random.Random, count: int, vocab_size: int = VOCAB) -> list[RowSampling]:
    draws = []
    for _ in range(count):
        top_k = numbers.choice([vocab_size, vocab_size, 1, 7, 512, 513, 900])
        top_p = numbers.choice([1.0, 1.0, 0.3, 0.95])
        min_p = numbers.choice([0.0, 0.0, 0.02])
        temperature = numbers.choice([0.0, 0.7, 1.0, 3.0])
        path = sample_path(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, vocab_size=vocab_size
        )
        draws.append(
            RowSampling(path, max(temperature, 1e-3), top_k, top_p, min_p, numbers.random())
        )
    return draws


def check_draws(token_sampler: GraphSampler, static: Tensor, num_steps: int) -> None:
    """Check steps of all sizes and mixtures; rows left by a larger step must have no effect.

    Args:
        token_sampler: samples from `static`.
        static: [MAX_SEQS, VOCAB] float32, on any device.
        num_steps: number of steps to compare.
    """
    numbers = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    alone = EagerSampler()
    for _ in range(num_steps):
        count = numbers.randint(1, MAX_SEQS)
        logits = torch.randn(count, VOCAB, generator=generator) * 3
        draws = random_draws(numbers, count)
        token_sampler.stage(draws)
        if numbers.random() < 0.5:  # a captured model writes its logits there
            static[:count] = logits.to(static.device)
            got = token_sampler.run(static[:count])
        else:
            got = token_sampler.run(logits.to(static.device))
        expected: list[int] = []
        for row in range(count):
            alone.stage(draws[row : row + 1])
            expected += alone.run(logits[row : row + 1]).tolist()
        assert got.tolist() == expected, draws
