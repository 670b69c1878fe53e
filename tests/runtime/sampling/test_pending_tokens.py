"""Verification on the device keeps the tokens that a loop over the drafts keeps."""

from __future__ import annotations

import random

import pytest
import torch

from ostinato.runtime.sampling.pending_tokens import PendingVerification


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
