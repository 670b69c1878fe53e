"""Rules of transcripts: literal rows, then random rows compared with transformers' processors."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from ostinato import LLM, SamplingParams
from ostinato.runtime.sampling.transcript_processor import TranscriptProcessor
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.transcript_rules import TranscriptRules
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

# Text has ids below END. Then come special tokens, then ten timestamps.
END, NO_TIMESTAMPS, FIRST, VOCAB = 8, 11, 12, 22
PROMPT = [9, 10]
CPU = torch.device("cpu")
NEVER = float("-inf")
PLAIN = TranscriptRules(suppressed=(3, 9), suppressed_first=(4, END), end_id=END)
TIMED = TranscriptRules(
    suppressed=(3, 9),
    suppressed_first=(4, END),
    end_id=END,
    first_timestamp_id=FIRST,
    no_timestamps_id=NO_TIMESTAMPS,
    max_initial_timestamp=4,
)
ANY_START = msgspec.structs.replace(TIMED, max_initial_timestamp=None, suppressed=())
RULES = (None, PLAIN, TIMED, ANY_START)


def request(rules: TranscriptRules | None) -> Request:
    return Request(
        request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(transcript=rules)
    )


def processor(num_rows: int = 1) -> TranscriptProcessor:
    return TranscriptProcessor(max_num_seqs=num_rows, vocab_size=VOCAB, device=CPU)


def transformers_scores(
    rules: TranscriptRules, prompt: list[int], outputs: list[int], logits: Tensor, **more: bool
) -> Tensor:
    """[V] logits after the processors of transformers' Whisper, in its order."""
    begin = len(prompt)
    chain = [
        SuppressTokensAtBeginLogitsProcessor(list(rules.suppressed_first), begin),
        SuppressTokensLogitsProcessor(list(rules.suppressed)),
    ]
    if rules.first_timestamp_id is not None:
        config = GenerationConfig(eos_token_id=rules.end_id)
        config.no_timestamps_token_id = rules.first_timestamp_id - 1
        config.max_initial_timestamp_index = rules.max_initial_timestamp
        assert rules.no_timestamps_id == rules.first_timestamp_id - 1
        more = {f"_{name}": value for name, value in more.items()}
        chain.append(WhisperTimeStampLogitsProcessor(config, begin, **more))
    ids, scores = torch.tensor([[*prompt, *outputs]]), logits[None].clone()
    for one in chain:
        scores = one(ids, scores)
    return scores[0]


def expected(rules: TranscriptRules | None, outputs: list[int], logits: Tensor) -> Tensor:
    return logits if rules is None else transformers_scores(rules, PROMPT, outputs, logits)


def possible(rules: TranscriptRules, outputs: list[int], likely: int = 0) -> list[int]:
    """The tokens that can follow. The token `likely` has nearly all of the probability."""
    one = processor()
    one.admit(0, request(rules), outputs)
    logits = torch.zeros(1, VOCAB)
    logits[0, likely] = 20.0
    one.apply(logits, [0], [len(PROMPT) + len(outputs)])
    return [token for token, value in enumerate(logits[0].tolist()) if value > NEVER]


TEXT = [0, 1, 2, 4, 5, 6, 7]  # 3 is suppressed, and so is the special token 9


def test_without_timestamps_only_tokens_are_suppressed() -> None:
    assert possible(PLAIN, []) == [0, 1, 2, 5, 6, 7, 10, *range(11, VOCAB)]
    assert possible(PLAIN, [0]) == [*TEXT, END, 10, *range(11, VOCAB)]


def test_where_timestamps_stand() -> None:
    assert possible(TIMED, []) == [12, 13, 14, 15, 16]
    assert possible(ANY_START, []) == list(range(12, 22))
    assert possible(TIMED, [13]) == [*TEXT, END, 10]
    assert possible(TIMED, [13, 0]) == [*TEXT, END, 10, *range(14, 22)]
    assert possible(TIMED, [13, 0, 15], likely=10) == [END, 10, *range(15, 22)]
    assert possible(TIMED, [13, 0, 15, 15]) == [*TEXT, END, 10]
    assert possible(TIMED, [13, 0, 21, 21, 0]) == [*TEXT, END, 10]


def test_likely_timestamps_exclude_text() -> None:
    assert possible(TIMED, [13, 0], likely=20) == list(range(14, 22))
    # The eight timestamps of probability 1 are together likelier than a text of probability 7.
    one = processor()
    one.admit(0, request(TIMED), [13, 0])
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = torch.tensor(7.0).log()
    one.apply(logits, [0], [4])
    assert logits[0, 1] == NEVER
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = torch.tensor(9.0).log()
    one.apply(logits, [0], [4])
    assert logits[0, 1] > NEVER


def test_a_row_without_rules_after_one_with_rules() -> None:
    one = processor()
    one.admit(0, request(TIMED), [])
    assert one.changes(0)
    assert one.depends_on_output(0)
    one.admit(0, request(None), [])
    assert not one.changes(0)
    assert not one.depends_on_output(0)
    logits = torch.randn(1, VOCAB)
    untouched = logits.clone()
    one.apply(logits, [0], [2])
    assert torch.equal(logits, untouched)


def test_tokens_outside_the_vocabulary_cannot_be_written_anyway() -> None:
    rules = msgspec.structs.replace(PLAIN, suppressed=(-1, 3, VOCAB), suppressed_first=(10**6,))
    assert possible(rules, []) == [token for token in range(VOCAB) if token != 3]


class Newcomer(NamedTuple):
    row: int
    rules: TranscriptRules | None
    outputs: list[int]  # before a preemption


NUM_ROWS = 3
token = st.integers(0, VOCAB - 1)
newcomers = st.builds(
    Newcomer, st.integers(0, NUM_ROWS - 1), st.sampled_from(RULES), st.lists(token, max_size=6)
)


class Step(NamedTuple):
    joining: list[Newcomer]
    order: list[int]  # the rows of the step, if they are occupied
    seed: int  # of the logits
    lift: float  # added to the logits of timestamps
    drawn: list[int | None]  # by row; None = the likeliest token


steps = st.builds(
    Step,
    st.lists(newcomers, max_size=2),
    st.permutations(range(NUM_ROWS)).flatmap(
        lambda order: st.integers(1, NUM_ROWS).map(lambda count: order[:count])
    ),
    st.integers(0, 2**31),
    st.sampled_from([-6.0, -2.0, 0.0, 4.0]),
    st.lists(st.none() | token, min_size=NUM_ROWS, max_size=NUM_ROWS),
)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(steps, min_size=1, max_size=8))
def test_rows_equal_transformers(steps: list[Step]) -> None:
    """A row has the logits that it has alone, whatever rows are beside it, join or leave."""
    one = processor(NUM_ROWS)
    state: dict[int, tuple[TranscriptRules | None, list[int]]] = {}
    for step in steps:
        for newcomer in step.joining:
            one.admit(newcomer.row, request(newcomer.rules), newcomer.outputs)
            state[newcomer.row] = (newcomer.rules, list(newcomer.outputs))
        rows = [row for row in step.order if row in state]
        if not rows:
            continue
        generator = torch.Generator().manual_seed(step.seed)
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 2
        logits[:, FIRST:] += step.lift
        wanted = [expected(*state[row], values) for row, values in zip(rows, logits, strict=True)]
        one.apply(logits, rows, [len(PROMPT) + len(state[row][1]) for row in rows])
        for got, values in zip(logits, wanted, strict=True):
            assert torch.equal(got, values)
        likeliest = logits.argmax(1).tolist()
        drawn = [
            likeliest[place] if step.drawn[row] is None else step.drawn[row]
            for place, row in enumerate(rows)
        ]
        one.advance(rows, torch.tensor(drawn))
        for row, token_id in zip(rows, drawn, strict=True):
            state[row][1].append(token_id)


@given(rules=st.lists(st.integers(0, 300), min_size=1, max_size=40))
def test_few_rules_are_kept(rules: list[int]) -> None:
    one = processor(2)
    for index, number in enumerate(rules):
        some = msgspec.structs.replace(TIMED, max_initial_timestamp=number)
        one.admit(index % 2, request(some), [])
        assert len(one._known) <= 3


IN_ENGINE = TranscriptRules(
    suppressed=(3, 5, 7),
    suppressed_first=(11, 200),
    end_id=200,
    first_timestamp_id=206,
    no_timestamps_id=205,
    max_initial_timestamp=20,
)
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, transcript=IN_ENGINE),
    SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, transcript=IN_ENGINE),
    SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True),
    SamplingParams(
        use_beam_search=True, n=3, best_of=4, max_tokens=16, ignore_eos=True, transcript=IN_ENGINE
    ),
]
PROMPTS = [[3, 4, 5 + index] for index in range(len(SAMPLING))]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=tiny_config())


def test_in_the_engine_outputs_follow_the_rules(llm: LLM) -> None:
    """transformers allows every token of every output, beams too."""
    together = llm.generate(PROMPTS, SAMPLING, use_progress=False)
    for prompt, sampling, result in zip(PROMPTS, SAMPLING, together, strict=True):
        (alone,) = llm.generate([prompt], sampling, use_progress=False)
        assert [one.token_ids for one in alone.outputs] == [one.token_ids for one in result.outputs]
        if sampling.transcript is None:
            continue
        for output in result.outputs:
            ids = output.token_ids
            assert any(token >= 206 for token in ids)
            assert any(token < 200 for token in ids)
            for place, token_id in enumerate(ids):
                scores = transformers_scores(
                    IN_ENGINE,
                    prompt,
                    ids[:place],
                    torch.zeros(VOCAB_SIZE),
                    detect_timestamp_from_logprob=False,
                )
                assert scores[token_id] > NEVER, (ids, place)
