"""Verification of all rows at once keeps the tokens that a loop over the drafts keeps."""

from __future__ import annotations

import random

import pytest
import torch

from ostinato.runtime.sampling.pending_tokens import PendingVerification
from ostinato.runtime.sampling.sampler import Sampler
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request


def kept(drawn: list[int], drafts: list[list[int]]) -> list[list[int]]:
    """The valid tokens of each sequence, by a loop."""
    found: list[list[int]] = []
    rows = iter(drawn)
    for draft in drafts:
        own = [next(rows) for _ in range(1 + len(draft))]
        count = next((i for i, token in enumerate(draft) if own[i] != token), len(draft))
        found.append(own[: count + 1])
    return found


@pytest.mark.parametrize("vocab_size", [1, 2, 5])
def test_the_tokens_are_those_of_a_loop(vocab_size: int) -> None:
    numbers = random.Random(vocab_size)
    for _ in range(40):
        drafts = [
            [numbers.randrange(vocab_size) for _ in range(numbers.choice((0, 1, 3, 7)))]
            for _ in range(numbers.randint(1, 9))
        ]
        drafts[0] = drafts[0] or [0]
        num_rows = sum(1 + len(draft) for draft in drafts)
        drawn = [numbers.randrange(vocab_size) for _ in range(num_rows)]
        # A sequence's last row has no draft: the entry for it may be any token, even the drawn one.
        following = [token for draft in drafts for token in (*draft, numbers.randrange(vocab_size))]
        token_ids = torch.tensor(drawn)
        pending = PendingVerification(
            token_ids, torch.tensor(following), list(map(len, drafts)), None
        )
        token_ids.fill_(-1)  # the next launch overwrites them
        expected = kept(drawn, drafts)
        assert pending.last_tokens.tolist() == [tokens[-1] for tokens in expected]
        result = pending.read()
        assert result.token_ids == [token for tokens in expected for token in tokens]
        assert result.counts == [len(tokens) for tokens in expected]


def test_rows_that_a_cpu_draws_at_once_keep_the_tokens_of_single_draws() -> None:
    numbers = random.Random(0)
    vocab_size, temperatures = 40, (0.0, 0.8, 1.3)
    sampler = Sampler(max_num_seqs=3, vocab_size=vocab_size, device=torch.device("cpu"))
    for row, temperature in enumerate(temperatures):
        sampling = SamplingParams(temperature=temperature, seed=row, logprobs=2 if row else None)
        request = Request(request_id=str(row), prompt_token_ids=[1], sampling=sampling)
        sampler.admit(row, request, [])
    num_kept = 0
    for step in range(30):
        counts = [numbers.choice((0, 1, 3)) for _ in temperatures]
        counts[0] = counts[0] or 1
        rows = [row for row, count in enumerate(counts) for _ in range(1 + count)]
        positions = [step + place for count in counts for place in range(1 + count)]
        logits = torch.randn(len(rows), vocab_size)
        single = [
            sampler.sample(logits[index : index + 1].clone(), [row], [position])
            for index, (row, position) in enumerate(zip(rows, positions, strict=True))
        ]
        drawn = iter(one.token_ids[0] for one in single)
        drafts: list[list[int]] = []
        for count in counts:
            own = [next(drawn) for _ in range(1 + count)][:count]
            drafts.append([t if numbers.random() < 0.7 else (t + 1) % vocab_size for t in own])
        expected = kept([one.token_ids[0] for one in single], drafts)
        sampler.stage(rows, positions, drafts)
        pending = sampler.launch(logits.clone())
        assert pending.last_tokens == [tokens[-1] for tokens in expected]
        result = pending.read()
        assert result.token_ids == [token for tokens in expected for token in tokens]
        assert result.counts == [len(tokens) for tokens in expected]
        begins = [rows.index(row) for row in range(len(temperatures))]
        alone = [
            None if one.logprobs is None else one.logprobs[0]
            for begin, tokens in zip(begins, expected, strict=True)
            for one in single[begin : begin + len(tokens)]
        ]
        assert result.logprobs is None or result.logprobs == alone
        assert (result.logprobs is None) == all(one is None for one in alone)
        num_kept += len(result.token_ids)
    assert 120 < num_kept < 200  # some drafts are right, and some are wrong
