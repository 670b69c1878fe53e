"""Overlapped steps have the outputs of synchronous steps.

An overlapped step is launched before the host knows the tokens of the step before. It reads them
on the device.
"""

from __future__ import annotations

import pytest

from ostinato import LLM, SamplingParams
from ostinato.runtime.types.outputs import RequestOutput
from ostinato.runtime.types.params import ThinkingLimit
from tests.runtime.engine.test_engine import make_prompts
from tests.runtime.tiny import tiny_config

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "one token": SamplingParams(temperature=0.0, max_tokens=1),
    "seeded, penalised": SamplingParams(
        temperature=1.3,
        top_p=0.9,
        seed=7,
        max_tokens=15,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        min_tokens=5,
    ),
    "several, with log-probabilities": SamplingParams(
        temperature=1.0, seed=3, n=3, max_tokens=9, logprobs=2
    ),
    "stopped by tokens": SamplingParams(
        temperature=1.0, seed=11, max_tokens=40, stop_token_ids=tuple(range(0, 300, 9))
    ),
    "beams": SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=9, logprobs=1),
    "limited, prompt scored": SamplingParams(
        temperature=1.0,
        seed=2,
        max_tokens=9,
        allowed_token_ids=tuple(range(40)),
        bad_words=("a", "b c"),
        prompt_logprobs=1,
    ),
    "reasoning with a limit": SamplingParams(
        seed=3,
        max_tokens=12,
        ignore_eos=True,
        logprobs=2,
        thinking=ThinkingLimit(max_tokens=5, begin_token_id=5, end_token_id=6, is_open=True),
    ),
    "edited logits": SamplingParams(
        temperature=0.7, seed=1, max_tokens=8, logit_bias={5: 4.0, 9: -100.0}
    ),
}


def flat(outputs: list[RequestOutput]) -> list[list[tuple[object, ...]]]:
    return [
        [
            (one.token_ids, one.finish_reason, one.stop_reason, one.logprobs)
            for one in output.outputs
        ]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def synchronous() -> LLM:
    return LLM(config=tiny_config("scheduler.overlap=false"))


@pytest.fixture(scope="module", params=["eager", "captured"])
def overlapped(request: pytest.FixtureRequest) -> LLM:
    return LLM(config=tiny_config("scheduler.overlap=true", f"graphs.mode={request.param}"))


@pytest.mark.parametrize("name", SAMPLING)
def test_the_same_outputs(synchronous: LLM, overlapped: LLM, name: str) -> None:
    prompts = make_prompts(12, seed=4)
    expected = flat(synchronous.generate(prompts, SAMPLING[name], use_progress=False))
    assert flat(overlapped.generate(prompts, SAMPLING[name], use_progress=False)) == expected
    assert overlapped.stats().num_free_blocks == overlapped.stats().num_blocks
    assert overlapped.stats().late_compiles == []


def test_all_kinds_at_once(synchronous: LLM, overlapped: LLM) -> None:
    prompts = make_prompts(18, seed=5)
    mixed = [list(SAMPLING.values())[index % len(SAMPLING)] for index in range(18)]
    expected = flat(synchronous.generate(prompts, mixed, use_progress=False))
    assert flat(overlapped.generate(prompts, mixed, use_progress=False)) == expected


def test_preemption(synchronous: LLM) -> None:
    prompts = [prompt[:6] for prompt in make_prompts()]
    long = SamplingParams(temperature=0.9, seed=2, max_tokens=40, ignore_eos=True)
    memory_gib = 15 * 8 * 2 * 2 * 2 * 16 * 4 / 2**30  # 15 blocks x the bytes of a block
    tight = LLM(
        config=tiny_config(
            "scheduler.overlap=true", model__max_model_len=112, cache__memory_gib=memory_gib
        )
    )
    expected = flat(synchronous.generate(prompts, long, use_progress=False))
    assert flat(tight.generate(prompts, long, use_progress=False)) == expected
    assert tight.stats().num_preemptions > 0
    assert tight.stats().num_free_blocks == tight.stats().num_blocks


def test_streams_that_are_closed_leave_nothing(overlapped: LLM) -> None:
    for prompt in make_prompts(4, seed=6):
        stream = overlapped.stream(prompt, SAMPLING["greedy"])
        next(stream)
        stream.close()
    [output] = overlapped.generate(make_prompts(1), SAMPLING["greedy"], use_progress=False)
    assert len(output.outputs[0].token_ids) == 12
    assert overlapped.stats().num_free_blocks == overlapped.stats().num_blocks


def test_a_step_of_ended_requests_does_not_keep_the_prefix_cache(overlapped: LLM) -> None:
    """The end of a request is known when its next step has been launched already."""
    [prompt] = make_prompts(1)
    [whole] = overlapped.generate([prompt], SAMPLING["greedy"], use_progress=False)
    token_ids = whole.outputs[0].token_ids
    stop = next(token for token in token_ids[3:] if token not in token_ids[:3])
    sampling = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[stop])
    [cut] = overlapped.generate([prompt], sampling, use_progress=False)
    assert cut.outputs[0].stop_reason == stop
    assert overlapped.reset_prefix_cache()
    [again] = overlapped.generate([prompt], SAMPLING["greedy"], use_progress=False)
    assert (again.outputs[0].token_ids, again.num_cached_tokens) == (token_ids, 0)
    stream = overlapped.stream(prompt, SAMPLING["greedy"])
    next(stream)
    assert not overlapped.reset_prefix_cache()
    stream.close()
    assert overlapped.reset_prefix_cache()


def test_a_step_reads_tokens_that_never_came_to_the_host() -> None:
    """Five steps are launched before the first one is read. No synchronous runner does this."""
    from ostinato.runtime.types.request import Request
    from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput

    llm = LLM(config=tiny_config("scheduler.overlap=true"))
    runner = llm._engine._executor._runner
    prompt = make_prompts(1)[0][:5]
    expected = llm.generate([prompt], SAMPLING["greedy"], use_progress=False)[0]
    first = SchedulerOutput([ScheduledSequence(0, 0, 5, prompt, [1], 1)], [], 5)
    later = [
        SchedulerOutput([ScheduledSequence(0, 5 + i, 1, [], [2] if 5 + i == 8 else [], 1)], [], 1)
        for i in range(4)
    ]
    request = Request(request_id="r", prompt_token_ids=prompt, sampling=SAMPLING["greedy"])
    runner._batch.admit(0, request, [])
    pending = [runner.launch(output) for output in (first, *later)]
    tokens = [runner.read(each).token_ids[0] for each in pending]
    assert tokens == expected.outputs[0].token_ids[:5]
