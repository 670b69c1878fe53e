"""Calls of an `LLM` beside open streams: every call gets all outputs of its own requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato import LLM, SamplingParams
from ostinato.runtime.types.outputs import RequestOutput
from tests.runtime.tiny import tiny_config

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(config=tiny_config()) as llm:
        yield llm


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, seed=5, ignore_eos=True)


def tokens(outputs: list[RequestOutput]) -> dict[int, list[int]]:
    """The tokens of each completion."""
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.index, []).extend(output.new_token_ids)
    return found


def alone(llm: LLM, prompt: list[int], sampling: SamplingParams) -> dict[int, list[int]]:
    [answer] = llm.generate([prompt], sampling, use_progress=False)
    return {one.index: one.token_ids for one in answer.outputs}


def test_a_stream_goes_on_after_calls_beside_it(llm: LLM) -> None:
    expected = [alone(llm, prompt, params(30, n=2)) for prompt in PROMPTS]
    stream = llm.stream(PROMPTS[0], params(30, n=2))
    outputs = [next(stream)]
    assert alone(llm, PROMPTS[1], params(8)) == {0: expected[1][0][:8]}
    outputs += [next(stream) for _ in range(20)]
    assert tokens(outputs) == {
        index: some[: len(tokens(outputs)[index])] for index, some in expected[0].items()
    }
    assert alone(llm, PROMPTS[2], params(30, n=2)) == expected[2]
    assert tokens([*outputs, *stream]) == expected[0], "it has ended beside the last call"


def test_streams_in_turns_share_their_steps(llm: LLM) -> None:
    expected = [alone(llm, prompt, params(12)) for prompt in PROMPTS]
    before = llm.stats().num_steps
    rounds = list(zip(*(llm.stream(prompt, params(12)) for prompt in PROMPTS), strict=True))
    assert [tokens(list(outputs)) for outputs in zip(*rounds, strict=True)] == expected
    # The first stream is a step ahead when the second one begins, and so on.
    assert llm.stats().num_steps - before < 12 + len(PROMPTS)


def test_a_closed_stream_leaves_the_other_calls_as_they_are(llm: LLM) -> None:
    expected = alone(llm, PROMPTS[0], params(30))
    one, other = (llm.stream(prompt, params(30)) for prompt in PROMPTS[:2])
    outputs = [next(one), next(one)]
    next(other)
    other.close()
    assert tokens([*outputs, *one]) == expected
    stats = llm.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
