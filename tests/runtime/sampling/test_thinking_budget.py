"""The thinking budget counts the tokens between an initial start marker and the end marker."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.sampling.sampler import Sampler
from ostinato.runtime.sampling.thinking_budget import ThinkingBudget
from ostinato.runtime.types.params import SamplingParams, ThinkingLimit
from ostinato.runtime.types.request import Request

BEGIN, END = 5, 37


def limit(max_tokens: int, *, is_open: bool = False) -> ThinkingLimit:
    return ThinkingLimit(
        max_tokens=max_tokens, begin_token_id=BEGIN, end_token_id=END, is_open=is_open
    )


@given(st.lists(st.sampled_from([1, 2, BEGIN, END])), st.integers(0, 5), st.booleans())
def test_it_ends_after_so_many_tokens(token_ids, max_tokens, is_open):
    """An answer has at most `max_tokens` tokens between the markers, also after it was resumed."""
    budget = ThinkingBudget(limit(max_tokens, is_open=is_open))
    written: list[int] = []
    for token_id in token_ids:
        again = ThinkingBudget(limit(max_tokens, is_open=is_open), written)
        assert (again.is_spent, again.is_over) == (budget.is_spent, budget.is_over)
        written.append(END if budget.is_spent else token_id)
        budget.take(written[-1])
    thoughts = written if is_open else written[1:]
    if is_open or written[:1] == [BEGIN]:
        length = thoughts.index(END) if END in thoughts else len(thoughts)
        assert length <= max_tokens
        assert budget.is_over == (END in thoughts)
    else:
        assert written == token_ids  # it does not reason: nothing is changed
        assert budget.is_over == bool(written)


def test_only_the_end_is_drawn_when_it_is_spent():
    sampler = Sampler(vocab_size=64, max_num_seqs=2, device=torch.device("cpu"))
    for row, thinking in enumerate((limit(1, is_open=True), None)):
        params = SamplingParams(temperature=0.0, max_tokens=9, thinking=thinking)
        request = Request(request_id=f"{row}", prompt_token_ids=[1], sampling=params)
        sampler.admit(row, request, [])

    def draw(position: int) -> list[int]:
        logits = torch.zeros(2, 64)
        logits[:, 9] = 1.0
        return sampler.sample(logits, [0, 1], [position, position]).token_ids

    assert [draw(position) for position in range(1, 5)] == [[9, 9], [END, 9], [9, 9], [9, 9]]
