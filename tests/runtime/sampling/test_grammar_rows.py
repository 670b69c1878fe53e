"""A row's grammar: forced tokens are computed once, and an earlier answer is taken in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import StructuredOutputsParams
from ostinato.runtime.grammar.matcher import RequestMatcher
from ostinato.runtime.sampling.grammar_rows import forced_tokens
from ostinato.runtime.types.request import Request
from tests.runtime.mask_clock import MaskClock
from tests.runtime.sampling.test_grammar_masks import DEFAULTS, EOS, VOCAB_SIZE, Rows


class Wrapped:
    """A matcher, some of whose methods a test replaces."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_forced_tokens_are_computed_once_and_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later tokens of a row take from the tokens that were computed; others are computed again."""
    clock = MaskClock(monkeypatch)
    rows = Rows(3, 6, StructuredOutputsParams(regex="[ab]a{200}")).rows
    computed: list[int] = []

    class Counted(Wrapped):
        def __init__(self, index: int, matcher: Any) -> None:
            super().__init__(matcher)
            self._index = index

        def compute_ff_tokens(self) -> list[int]:
            computed.append(self._index)
            clock.seconds += 0.6e-3
            tokens: list[int] = self._matcher.compute_ff_tokens()
            return tokens

    for index, row in enumerate(rows):
        row.matcher = Counted(index, row.matcher)
    letter_a, letter_b = 67, 68
    assert forced_tokens(rows) == {}
    assert computed == [0, 1]  # no time is left for row 2
    for row in rows:
        row.take(letter_b)
    for _ in range(2):  # what was computed is returned again, and takes no time
        forced_tokens(rows)
    assert sorted(computed) == [0, 0, 1, 1, 2]
    for row in rows:
        row.take(letter_a)
    computed.clear()
    forced = forced_tokens(rows)
    assert computed == []
    assert list(forced) == [0, 1, 2]
    for index, row in enumerate(rows):
        assert row.matcher is not None
        fresh = row.matcher.compute_ff_tokens()
        assert len(fresh) == 199
        assert forced[index] == fresh[:32]
    computed.clear()
    rows[0]._forced[-1] = letter_b  # a guess that differs from the token that is drawn
    rows[0].take(letter_a)
    assert rows[0].forced_token_ids() == [letter_a] * 32
    assert computed == [0]


def test_forced_tokens_that_take_long_are_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That holds for all rows with the grammar. What was computed is used up."""
    clock = MaskClock(monkeypatch)
    rows = Rows(2, 6, StructuredOutputsParams(regex="[ab]a{200}")).rows
    computed: list[int] = []

    class Slow(Wrapped):
        def compute_ff_tokens(self) -> list[int]:
            computed.append(1)
            clock.seconds += 0.05
            tokens: list[int] = self._matcher.compute_ff_tokens()
            return tokens

    letter_a, letter_b = 67, 68
    for row in rows:
        row.take(letter_b)
        row.matcher = Slow(row.matcher)
    assert rows[0].forced_token_ids() == [letter_a] * 32
    assert rows[1].forced_token_ids() == []
    rows[0].take(letter_a)
    assert rows[0].forced_token_ids() == [letter_a] * 32
    assert len(computed) == 1
    assert rows[0].ending is None


@pytest.mark.parametrize("num_kept", [0, 40, 200])
def test_a_matcher_takes_the_answer_so_far_in_pieces(
    num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`num_kept` tokens were taken before the row was lost. Until all are, it draws no token."""
    clock = MaskClock(monkeypatch)
    sizes: list[int] = []

    class Timed(Wrapped):
        def consume_tokens(self, token_ids: list[int]) -> bool:
            sizes.append(len(token_ids))
            clock.seconds += 1e-4 * len(token_ids)
            return bool(self._matcher.consume_tokens(token_ids))

    rows = Rows(1, 6, StructuredOutputsParams(regex="a{300}"))
    built = rows.rows[0].matcher
    assert built is not None
    progress = RequestMatcher(Timed(built.deep_copy()))  # pyright: ignore[reportArgumentType]
    letter, answer = 67, [67] * 200
    progress.matcher.consume_tokens(answer[:num_kept])
    progress.num_taken = num_kept
    sizes.clear()
    rows.masks._matchers = lambda request: progress
    request = Request(
        request_id="r", prompt_token_ids=[5], sampling=DEFAULTS, eos_token_ids=(EOS,), grammar="a"
    )
    row = rows.masks.admit(request, answer)
    assert row is not None
    num_steps = 0
    while True:
        num_steps += 1
        logits = torch.zeros(1, VOCAB_SIZE)
        before = clock.seconds
        rows.masks.begin_step()
        held = rows.masks.apply(logits, [row], [201])
        assert clock.seconds - before < 0.0035
        assert held == ({0} if row.is_behind else set())
        if not held:
            break
        assert row.forced_token_ids() == []
    assert sum(sizes) == 200 - num_kept
    assert max(sizes, default=0) <= 5  # half a millisecond
    assert (200 - num_kept) // 26 <= num_steps <= 1 + (200 - num_kept) // 20
    assert row.take(int(logits[0].isfinite().nonzero()[-1])) is None
    assert progress.num_taken == 201
    again = rows.masks.admit(request, [*answer, letter])
    assert again is not None
    assert not again.is_behind


def test_an_answer_that_the_grammar_does_not_allow_ends_with_an_error() -> None:
    rows = Rows(1, 6, StructuredOutputsParams(regex="a{300}"))
    request = Request(
        request_id="r", prompt_token_ids=[5], sampling=DEFAULTS, eos_token_ids=(EOS,), grammar="a"
    )
    row = rows.masks.admit(request, [67, 68, 67])
    assert row is not None
    logits = torch.zeros(1, VOCAB_SIZE)
    rows.masks.begin_step()
    assert rows.masks.apply(logits, [row], [4]) == set()
    assert row.take(67) == row.ending
    assert row.ending
