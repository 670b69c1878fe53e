"""A prompt token's log-probability equals the one from a request with only the tokens before it."""

from __future__ import annotations

import random

import pytest

from ostinato import LLM, SamplingParams
from ostinato.runtime.types.outputs import TokenLogprobs
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

ASK = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=3)


def make_prompt(length: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(2, VOCAB_SIZE) for _ in range(length)]


def scores_of(llm: LLM, prompt: list[int]) -> list[TokenLogprobs]:
    (output,) = llm.generate([prompt], ASK, use_progress=False)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=tiny_config())


def test_they_are_those_of_each_prefix_alone(llm: LLM) -> None:
    prompt = make_prompt(21, seed=1)
    scores = scores_of(llm, prompt)
    assert len(scores) == 20
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    for length in range(1, 21):
        (output,) = llm.generate([prompt[:length]], one, use_progress=False)
        (sampled,) = output.outputs[0].logprobs or []
        score = scores[length - 1]
        assert score.top_ids == sampled.top_ids[:3]
        assert score.top_logprobs == sampled.top_logprobs[:3]
        forced = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, allowed_token_ids=(prompt[length],)
        )
        (output,) = llm.generate([prompt[:length]], forced, use_progress=False)
        (sampled,) = output.outputs[0].logprobs or []
        assert (score.logprob, score.rank) == (sampled.logprob, sampled.rank)


def test_chunks_caches_and_neighbours_change_nothing(llm: LLM) -> None:
    prompts = [make_prompt(length, seed=length) for length in (1, 2, 70, 90, 33)]
    assert llm.reset_prefix_cache()
    alone = [scores_of(llm, prompt) for prompt in prompts]
    assert [len(scores) for scores in alone] == [0, 1, 69, 89, 32]
    # All requests run again together, with every block cached, beside one without
    # log-probabilities.
    plain = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate([*prompts, prompts[2]], [*[ASK] * 5, plain], use_progress=False)
    assert [output.prompt_logprobs for output in outputs] == [*alone, None]
    assert outputs[2].outputs[0].token_ids == outputs[5].outputs[0].token_ids
    chunked = LLM(config=tiny_config("scheduler.max_num_batched_tokens=8"))
    outputs = chunked.generate(prompts, ASK, use_progress=False)
    assert [output.prompt_logprobs for output in outputs] == alone


def test_they_are_scored_in_pieces(llm: LLM) -> None:
    """Log-probabilities count as tokens of a step's budget. The budget changes no result."""
    prompt = make_prompt(90, seed=4)
    unmeasured = ("graphs.cost_table_budget_s=0", "scheduler.max_num_batched_tokens=32")
    pieces = LLM(config=tiny_config(*unmeasured))
    assert scores_of(pieces, prompt) == scores_of(llm, prompt)
    # Without measured step costs a score counts as one token, so a step computes 16 prompt tokens.
    assert pieces.stats().num_steps == 6 + 1


def test_a_captured_engine_gives_them_too(llm: LLM) -> None:
    prompt = make_prompt(40, seed=9)
    captured = LLM(config=tiny_config("graphs.mode=captured"))
    assert scores_of(captured, prompt) == scores_of(llm, prompt)
    assert captured.stats().late_compiles == []
