"""The index of a text and the history of answers find the matches that a plain search finds."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ostinato.conf.sections.speculation_schema import SpeculationConfig, SpeculationMethod
from ostinato.runtime.speculation.answer_history import AnswerHistory
from ostinato.runtime.speculation.proposer import Draft, DraftSource
from ostinato.runtime.speculation.text_drafter import TextDrafter
from ostinato.runtime.speculation.text_index import MAX_MATCH, TextIndex, key_of
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def longest(text: list[int], tail: list[int], last: int) -> int:
    """The length of the longest match, by a plain search: at most `MAX_MATCH` tokens.

    A match is an end of `tail` that is also in `text`, and ends there at a place up to `last`.
    """
    best = 0
    for place in range(1, last + 1):
        length = 0
        while length < min(place, len(tail), MAX_MATCH):
            if text[place - 1 - length] != tail[-1 - length]:
                break
            length += 1
        best = max(best, length)
    return best


@given(TEXTS, st.integers(1, 4))
def test_a_match_is_one_and_is_missed_only_if_there_is_none(text: list[int], size: int) -> None:
    index = TextIndex(text, size)
    index.take(len(text))
    match = index.find(text, key_of(text, size))
    best = longest(text, text, len(text) - 1)
    assert (match is not None) is (best >= size and len(text) >= size)
    if match is not None:
        assert text[match.place - match.length : match.place] == text[-match.length :]
        assert size <= match.length <= best


def test_a_long_text_is_taken_in_piece_by_piece() -> None:
    text = [*range(5000), 7, 8, 9]
    index = TextIndex(text, 3)
    founds = []
    for _ in range(5):
        index.take(len(text))
        founds.append(index.find(text, key_of(text, 3)))
    assert founds[0] == (10, 3)
    text += [4000, 4001, 4002]
    assert index.find(text, key_of(text, 3)) is not None


def request(name: str = "r", prompt: list[int] | None = None, **changes: Any) -> Request:
    return Request(
        request_id=name, prompt_token_ids=prompt or [1], sampling=SamplingParams(), **changes
    )


def drafter(method: str, **changes: Any) -> TextDrafter:
    return TextDrafter(SpeculationConfig(method=SpeculationMethod(method), min_match=2, **changes))


def test_a_repeated_text_is_continued_past_its_end() -> None:
    prompt = [1, 2, 3] * 3
    assert drafter("ngram").propose(request(prompt=prompt), prompt, 7) == Draft(
        [1, 2, 3, 1, 2, 3, 1], DraftSource.ngram, 6
    )


def test_answers_are_found_only_with_their_salt_and_adapter_until_they_are_reset() -> None:
    one = drafter("auto")
    owner = request("a", [1, 1, 1], cache_salt="x", cache_keys=("lora",))
    one.learn(owner, [1, 1, 1, 10, 11, 12, 13])
    one.forget("a")
    tokens = [2, 2, 10, 11]
    found = Draft([12, 13], DraftSource.history, 2)
    assert (
        one.propose(request("b", tokens, cache_salt="x", cache_keys=("lora",)), tokens, 5) == found
    )
    for changes in ({}, {"cache_salt": "x"}, {"cache_salt": "y", "cache_keys": ("lora",)}):
        assert one.propose(request(str(changes), tokens, **changes), tokens, 5) is None
    one.reset()
    assert one.propose(owner, tokens, 5) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=40)),
        max_size=12,
    ),
    st.lists(st.integers(0, 3), min_size=2, max_size=20),
)
def test_history_returns_only_what_followed_in_the_partition(
    answers: list[tuple[int, list[int]]], tail: list[int]
) -> None:
    """The ring is so small that answers are overwritten."""
    history = AnswerHistory(64, 2)
    for partition, answer in answers:
        history.learn(partition, [], answer)
    found = history.find(0, tail, key_of(tail, 2), 5)
    if found is None:
        return
    draft, length = found
    assert length >= 2
    match = tail[-length:]
    texts = [answer[-32:] for partition, answer in answers if partition == 0]
    assert any(
        text[at : at + length] == match and text[at + length :][:5] == draft
        for text in texts
        for at in range(len(text))
    )


def test_history_forgets_the_oldest_answers_first() -> None:
    history = AnswerHistory(64, 2)
    for first in range(0, 1000, 10):
        history.learn(0, [], list(range(first, first + 10)))
    assert history.find(0, [0, 1], key_of([0, 1], 2), 3) is None
    assert history.find(0, [930, 931], key_of([930, 931], 2), 3) is None
    assert history.find(0, [940, 941], key_of([940, 941], 2), 3) == ([942, 943, 944], 2)
    assert history.find(0, [990, 991], key_of([990, 991], 2), 20) == ([*range(992, 1000)], 2)


def prediction_drafts(predicted: list[int], answer: list[int], most: int = 4) -> int:
    """The number of steps in which the answer is decoded with the prediction as drafts."""
    one = drafter("grammar")
    of = request("p", [1, 2, 3], prediction_token_ids=predicted)
    tokens, num_steps = [1, 2, 3], 0
    while len(tokens) < 3 + len(answer):
        draft = one.propose(of, tokens, most)
        for guess in [*(() if draft is None else draft.token_ids), None]:
            tokens.append(answer[len(tokens) - 3])
            if tokens[-1] != guess or len(tokens) == 3 + len(answer):
                break
        num_steps += 1
    return num_steps


def test_a_prediction_is_followed_and_found_again_after_a_difference() -> None:
    text = list(range(10, 110))
    assert prediction_drafts(text, text) == 20
    replaced = [*text[:50], 7, *text[51:]]
    assert prediction_drafts(text, replaced) <= 22
    inserted = [*text[:50], 7, 7, 7, *text[50:]]
    assert prediction_drafts(text, inserted) <= 28
    removed = [*text[:50], *text[60:]]
    assert prediction_drafts(text, removed) <= 24
    assert prediction_drafts(text, [5] * 30) == 30


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 20))
def test_a_long_answer_is_found_after_more_calls(lengths: list[int], num_looks: int) -> None:
    """A call takes a bounded part of the queue. In the end every answer that fits is found."""
    history, first = AnswerHistory(2048, 2), 0
    answers: list[list[int]] = []
    for length in lengths:
        answers.append(list(range(first, first + length)))
        first += length
        history.learn(0, [], answers[-1])
        for _ in range(num_looks):
            history.find(0, [-1, -2], key_of([-1, -2], 2), 1)
    kept: list[list[int]] = []
    for answer in reversed(answers):
        if sum(map(len, kept)) + len(answer) > 1024:
            break  # the queue may have dropped this one and those before
        kept.append(answer)
    for _ in range(100):
        history.find(0, [-1, -2], key_of([-1, -2], 2), 1)
    for answer in kept:
        if len(answer) > 2:
            found = history.find(0, answer[-3:-1], key_of(answer[-3:-1], 2), 5)
            assert found == ([answer[-1]], 2)


def test_no_call_takes_a_whole_answer_of_100_000_tokens() -> None:
    """The scheduler calls `learn` and `find` between two steps."""
    history, answer = AnswerHistory(1 << 18, 2), list(range(100_000))
    history.learn(0, [], answer)
    most = len(answer)
    for num_calls in range(1, len(answer)):
        here = history.find(0, answer[-3:-1], key_of(answer[-3:-1], 2), 5)
        if here is not None:
            assert most / num_calls < 64
            return
    raise AssertionError("the end of the answer was never found")
