"""The op `row_logprobs`: its kernels against definitions, and the bits of a row in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.logprobs import row_logprobs as module
from ostinato.ops.logprobs.row_logprobs import RowLogprobs
from tests.ops.kernel_checks import EACH_LEVEL, ops_of
from tests.ops.logprobs.logit_rows import check, make_rows

Score = Callable[[Tensor, Tensor, int], RowLogprobs]


def kernel(isa: str) -> Score:
    if isa == "plain":
        return lambda *arguments: RowLogprobs(*module._plain(*arguments))
    op = ops_of("core", isa, score="row_logprobs").score
    return lambda *arguments: RowLogprobs(*op(*arguments))


@pytest.mark.parametrize("isa", [*EACH_LEVEL, "plain"])
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([1, 5, 255, 256, 600, 5000, 70_000]),
    form=st.sampled_from(["normal", "ties", "masked", "none"]),
    num_tokens=st.integers(1, 5),
    top=st.sampled_from([0, 1, 5, 20]),
)
def test_results_are_the_definitions(
    isa: str, seed: int, vocabulary: int, form: str, num_tokens: int, top: int
) -> None:
    check(kernel(isa), seed, vocabulary, form, num_tokens, min(top, vocabulary))


@pytest.mark.parametrize("isa", EACH_LEVEL)
@settings(max_examples=8)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_every_batch(isa: str, data: st.DataObject) -> None:
    """With 65,536 logits and more, `torch.logsumexp` would divide few rows between threads."""
    vocabulary = data.draw(st.sampled_from([300, 65_536, 70_001]), label="vocabulary")
    rows = make_rows(data.draw(st.integers(0, 10_000), label="seed"), 33, vocabulary, "normal")
    ids = torch.arange(66).reshape(33, 2) % vocabulary
    whole = [column.clone() for column in kernel(isa)(rows, ids, 3)]
    some = data.draw(st.lists(st.integers(0, 32), min_size=1, max_size=9), label="rows")
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.sampled_from([1, 2]), label="threads"))
    try:
        parts = kernel(isa)(rows[some], ids[some], 3)
    finally:
        torch.set_num_threads(before)
    for part, column in zip(parts, whole, strict=True):
        assert torch.equal(part, column[some])


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize(
    ("token", "top", "message"),
    [(9, 1, r"token_ids\[0, 0\] = 9 must be in \[0, 9\)"), (0, 10, r"top must be in \[0, 9\]")],
)
def test_what_is_out_of_range_is_refused(isa: str, token: int, top: int, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        kernel(isa)(torch.zeros(1, 9), torch.tensor([[token]]), top)


@pytest.mark.parametrize("isa", [*EACH_LEVEL, "plain"])
def test_a_token_that_is_not_a_number_is_impossible(isa: str) -> None:
    logits = torch.tensor([[math.nan, 1.0, -math.inf, 1.0]])
    found = kernel(isa)(logits, torch.tensor([[0, 1, 2, 3]]), 4)
    assert found.logprobs[0].exp().tolist() == pytest.approx([0.0, 0.5, 0.0, 0.5])
    assert found.ranks.tolist() == [3]
    assert set(found.top_ids[0, :2].tolist()) == {1, 3}
    assert found.top_logprobs[0, 2:].tolist() == [-math.inf, -math.inf]
