"""Outputs with many log-probabilities: split, sent in turns and joined again."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.client.completion import PromptCompletions
from ostinato.runtime.process.output_parts import OutputParts
from ostinato.runtime.types.outputs import (
    BeamOutput,
    FinishReason,
    RequestOutput,
    SequenceOutput,
    TokenLogprobs,
)
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

LIMIT = 2000


def entries(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(index), 1, [], []) for index in range(count)]


def first_token(name: str, num_scores: int) -> SequenceOutput:
    return SequenceOutput(name, [7], prompt_logprobs=entries(num_scores))


def end_of_search(name: str, lengths: list[int], num_scores: int | None) -> SequenceOutput:
    beams = [
        BeamOutput([5] * length, -1.0, FinishReason.length, logprobs=entries(length))
        for length in lengths
    ]
    scores = None if num_scores is None else entries(num_scores)
    return SequenceOutput(name, [], FinishReason.length, beams=beams, prompt_logprobs=scores)


def size(outputs: list[SequenceOutput]) -> list[int]:
    """The number of log-probability entries in each output."""
    return [
        len(one.prompt_logprobs or ()) + sum(len(beam.logprobs or ()) for beam in one.beams or ())
        for one in outputs
    ]


def received(output: SequenceOutput, sampling: SamplingParams) -> list[RequestOutput]:
    """A client's results from an output's parts; half of them arrive twice, as after a crash."""
    request = Request(request_id=output.request_id, prompt_token_ids=[1], sampling=sampling)
    completions = PromptCompletions([request], sampling, None)
    parts = OutputParts()
    sent = parts.pass_on([output])
    while len(parts):
        sent += parts.pass_on([])
    died = len(sent) // 2
    return [got for one in [*sent[:died], *sent] for got in completions.process(one)]


def directly(output: SequenceOutput, sampling: SamplingParams) -> list[RequestOutput]:
    request = Request(request_id=output.request_id, prompt_token_ids=[1], sampling=sampling)
    return list(PromptCompletions([request], sampling, None).process(output))


def test_small_outputs_pass_at_once() -> None:
    parts = OutputParts()
    outputs = [first_token("a", 10), SequenceOutput("b", [3]), end_of_search("c", [4, 4], None)]
    assert parts.pass_on(outputs) == outputs
    assert not len(parts)


def test_the_outputs_of_others_do_not_wait() -> None:
    parts = OutputParts()
    assert size(parts.pass_on([first_token("a", 7000)])) == [LIMIT]
    other = SequenceOutput("b", [3])
    following = SequenceOutput("a", [8], FinishReason.stop)
    sent = parts.pass_on([other, following])
    assert sent[0] == other
    assert size(sent[1:]) == [LIMIT]
    assert size(parts.pass_on([])) == [LIMIT]
    last = parts.pass_on([])
    assert size(last) == [1000, 0, 0]
    assert last[-2:] == [SequenceOutput("a", [7], prompt_logprobs=[]), following]
    assert not len(parts)


@given(st.lists(st.integers(0, 1500), max_size=6), st.none() | st.integers(0, 5000), st.booleans())
def test_the_parts_make_the_output_again(
    lengths: list[int], num_scores: int | None, searches: bool
) -> None:
    if searches:
        output = end_of_search("r", lengths, num_scores)
        sampling = SamplingParams(use_beam_search=True, n=8, logprobs=0, max_tokens=9)
    else:
        output, sampling = first_token("r", num_scores or 0), SamplingParams(prompt_logprobs=0)
    expected = directly(msgspec.structs.replace(output), sampling)
    assert received(output, sampling) == expected
