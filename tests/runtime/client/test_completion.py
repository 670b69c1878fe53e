"""The client's view of one completion: text, stop strings, counts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from ostinato.runtime.client.completion import CompletionStream, PromptCompletions
from ostinato.runtime.client.requests import make_requests
from ostinato.runtime.text.token_bytes import TokenPieces
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.outputs import (
    FinishReason,
    RequestOutput,
    SequenceOutput,
    TokenLogprobs,
)
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.speculation import SpeculationReport

WORDS = ["", " one", " two", " three", "ST", "OP", "<end>"]


class Words:
    """A tokenizer that decodes token ids to the joined entries of `WORDS`."""

    pieces: TokenPieces | None = None
    special_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[token_id] for token_id in token_ids)


def make_stream(**sampling: object) -> CompletionStream:
    request = Request(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )
    return CompletionStream(request, 0, Words(), request.prompt_token_ids)


def engine_output(
    token_ids: list[int], finish: FinishReason | None = None, **more: object
) -> SequenceOutput:
    return SequenceOutput("r", token_ids, finish, **more)  # type: ignore[arg-type]


def summary(output: RequestOutput) -> tuple[str, list[int], str | None, object]:
    return output.text_delta, output.new_token_ids, output.finish_reason, output.stop_reason


def test_text_and_counts_grow() -> None:
    stream = make_stream()
    first = stream.process(engine_output([1], num_cached_tokens=2))
    second = stream.process(engine_output([2], FinishReason.length))
    assert summary(first) == (" one", [1], None, None)
    assert summary(second) == (" two", [2], "length", None)
    assert (second.num_prompt_tokens, second.num_cached_tokens, second.num_output_tokens) == (
        2,
        2,
        2,
    )
    assert stream.is_finished


def test_a_stop_string_across_tokens_ends_it_and_is_not_shown() -> None:
    stream = make_stream(stop=("STOP",))
    assert summary(stream.process(engine_output([1]))) == (" one", [1], None, None)
    assert summary(stream.process(engine_output([4]))) == ("", [4], None, None)
    assert summary(stream.process(engine_output([5]))) == ("", [5], "stop", "STOP")
    assert stream.is_finished


def test_tokens_after_the_stop_string_are_dropped_with_their_logprobs() -> None:
    stream = make_stream(stop=("STOP",), logprobs=0)
    logprobs = [TokenLogprobs(-float(i), 1, [], []) for i in range(4)]
    output = stream.process(engine_output([1, 4, 5, 2], logprobs=logprobs))
    assert summary(output) == (" one", [1, 4, 5], "stop", "STOP")
    assert output.logprobs == logprobs[:3]


def test_drafts_after_the_stop_string_are_not_accepted() -> None:
    for returned, report, expected in (
        (1, SpeculationReport(1, 3, 3), (1, 3, 1, 0, 0)),
        (1, SpeculationReport(1, 3, 0), (1, 3, 0, 0, 0)),
        (2, SpeculationReport(1, 3, 3, 3, 0), (1, 3, 2, 2, 1)),
        (3, SpeculationReport(1, 3, 2, 2, 1), (1, 3, 2, 2, 1)),
    ):
        stream = make_stream(stop=("STOP",))
        if returned == 1:
            stream.process(engine_output([4]))
        tokens = {1: [5, 1, 2, 3], 2: [4, 5, 2, 3], 3: [1, 4, 5, 2]}[returned]
        output = stream.process(engine_output(tokens, speculation=report))
        assert len(output.new_token_ids) == returned
        assert output.speculation is not None
        assert msgspec.structs.astuple(output.speculation) == expected


@pytest.mark.parametrize("token_ids", [[1, 2, 3], [1, 4, 2], [4, 5, 1], [1, 4, 5, 2], [1, 4]])
@pytest.mark.parametrize("finish", [None, FinishReason.length])
def test_each_of_several_tokens_has_the_text_that_it_adds_alone(
    token_ids: list[int], finish: FinishReason | None
) -> None:
    several = make_stream(stop=("STOP",)).process(engine_output(token_ids, finish))
    stream, texts = make_stream(stop=("STOP",)), list[str]()
    for place, token_id in enumerate(token_ids, 1):
        ending = finish if place == len(token_ids) else None
        one = stream.process(engine_output([token_id], ending))
        assert one.token_texts is None
        texts.append(one.text_delta)
        if one.finish_reason is not None:
            break
    assert several.token_texts == texts
    assert several.text_delta == "".join(texts)
    assert len(several.new_token_ids) == len(texts)


def test_what_may_become_a_stop_string_is_shown_when_it_does_not() -> None:
    stream = make_stream(stop=("STOP",))
    assert stream.process(engine_output([4])).text_delta == ""
    assert stream.process(engine_output([1])).text_delta == "ST one"


def test_held_text_is_flushed_at_the_end() -> None:
    stream = make_stream(stop=("STOP",))
    assert stream.process(engine_output([4], FinishReason.length)).text_delta == "ST"


def test_a_stop_token_is_not_shown() -> None:
    stream = make_stream()
    output = stream.process(engine_output([1, 6], FinishReason.stop, stop_reason=6))
    assert summary(output) == (" one", [1, 6], "stop", 6)


def test_the_best_of_several_are_given_when_all_have_ended() -> None:
    sampling = SamplingParams(n=2, best_of=3)
    model = ServedModel(name="m", max_model_len=20, vocab_size=9, eos_token_ids=(6,), tokenizer="")
    requests = make_requests("r", [1, 2], sampling, model)
    assert [request.request_id for request in requests] == ["r:0", "r:1", "r:2"]
    completions = PromptCompletions(requests, sampling, Words())

    def send(index: int, token: int, logprob: float, *, ends: bool) -> list[RequestOutput]:
        finish = FinishReason.length if ends else None
        logprobs = [TokenLogprobs(logprob, 1, [], [])]
        return completions.process(SequenceOutput(f"r:{index}", [token], finish, None, logprobs))

    assert send(0, 1, -1.0, ends=False) == []
    assert send(0, 2, -2.0, ends=True) == []  # a mean of -1.5 a token
    assert send(1, 3, -3.0, ends=True) == []
    assert completions.unfinished_ids == ["r:2"]
    first, second = send(2, 3, -0.5, ends=True)
    assert (first.index, first.text_delta, first.score, first.logprobs) == (0, " three", -0.5, None)
    assert (second.index, second.text_delta, second.score) == (1, " one two", -1.5)
    assert (first.num_discarded_tokens, second.num_discarded_tokens) == (1, 0)
    assert completions.unfinished_ids == []


def test_the_best_keeps_the_text_of_each_token() -> None:
    sampling = SamplingParams(best_of=2)
    model = ServedModel(name="m", max_model_len=20, vocab_size=9, eos_token_ids=(6,), tokenizer="")
    completions = PromptCompletions(make_requests("r", [1], sampling, model), sampling, Words())
    outputs: list[RequestOutput] = []
    for index in (0, 1):
        report, logprobs = SpeculationReport(1, 2 - index), [TokenLogprobs(-index, 1, [], [])]
        for tokens, finish in (([3], None), ([1, 2], FinishReason.length)):
            entries = logprobs * len(tokens)
            output = SequenceOutput(f"r:{index}", tokens, finish, None, entries, speculation=report)
            outputs = list(completions.process(output))
    (best,) = outputs
    assert (best.text_delta, best.token_texts) == (" three one two", [" three", " one", " two"])
    assert best.speculation == SpeculationReport(2, 4)


def test_a_failed_candidate_ends_them_all() -> None:
    sampling = SamplingParams(best_of=2)
    model = ServedModel(name="m", max_model_len=20, vocab_size=9, eos_token_ids=(6,), tokenizer="")
    completions = PromptCompletions(make_requests("r", [1], sampling, model), sampling, None)
    (output,) = completions.process(SequenceOutput("r:1", [], FinishReason.error, error="no"))
    assert (output.finish_reason, output.error) == (FinishReason.error, "no")
    assert completions.unfinished_ids == []


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    request = Request(request_id="r", prompt_token_ids=[1], sampling=SamplingParams())
    output = CompletionStream(request, 0, None, []).process(engine_output([3]))
    assert summary(output) == ("", [3], None, None)
