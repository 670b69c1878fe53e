"""Sampling against its definitions in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops.sampling.plain_sampling import (
    apply_penalties,
    apply_token_bitmask,
    sample_filtered,
    sample_full,
    uniform_number,
)


def draws(logits: list[float], count: int, **filters: float) -> list[int]:
    """Token ids for `count` evenly spread uniform numbers."""
    rows = torch.tensor([logits]).repeat(count, 1)
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    if not filters:
        return sample_full(rows, uniforms).tolist()
    return sample_filtered(
        rows,
        uniforms,
        torch.full((count,), int(filters.get("top_k", len(logits)))),
        torch.full((count,), float(filters.get("top_p", 1.0)), dtype=torch.float64),
        torch.full((count,), float(filters.get("min_p", 0.0)), dtype=torch.float64),
    ).tolist()


def test_uniform_numbers_depend_on_seed_and_position_only() -> None:
    assert uniform_number(1, 2) == uniform_number(1, 2)
    numbers = {uniform_number(seed, position) for seed in (0, 1, -5) for position in range(50)}
    assert len(numbers) == 150
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / 150 - 0.5) < 0.1


def test_full_sampling_has_the_softmax_frequencies() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    ids = draws([math.log(p) for p in probabilities], 1000)
    assert [ids.count(token) / 1000 for token in range(4)] == pytest.approx(probabilities, abs=2e-3)


def test_impossible_tokens_are_never_drawn() -> None:
    rows = torch.tensor([[-math.inf, 0.0, -math.inf]]).repeat(2, 1)
    uniforms = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert sample_full(rows, uniforms).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 2}, {0: 0.625, 1: 0.375}),
        ({"top_k": 1}, {0: 1.0}),
        ({"top_p": 0.5}, {0: 1.0}),
        ({"top_p": 0.51}, {0: 0.625, 1: 0.375}),
        ({"min_p": 0.5}, {0: 0.625, 1: 0.375}),
        ({"min_p": 1.0}, {0: 1.0}),
        # top-p counts within what top-k left: 0.5 / 0.8 = 0.625 is already enough.
        ({"top_k": 2, "top_p": 0.6}, {0: 1.0}),
    ],
)
def test_filters(filters: dict[str, float], expected: dict[int, float]) -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    ids = draws([math.log(p) for p in probabilities], 800, **filters)
    assert set(ids) == set(expected)
    for token, share in expected.items():
        assert ids.count(token) / 800 == pytest.approx(share, abs=3e-3)


def filtered_set(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn, by the definitions, in float64 and plain Python."""
    order = sorted(range(len(row)), key=lambda i: -row[i].item())
    mass = [math.exp(row[i].item()) for i in order]
    total = sum(mass)
    if top_k:
        order, mass = order[:top_k], mass[:top_k]
        total = sum(mass)
    kept, before = [], 0.0
    for i, m in zip(order, mass, strict=True):
        if before / total >= top_p and kept:
            break
        kept.append((i, m))
        before += m
    return {i for i, m in kept if m >= kept[0][1] * min_p}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([5, 600, 1500]),
    scale=st.sampled_from([0.1, 3.0]),
    top_k=st.sampled_from([0, 1, 7, 700]),
    top_p=st.sampled_from([1.0, 0.97, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
)
def test_a_draw_is_in_the_allowed_set(
    seed: int, vocabulary: int, scale: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Flat distributions over large vocabularies take the path that sorts everything."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(vocabulary, generator=generator) * scale
    limit = top_k if 0 < top_k < vocabulary else 0
    allowed = filtered_set(row, limit, top_p, min_p)
    uniforms = torch.rand(16, generator=generator, dtype=torch.float64)
    drawn = sample_filtered(
        row.repeat(16, 1),
        uniforms,
        torch.full((16,), limit or vocabulary),
        torch.full((16,), top_p, dtype=torch.float64),
        torch.full((16,), min_p, dtype=torch.float64),
    )
    # float32 and float64 sums may disagree at the border, so the filters may be 1e-6 wider.
    slack = filtered_set(row, limit, min(1.0, top_p + 1e-6), max(0.0, min_p - 1e-6))
    assert set(drawn.tolist()) <= allowed | slack


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 2000, generator=generator)
    uniforms = torch.rand(5, generator=generator, dtype=torch.float64)
    top_k = torch.tensor([2000, 5, 2000, 900, 2000])
    top_p = torch.tensor([0.9, 1.0, 0.2, 0.7, 1.0], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.3], dtype=torch.float64)
    together = sample_filtered(rows, uniforms, top_k, top_p, min_p).tolist()
    alone = [
        sample_filtered(
            *(column[i : i + 1] for column in (rows, uniforms, top_k, top_p, min_p))
        ).item()
        for i in range(5)
    ]
    assert together == alone


def test_penalties() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 1.0, 0.5])
    counts = torch.tensor([1, 2, 0, 0, 0], dtype=torch.int32)
    in_prompt = torch.tensor([False, False, True, False, False])
    apply_penalties(logits, counts, in_prompt, repetition=2.0, presence=0.5, frequency=0.25)
    assert logits.tolist() == [1.0 - 0.25 - 0.5, -4.0 - 0.5 - 0.5, 0.5, 1.0, 0.5]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_bitmask(vocab_size: int) -> None:
    """One bit a token, lowest first, for the rows that have a mask."""
    logits = torch.randn(4, vocab_size)
    before = logits.clone()
    allowed = torch.rand(2, vocab_size) < 0.5
    bits = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        bits[row, token // 32] |= 1 << (token % 32)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    apply_token_bitmask(logits, torch.tensor([3, 1]), bits)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert torch.equal(logits[[3, 1]], before[[3, 1]].masked_fill(~allowed, -math.inf))
