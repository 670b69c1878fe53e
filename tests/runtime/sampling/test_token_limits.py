"""Allowed tokens and bad words: literal rows, then random rows compared with a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import LLM, SamplingParams
from ostinato.runtime.client.requests import bad_words_token_ids, make_requests, resolve
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.sampling.token_limits import BAD_WORD_LOGIT, TokenLimits
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.request import Request
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

VOCAB = 8
CPU = torch.device("cpu")


def request(allowed: list[int] | None = None, words: list[list[int]] | None = None) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=[1],
        sampling=SamplingParams(allowed_token_ids=None if allowed is None else tuple(allowed)),
        bad_words_token_ids=words or [],
    )


def possible(limits: TokenLimits, row: int) -> list[int]:
    """The tokens that are allowed and do not complete a bad word."""
    logits = torch.zeros(1, VOCAB)
    limits.apply(logits, [row], [1])
    return [token for token, value in enumerate(logits[0].tolist()) if value > BAD_WORD_LOGIT]


def test_only_allowed_tokens() -> None:
    limits = TokenLimits(max_num_seqs=2, vocab_size=VOCAB, device=CPU)
    limits.admit(0, request([2, 5]), [])
    limits.admit(1, request(), [])
    assert possible(limits, 0) == [2, 5]
    assert possible(limits, 1) == list(range(VOCAB))


def test_a_word_of_several_tokens_is_forbidden_at_its_last() -> None:
    limits = TokenLimits(max_num_seqs=1, vocab_size=VOCAB, device=CPU)
    limits.admit(0, request(words=[[3, 4], [6]]), [])
    row = [0]
    assert possible(limits, 0) == [0, 1, 2, 3, 4, 5, 7]
    limits.advance(row, torch.tensor([3]))
    assert possible(limits, 0) == [0, 1, 2, 3, 5, 7]
    limits.advance(row, torch.tensor([2]))
    assert possible(limits, 0) == [0, 1, 2, 3, 4, 5, 7]


def test_a_word_with_a_token_that_the_model_lacks_has_no_effect() -> None:
    """A tokenizer can have more tokens than the model."""
    limits = TokenLimits(max_num_seqs=1, vocab_size=VOCAB, device=CPU)
    limits.admit(0, request(words=[[VOCAB], [3, VOCAB + 800], [VOCAB, 2], [6]]), [])
    assert possible(limits, 0) == [0, 1, 2, 3, 4, 5, 7]
    limits.admit(0, request(words=[[VOCAB]]), [])
    assert possible(limits, 0) == list(range(VOCAB))


def test_a_row_that_may_pick_nothing_else_picks_the_bad_word() -> None:
    limits = TokenLimits(max_num_seqs=1, vocab_size=VOCAB, device=CPU)
    limits.admit(0, request([5], [[5]]), [])
    logits = torch.randn(1, VOCAB)
    limits.apply(logits, [0], [1])
    assert logits.argmax(-1).tolist() == [5]
    assert logits.softmax(-1)[0, 5] == 1.0


token_ids = st.integers(0, VOCAB - 1)
rows = st.tuples(
    st.none() | st.lists(token_ids, min_size=1, max_size=4),
    st.lists(st.lists(token_ids, min_size=1, max_size=5), max_size=6),
    st.lists(token_ids, max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(
    residents=st.lists(rows, min_size=1, max_size=3),
    newcomers=st.lists(st.tuples(st.integers(0, 2), rows), max_size=4),
    steps=st.lists(st.lists(token_ids, min_size=3, max_size=3), max_size=5),
)
def test_rows_equal_a_plain_loop(residents: list, newcomers: list, steps: list) -> None:
    """A row has the limits that it has alone, whatever rows join, leave or enlarge the tensors."""
    limits = TokenLimits(max_num_seqs=3, vocab_size=VOCAB, device=CPU)
    state = {}
    for row, entry in [*enumerate(residents), *((row, entry) for row, entry in newcomers)]:
        allowed, words, outputs = entry
        limits.admit(row, request(allowed, words), outputs)
        state[row] = (allowed, words, list(outputs))
    present = sorted(state)
    for tokens in [*steps, None]:
        logits = torch.zeros(len(present), VOCAB)
        limits.apply(logits, present, [1] * len(present))
        for row, values in zip(present, logits.tolist(), strict=True):
            allowed, words, outputs = state[row]
            for token, value in enumerate(values):
                is_bad = any(
                    word[-1] == token
                    and (len(word) == 1 or outputs[len(outputs) - len(word) + 1 :] == word[:-1])
                    and len(outputs) >= len(word) - 1
                    for word in words
                )
                expected = BAD_WORD_LOGIT if is_bad else 0.0
                if allowed is not None and token not in allowed:
                    expected = float("-inf")
                assert value == pytest.approx(expected)
        if tokens is not None:
            limits.advance(present, torch.tensor(tokens[: len(present)]))
            for row, token in zip(present, tokens, strict=False):
                state[row][2].append(token)


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def test_a_bad_word_is_forbidden_with_and_without_a_space() -> None:
    assert bad_words_token_ids(["ab", " c"], Letters()) == [[97, 98], [32, 97, 98], [32, 99], [99]]
    with pytest.raises(
        InvalidRequestError, match=r"bad_words: 'aaaa.* has 33 tokens.* may have at most 32"
    ):
        bad_words_token_ids(["a" * 33], Letters())
    with pytest.raises(InvalidRequestError, match="bad_words needs a tokenizer"):
        bad_words_token_ids(["a"], None)


def test_truncation_takes_either_end() -> None:
    model = ServedModel(
        name="m", max_model_len=20, vocab_size=100, eos_token_ids=(2,), tokenizer=""
    )
    prompt = list(range(50))

    def kept(**values: object) -> list[int]:
        token_ids, sampling = resolve(prompt, SamplingParams(**values), model)  # type: ignore[arg-type]
        (one,) = make_requests("r", token_ids, sampling, model)
        return one.prompt_token_ids

    assert kept(truncate_prompt_tokens=3, max_tokens=4) == [47, 48, 49]
    assert kept(truncate_prompt_tokens=3, truncation_side="right", max_tokens=4) == [0, 1, 2]
    assert kept(truncate_prompt_tokens=-1, max_tokens=4) == list(range(34, 50))
    assert kept(truncate_prompt_tokens=-1, max_tokens=None) == list(range(35, 50))
    prompt = list(range(19))
    assert kept(truncate_prompt_tokens=-1, max_tokens=None) == prompt
    with pytest.raises(InvalidRequestError, match="all stop tokens"):
        resolve([1], SamplingParams(allowed_token_ids=(2,), min_tokens=1, max_tokens=4), model)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=tiny_config())


def generate(llm: LLM, sampling: list[SamplingParams]) -> list[list[int]]:
    prompts = [[3, 4, 5 + index] for index in range(len(sampling))]
    outputs = llm.generate(prompts, sampling, use_progress=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_in_the_engine_rows_do_not_depend_on_their_batch(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    limited = [
        SamplingParams(
            temperature=1.0,
            seed=index,
            max_tokens=12,
            ignore_eos=True,
            allowed_token_ids=(7, 9, 11, 200 + index),
        )
        for index in range(3)
    ]
    together = generate(llm, [*limited, free])
    for index in range(3):
        assert set(together[index]) <= {7, 9, 11, 200 + index}
        prompt = [[3, 4, 5 + index]]
        alone = llm.generate(prompt, limited[index], use_progress=False)
        assert alone[0].outputs[0].token_ids == together[index]
    assert any(token not in (7, 9, 11) for token in together[3])
    assert max(together[3]) < VOCAB_SIZE
