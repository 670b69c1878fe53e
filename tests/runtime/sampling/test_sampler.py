"""The sampler: the effect of each sampling parameter, and that rows do not affect each other."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.sampling_graph import GraphSampler, TokenSampler
from ostinato.ops.sampling.plain_sampling import uniform_number
from ostinato.runtime.sampling.sampled_row import SampledRow
from ostinato.runtime.sampling.sampler import Sampler, sampling_bytes
from ostinato.runtime.types.params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult
from ostinato.runtime.types.transcript_rules import TranscriptRules
from tests.graphs.test_capture import StaticRecorder
from tests.live_bytes import LiveBytes

VOCAB = 8
EOS = 0


def make_sampler(
    *params: SamplingParams, prompt: list[int] | None = None, outputs: list[int] | None = None
) -> Sampler:
    sampler = Sampler(max_num_seqs=len(params), vocab_size=VOCAB, device=torch.device("cpu"))
    for row, sampling in enumerate(params):
        request = Request(
            request_id=str(row),
            prompt_token_ids=prompt or [1],
            sampling=sampling,
            eos_token_ids=(EOS,),
        )
        sampler.admit(row, request, outputs or [])
    return sampler


def sample(sampler: Sampler, rows: list[list[float]], position: int = 1) -> StepResult:
    return sampler.sample(torch.tensor(rows), list(range(len(rows))), [position] * len(rows))


GREEDY: dict[str, Any] = {"temperature": 0.0}
ROW = [0.0, 1.0, 2.0, 3.0, 4.0, 3.5, 0.0, 0.0]


def test_greedy_takes_the_likeliest() -> None:
    assert sample(make_sampler(SamplingParams(**GREEDY)), [ROW]).token_ids == [4]


def test_logit_bias_moves_the_choice() -> None:
    sampler = make_sampler(SamplingParams(logit_bias={1: 10.0}, **GREEDY))
    assert sample(sampler, [ROW]).token_ids == [1]


def test_min_tokens_forbids_the_end_until_it_is_reached() -> None:
    row = [9.0, *ROW[1:]]
    params = SamplingParams(min_tokens=2, max_tokens=9, stop_token_ids=(4,), **GREEDY)
    sampler = make_sampler(params)
    # The prompt has 1 token: positions 1 and 2 are the first two output tokens.
    assert [sample(sampler, [row], position).token_ids for position in (1, 2, 3)] == [[5], [5], [0]]


def test_ignore_eos_leaves_the_end_token_alone() -> None:
    params = SamplingParams(min_tokens=2, max_tokens=9, ignore_eos=True, **GREEDY)
    assert sample(make_sampler(params), [[9.0, *ROW[1:]]]).token_ids == [0]


def test_frequency_penalty_counts_what_was_generated() -> None:
    sampler = make_sampler(SamplingParams(frequency_penalty=0.6, **GREEDY))
    # Each output token lowers its logit by 0.6: token 4 from 4.0 to 3.4, token 5 from 3.5 to 2.9.
    # After [4, 5, 4] token 3 with 3.0 is the largest.
    assert [sample(sampler, [ROW]).token_ids[0] for _ in range(4)] == [4, 5, 4, 3]


def test_a_resumed_sequence_remembers_its_counts() -> None:
    sampler = make_sampler(SamplingParams(presence_penalty=2.0, **GREEDY), outputs=[4])
    assert sample(sampler, [ROW]).token_ids == [5]


def test_repetition_penalty_sees_the_prompt() -> None:
    sampler = make_sampler(SamplingParams(repetition_penalty=2.0, **GREEDY), prompt=[4])
    assert sample(sampler, [ROW]).token_ids == [5]


def test_logprobs_come_from_the_raw_logits() -> None:
    params = SamplingParams(logprobs=2, logit_bias={1: 10.0}, **GREEDY)
    result = sample(make_sampler(params), [ROW])
    total = math.log(sum(math.exp(value) for value in ROW))
    assert result.token_ids == [1]
    assert result.logprobs is not None
    entry = result.logprobs[0]
    assert entry is not None
    assert entry.logprob == pytest.approx(1.0 - total, abs=1e-5)
    assert entry.rank == 5
    assert entry.top_ids == [4, 5]
    assert entry.top_logprobs == pytest.approx([4.0 - total, 3.5 - total], abs=1e-5)


def test_only_who_asks_gets_logprobs() -> None:
    sampler = make_sampler(SamplingParams(logprobs=0, **GREEDY), SamplingParams(**GREEDY))
    result = sample(sampler, [ROW, ROW])
    assert result.logprobs is not None
    assert result.logprobs[0] is not None
    assert result.logprobs[0].top_ids == []
    assert result.logprobs[1] is None


def test_a_seeded_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, VOCAB, generator=generator).tolist()
    params = [
        SamplingParams(seed=11),
        SamplingParams(seed=12, top_k=3),
        SamplingParams(seed=13, top_p=0.8, temperature=0.5),
        SamplingParams(temperature=0.0),
    ]
    for position in range(1, 30):
        together = sample(make_sampler(*params), rows, position).token_ids
        alone = [
            sample(make_sampler(one), [row], position).token_ids[0]
            for one, row in zip(params, rows, strict=True)
        ]
        assert together == alone


def test_a_tiny_temperature_is_greedy() -> None:
    for position in range(1, 20):
        sampler = make_sampler(SamplingParams(temperature=1e-6, seed=3))
        assert sample(sampler, [ROW], position).token_ids == [4]


RULES = TranscriptRules(
    suppressed=(7,), end_id=1000, first_timestamp_id=1004, max_initial_timestamp=50
)
EVERYTHING = [
    SamplingParams(temperature=1.3, seed=1),
    SamplingParams(temperature=0.9, seed=2, top_k=5),
    SamplingParams(temperature=1.0, seed=3, top_p=0.7, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, logit_bias={7: 2.0, 6: -3.0}, seed=9, logprobs=1),
    SamplingParams(temperature=0.8, seed=4, logprobs=3, frequency_penalty=0.3, top_k=700),
    SamplingParams(temperature=0.7, seed=5, logprobs=0, logprob_token_ids=(6, 1)),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, transcript=RULES),
    SamplingParams(temperature=1.0, seed=6, transcript=RULES),
]


def sampler_of(
    params: list[SamplingParams], vocab_size: int, token_sampler: TokenSampler | None
) -> Sampler:
    sampler = Sampler(
        max_num_seqs=len(params),
        vocab_size=vocab_size,
        device=torch.device("cpu"),
        token_sampler=token_sampler,
    )
    for row, sampling in enumerate(params):
        request = Request(request_id=str(row), prompt_token_ids=[1, 2], sampling=sampling)
        sampler.admit(row, request, [3])
    return sampler


@pytest.mark.parametrize("recorder", [None, StaticRecorder()])
def test_static_draws_give_the_same_results(recorder: StaticRecorder | None) -> None:
    """Each step has some of the rows, in any order. Some rows have log-probabilities."""
    vocab_size, numbers = 1500, random.Random(0)
    token_sampler = GraphSampler(torch.zeros(len(EVERYTHING), vocab_size), recorder=recorder)
    token_sampler.capture()
    static = sampler_of(EVERYTHING, vocab_size, token_sampler)
    plain = sampler_of(EVERYTHING, vocab_size, None)
    generator = torch.Generator().manual_seed(0)
    for position in range(3, 40):
        rows = numbers.sample(range(len(EVERYTHING)), numbers.randint(1, len(EVERYTHING)))
        logits = torch.randn(len(rows), vocab_size, generator=generator) * 2
        positions = [position] * len(rows)
        got = static.sample(logits.clone(), rows, positions)
        assert got == plain.sample(logits.clone(), rows, positions), rows


def test_sampling_stays_within_its_memory() -> None:
    """Rows with filters, penalties, allowed tokens and log-probabilities stay within the plan."""
    rows, vocab_size = 3, 2_000_000
    params = [
        SamplingParams(
            temperature=1.0,
            seed=1,
            top_p=0.9,
            logprobs=20,
            presence_penalty=0.1,
            allowed_token_ids=tuple(range(1000)),
        )
    ] * rows
    chosen = tuple(range(MAX_LOGPROB_TOKEN_IDS))
    params[0] = msgspec.structs.replace(params[0], logprob_token_ids=chosen)
    with LiveBytes() as live:
        logits = torch.randn(rows, vocab_size)
        token_sampler = GraphSampler(torch.zeros(rows, vocab_size))
        sampler = sampler_of(params, vocab_size, token_sampler)
        sampler.sample(logits, list(range(rows)), [3] * rows)
    assert 25 * rows * vocab_size < live.peak <= sampling_bytes(rows, rows, vocab_size)


def test_transcripts_stay_within_their_memory() -> None:
    """Beside a row without rules, so that the rows with rules are copied."""
    rows, vocab_size = 3, 2_000_000
    plain = SamplingParams(temperature=1.0, seed=1, top_p=0.9, logprobs=20, presence_penalty=0.1)
    rules = TranscriptRules(
        suppressed=tuple(range(100)), end_id=1_990_000, first_timestamp_id=1_998_000
    )
    ruled = msgspec.structs.replace(plain, transcript=rules)
    with LiveBytes() as live:
        logits = torch.randn(rows, vocab_size)
        token_sampler = GraphSampler(torch.zeros(rows, vocab_size))
        sampler = sampler_of([ruled, plain, ruled], vocab_size, token_sampler)
        sampler.sample(logits, list(range(rows)), [3] * rows)
    assert 15 * rows * vocab_size < live.peak <= sampling_bytes(rows, rows, vocab_size)


@pytest.mark.parametrize("guess", [7, 8])
def test_verification_stays_within_its_memory(guess: int) -> None:
    """More rows of logits than sequences; all guesses are right, or none."""
    num_seqs, num_rows, vocab_size = 2, 8, 500_000
    plain = SamplingParams(
        temperature=1.0, seed=1, top_p=0.9, logprobs=20, allowed_token_ids=tuple(range(1000))
    )
    penalised = msgspec.structs.replace(plain, presence_penalty=0.1)
    with LiveBytes() as live:
        logits = torch.randn(num_rows, vocab_size)
        logits[:, 7] += 100.0
        static = GraphSampler(torch.zeros(num_rows, vocab_size))
        sampler = sampler_of([plain, penalised], vocab_size, static)
        sampler.stage([0] * 4 + [1] * 4, [3, 4, 5, 6] * 2, [[guess] * 3] * num_seqs)
        result = sampler.launch(logits).read()
    assert result.counts == ([4, 4] if guess == 7 else [1, 1])
    most = sampling_bytes(num_rows, num_seqs, vocab_size)
    assert live.peak <= most < sampling_bytes(num_rows, num_rows, vocab_size)


def test_chosen_tokens_instead_of_the_likeliest() -> None:
    """Rows ask for no log-probabilities, those of the likeliest tokens, or of chosen ones."""
    sampler = make_sampler(
        SamplingParams(logprobs=2, logprob_token_ids=(7, 1, 4), logit_bias={1: 10.0}, **GREEDY),
        SamplingParams(**GREEDY),
        SamplingParams(logprobs=2, **GREEDY),
        SamplingParams(logprobs=0, logprob_token_ids=(5,), **GREEDY),
    )
    other = ROW[::-1]
    result = sample(sampler, [ROW, ROW, ROW, other])
    assert result.token_ids == [1, 4, 4, 3]
    assert result.logprobs is not None
    first, none, likeliest, last = result.logprobs
    assert none is None
    total = math.log(sum(math.exp(value) for value in ROW))
    assert first is not None
    assert (first.top_ids, first.rank) == ([7, 1, 4], 5)
    assert first.logprob == pytest.approx(1.0 - total, abs=1e-5)
    # Log-probabilities of the model itself, before the bias.
    assert first.top_logprobs == pytest.approx([-total, 1.0 - total, 4.0 - total], abs=1e-5)
    assert likeliest is not None
    assert likeliest.top_ids == [4, 5]
    assert last is not None
    assert last.top_ids == [5]
    assert last.top_logprobs == pytest.approx([other[5] - total], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"logprob_token_ids": (1,)}, "null without logprobs"),
        ({"logprob_token_ids": (), "logprobs": 1}, "null or 1 to 128 token ids, got 0"),
        ({"logprob_token_ids": (1,) * 129, "logprobs": 1}, "token ids, got 129"),
        ({"logprob_token_ids": (1,), "logprobs": 1, "use_beam_search": True}, "null with use_beam"),
    ],
)
def test_when_no_tokens_can_be_chosen(fields, problem) -> None:
    with pytest.raises(ValueError, match=f"^logprob_token_ids must be .*{problem}"):
        SamplingParams(**fields)


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 40), max_size=30))
def test_random_numbers_that_are_kept_are_those_of_their_positions(
    seed: int, positions: list[int]
) -> None:
    """A row keeps numbers of the next positions. Positions of refused drafts come again."""
    sampling = SamplingParams(temperature=0.7, seed=seed)
    request = Request(request_id="r", prompt_token_ids=[1], sampling=sampling)
    row = SampledRow(request, None, VOCAB, torch.device("cpu"))
    for position in positions:
        assert row.draw(position).uniform == uniform_number(seed, position)
