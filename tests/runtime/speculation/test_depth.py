"""The number of drafts maximises the expected tokens a second. It is 0 if drafts do not pay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.speculation.acceptance import AcceptanceRates, OwnRate
from ostinato.runtime.speculation.depth import (
    Candidate,
    DepthChooser,
    DraftRecord,
    FairStep,
    StepLoad,
)
from ostinato.runtime.speculation.proposer import Draft, DraftSource
from tests.runtime.cost_tables import make_table

MAX_DRAFTS = 7
HALF = Draft([1] * MAX_DRAFTS, DraftSource.ngram, 4)


def table(token_ms: float, plain_ms: float = 4.0) -> CostTable:
    """A table in which every token but the first of a sequence adds `token_ms`."""
    base = make_table(step_ms=plain_ms, token_ms=0.0, seq_ms=0.0, pair_us=0.0)
    return CostTable.from_medians(
        tokens=base.tokens,
        seqs=base.seqs,
        contexts=base.contexts,
        seconds=base.seconds,
        decode=base.decode,
        verify={(q, s): token_ms * s * (q - 1) / 1e3 for q in (2, 4, 8) for s in (1, 4, 16)},
    )


def candidates(count: int, draft: Draft = HALF) -> list[Candidate]:
    return [Candidate(draft, DraftRecord()) for _ in range(count)]


def teach(chooser: DepthChooser, one: Candidate, num_accepted: int, times: int = 300) -> None:
    for _ in range(times):
        chooser.verified(one, MAX_DRAFTS, num_accepted)


def test_all_drafts_are_verified_without_measured_costs() -> None:
    assert DepthChooser(None, MAX_DRAFTS).choose(StepLoad(2, 0.0), candidates(2)) == [7, 7]


def test_drafts_that_are_right_go_deep_and_wrong_ones_end() -> None:
    chooser = DepthChooser(table(0.2), MAX_DRAFTS)
    (one,) = candidates(1)
    teach(chooser, one, MAX_DRAFTS)
    assert chooser.choose(StepLoad(1, 0.0), [one]) == [7]
    teach(chooser, one, 0)
    counts = [chooser.choose(StepLoad(1, 0.0), [one])[0] for _ in range(1000)]
    assert set(counts) == {0, 1}
    assert sum(counts) == 1000 // one.record.wait == 3  # one token is tried now and then


def test_a_batch_that_is_bound_by_arithmetic_gets_no_drafts() -> None:
    """A draft token costs 1/16 of a step of 16 sequences, so an uncertain draft does not pay."""
    load = StepLoad(16, 0.0)
    costs = table(4.0 / 16)
    chooser = DepthChooser(costs, MAX_DRAFTS)
    assert chooser.choose(load, candidates(16)) == [0] * 16
    alone = DepthChooser(costs, MAX_DRAFTS).choose(StepLoad(1, 0.0), candidates(1))
    assert alone[0] > 0


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 7)), min_size=1, max_size=3),
    st.floats(0.01, 3.0),
)
def test_the_choice_is_the_best_of_all(ones: list[tuple[int, int]], token_ms: float) -> None:
    """The choice is compared with every combination of depths."""
    chooser = DepthChooser(table(token_ms), MAX_DRAFTS)
    given_ones = []
    for strength, (num_right, length) in enumerate(ones):
        draft = Draft([1] * length, DraftSource.ngram, 2 + 2 * strength)
        given_ones.append(Candidate(draft, DraftRecord()))
        for _ in range(20):
            chooser.verified(given_ones[-1], length, min(num_right, length))
    load = StepLoad(len(ones) + 1, 0.0)
    chances = [chooser._rates.survival(one.draft, one.record.own) for one in given_ones]

    def rate(counts: tuple[int, ...]) -> float:
        tokens = load.num_decodes + sum(
            sum(chances[index][:count]) for index, count in enumerate(counts)
        )
        return tokens / chooser.seconds(load, sum(counts))

    best = max(map(rate, product(*(range(length + 1) for _, length in ones))))
    chosen = tuple(chooser.choose(load, given_ones))
    assert rate(chosen) == pytest.approx(best)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 7)), min_size=1, max_size=2),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 7)), min_size=1, max_size=2),
    st.floats(0.01, 3.0),
    st.floats(1.0, 3.0),
)
def test_large_requests_get_the_best_drafts_that_fit_beside_a_fair_step(
    small: list[tuple[int, int]],
    large: list[tuple[int, int]],
    token_ms: float,
    max_slowdown: float,
) -> None:
    """Decodes of large requests do not count when drafts of the small ones are chosen."""
    chooser = DepthChooser(table(token_ms), MAX_DRAFTS)
    ones = []
    for place, (num_right, length) in enumerate([*small, *large]):
        draft = Draft([1] * length, DraftSource.ngram, 2 + 2 * place)
        ones.append(Candidate(draft, DraftRecord(), is_large=place >= len(small)))
        for _ in range(20):
            chooser.verified(ones[-1], length, min(num_right, length))
    chances = [chooser._rates.survival(one.draft, one.record.own) for one in ones]
    load = StepLoad(len(ones) + 4, 0.0, has_large=True)
    fair = FairStep(len(small) + 1, 1, max_slowdown)

    def rate(counts: Iterable[int], num_decodes: int) -> float:
        counts = tuple(counts)
        tokens = sum(sum(one[:count]) for one, count in zip(chances, counts, strict=False))
        return (num_decodes + tokens) / chooser.seconds(load, sum(counts))

    def depths(some: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        return product(*(range(length + 1) for _, length in some))

    chosen = tuple(chooser.choose(load, ones, fair))
    first = chosen[: len(small)]
    best = max(rate(counts, fair.num_decodes) for counts in depths(small))
    assert rate(first, fair.num_decodes) == pytest.approx(best)
    limit = max_slowdown * chooser.seconds(StepLoad(fair.num_decodes, 0.0), sum(first))
    allowed = [
        (*first, *counts)
        for counts in depths(large)
        if not any(counts) or chooser.seconds(load, sum(first) + sum(counts)) <= limit
    ]
    assert chosen in allowed
    best = max(rate(counts, load.num_decodes) for counts in allowed)
    assert rate(chosen, load.num_decodes) == pytest.approx(best)


@given(st.lists(st.integers(0, MAX_DRAFTS), max_size=50), st.integers(1, MAX_DRAFTS))
def test_later_drafts_are_never_likelier(accepted: list[int], length: int) -> None:
    rates, own = AcceptanceRates(MAX_DRAFTS), OwnRate()
    for num_accepted in accepted:
        rates.add(HALF, MAX_DRAFTS, num_accepted)
        own.add(min(num_accepted + 1, MAX_DRAFTS), num_accepted)
    chances = rates.survival(HALF._replace(token_ids=[1] * length), own)
    assert chances == sorted(chances, reverse=True)
    assert all(0.0 <= chance <= 1.0 for chance in chances)


def test_drafts_pause_when_their_steps_are_slower_than_plain_ones() -> None:
    chooser = DepthChooser(table(0.1), MAX_DRAFTS)
    load, ones = StepLoad(1, 0.0), candidates(1)
    for _ in range(64):
        chooser.observe(load, 7, 0, 0.012)
    assert chooser.is_paused
    assert chooser.num_pauses == 1
    assert chooser.choose(load, ones) == [0]
    for _ in range(256):
        assert chooser.is_paused
        chooser.pass_step(1)
    assert not chooser.is_paused


def test_drafts_pause_when_looking_for_them_takes_longer_than_they_save() -> None:
    """Steps without a draft count too. The pause doubles after each loss, up to 1024 steps."""
    chooser = DepthChooser(table(0.1), MAX_DRAFTS)
    load = StepLoad(1, 0.0, lookup_seconds=0.004)
    for pause in (256, 512, 1024, 1024):
        for _ in range(64):
            chooser.observe(load, 1, 1, chooser.seconds(load, 1))
            chooser.observe(load, 0, 0, chooser.seconds(load, 0))
        num_paused = 0
        while chooser.is_paused:
            chooser.pass_step(1)
            num_paused += 1
        assert num_paused == pause


def test_a_large_request_pauses_no_drafts_of_smaller_ones() -> None:
    chooser = DepthChooser(table(0.1), MAX_DRAFTS)
    shared, fair = StepLoad(8, 0.0, has_large=True), FairStep(2, 1, 1.5)
    for _ in range(64):
        chooser.observe(shared, 7, 0, chooser.seconds(shared, 7))
    assert not chooser.is_paused
    for _ in range(64):  # without the smaller one
        chooser.observe(StepLoad(8, 0.0), 7, 0, chooser.seconds(shared, 7))
    assert chooser.is_paused
    (small,), (large,) = candidates(1), candidates(1)
    both = [small, large._replace(is_large=True)]
    assert chooser.choose(StepLoad(8, 0.0), both) == [0, 0]
    counts = chooser.choose(shared, both, fair)
    assert counts[0] > 0
    assert counts[1] == 0
    chooser.pass_step(5)
    assert chooser.is_paused
    chooser.pass_step(4)  # half of the sequences with which the pause began
    assert not chooser.is_paused


def test_a_single_slow_step_pauses_no_drafts() -> None:
    """Ten seconds in which another program has the processor cost more than 63 drafts save."""
    chooser = DepthChooser(table(0.1), MAX_DRAFTS)
    load = StepLoad(1, 0.0)
    for index in range(64):
        slow_s = 10.0 if index == 30 else 0.0
        chooser.observe(load, 7, 7, chooser.seconds(load, 7) + slow_s)
    assert chooser.num_pauses == 0


def test_a_sequence_without_right_drafts_is_looked_up_in_one_step_of_eight() -> None:
    record = DraftRecord()
    assert [record.rests() for _ in range(24)] == [*[False] * 8, *([True] * 7 + [False]) * 2]
    record.add(3, 0)
    assert record.rests()
    record.add(3, 1)
    assert not any(record.rests() for _ in range(8))


def test_observed_seconds_correct_the_predicted_ones() -> None:
    chooser = DepthChooser(table(0.1), MAX_DRAFTS)
    load = StepLoad(1, 0.0)
    for _ in range(500):
        chooser.observe(load, 0, 0, 0.006)
        chooser.observe(load, 7, 7, 0.009)
    assert chooser.seconds(load, 0) == pytest.approx(0.006, rel=0.02)
    assert chooser.seconds(load, 7) == pytest.approx(0.009, rel=0.02)
    assert not chooser.is_paused


def test_a_surcharge_grows_with_drafts_and_sequences() -> None:
    costs = table(0.2)
    assert costs.verify_surcharge(1, 0) == 0.0
    assert costs.verify_surcharge(1, 3) == pytest.approx(0.0006)
    assert costs.verify_surcharge(1, 15) == pytest.approx(0.003)  # past the last measured point
    assert costs.verify_surcharge(2, 6) == pytest.approx(0.0012)
    assert costs.verify_surcharge(32, 32) == pytest.approx(0.0064)
    assert CostTable.from_bytes(costs.to_bytes()) == costs
    unmeasured = make_table()
    assert unmeasured.verify_surcharge(1, 3) == pytest.approx(0.0003)


@pytest.mark.parametrize(
    ("right", "model_ms", "is_better"),
    [((6, 1), 0.3, True), ((6, 1), 8.0, False), ((1, 6), 0.3, False)],
)
def test_the_drafter_with_more_tokens_a_second_goes_first(
    right: tuple[int, int], model_ms: float, is_better: bool
) -> None:
    """`right`: the numbers of right drafts of the model and of the text."""
    chooser = DepthChooser(table(0.1), MAX_DRAFTS, table(0.0, plain_ms=model_ms))
    model = Candidate(Draft([0] * MAX_DRAFTS, DraftSource.model), DraftRecord())
    text = Candidate(HALF, DraftRecord())
    for one, count in zip((model, text), right, strict=True):
        teach(chooser, one, count)
    assert chooser.is_better(model, text, 10.0) is is_better
    assert not DepthChooser(None, MAX_DRAFTS).is_better(model, text, 10.0)
