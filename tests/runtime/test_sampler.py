"""The sampler's row state: each parameter changes what it should and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.runtime.sampler import Sampler
from ostinato.runtime.types import Request, SamplingParams, StepResult

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


GREEDY = {"temperature": 0.0}
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
    # 4.0 -> 3.4 after one, so 3.5 wins; then 2.9; then 3.0 (token 3) is the best of what is left.
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
