"""The time for grammar masks is limited in each step: rows take turns, and no answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ostinato
from ostinato import LLM, SamplingParams, StructuredOutputsParams
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.llguidance_text import grammar_text
from ostinato.runtime.grammar.matcher import (
    RequestMatcher,
    build_matcher,
    load_grammar_tokenizer,
)
from ostinato.runtime.sampling import grammar_masks, grammar_rows
from ostinato.runtime.sampling.grammar_masks import GrammarMasks
from ostinato.runtime.sampling.grammar_rows import GrammarRow
from ostinato.runtime.types.outputs import CompletionOutput
from ostinato.runtime.types.request import Request
from tests.runtime.drafters import ReplayDrafter, make_llm
from tests.runtime.engine.test_engine import make_prompts
from tests.runtime.mask_clock import MaskClock
from tests.runtime.tiny import MODEL, tiny_config

DEMO = str(Path(ostinato.__file__).parents[1] / "models" / "demo")
VOCAB_SIZE, EOS = 3077, 2  # five ids more than the tokenizer has
WORDS = StructuredOutputsParams(regex="([a-z]{1,9} ){2,30}")
DEFAULTS = SamplingParams()
CPU = torch.device("cpu")


class Rows:
    """Rows with one grammar, in steps that have time for the masks of `at_once` rows only."""

    def __init__(
        self,
        count: int,
        at_once: int,
        constraint: StructuredOutputsParams = WORDS,
        sampling: SamplingParams = DEFAULTS,
    ) -> None:
        tokenizer = load_grammar_tokenizer(DEMO, VOCAB_SIZE, (EOS,))
        matcher = build_matcher(tokenizer, grammar_text(constraint, {}))
        self.masks = GrammarMasks(
            vocab_size=VOCAB_SIZE,
            device=CPU,
            matchers=lambda request: RequestMatcher(matcher.deep_copy()),
        )
        self.masks._num_threads = at_once
        request = Request(
            request_id="r",
            prompt_token_ids=[5, 6, 7],
            sampling=sampling,
            eos_token_ids=(EOS,),
            grammar="words",
        )
        rows = [self.masks.admit(request, []) for _ in range(count)]
        self.rows: list[GrammarRow] = [row for row in rows if row is not None]

    def step(self) -> set[int]:
        """Draw the last allowed token of every row with a mask; returns the rows without one."""
        logits = torch.zeros(len(self.rows), VOCAB_SIZE)
        self.masks.begin_step(1e-9)
        held = self.masks.apply(logits, self.rows, [row.position for row in self.rows])
        for index, row in enumerate(self.rows):
            if index not in held:
                allowed = logits[index].isfinite()
                assert row.ending or 0 < allowed.sum() < VOCAB_SIZE
                row.take(int(allowed.nonzero()[-1]))
            else:
                assert logits[index].isfinite().all()
        return held


def test_rows_take_turns() -> None:
    """A step has time for 6 of 20 rows, so a row waits for 3 steps at most."""
    rows = Rows(20, 6)
    drawn = [0] * 20
    waited = [0] * 20
    for _ in range(30):
        held = rows.step()
        assert len(held) == 14
        for index in range(20):
            waited[index] = waited[index] + 1 if index in held else 0
            drawn[index] += index not in held
        assert max(waited) <= 3
    assert min(drawn) >= 7  # of 30 steps, one in four
    assert [row.position for row in rows.rows] == [3 + count for count in drawn]


def test_requests_take_turns_and_so_do_the_rows_of_each() -> None:
    """Steps have time for 3 of 20 rows, 19 of which are of one request. The other never waits."""
    rows = Rows(20, 3)
    for index, row in enumerate(rows.rows):
        row.group = 1 + (index == 7)
    drawn = [0] * 20
    for _ in range(20):
        held = rows.step()
        assert len(held) == 17
        drawn = [count + (index not in held) for index, count in enumerate(drawn)]
    assert drawn[7] == 20
    assert sorted(drawn)[:-1] == [2] * 17 + [3] * 2  # 2 rows of the large request in each step


def test_a_step_without_time_left_makes_no_masks() -> None:
    """Later draws of the same step, such as drafts, make no masks."""
    rows = Rows(4, 6)
    assert rows.step() == set()
    logits = torch.zeros(4, VOCAB_SIZE)
    positions = [row.position for row in rows.rows]
    assert rows.masks.apply(logits, rows.rows, positions) == {0, 1, 2, 3}
    assert rows.step() == set()


def test_a_row_that_is_a_position_ahead_gets_no_mask() -> None:
    """A row is ahead if its step was launched before it was known that the row has to wait."""
    rows = Rows(3, 6)
    positions = [row.position for row in rows.rows]
    positions[1] += 1
    assert rows.masks.apply(torch.zeros(3, VOCAB_SIZE), rows.rows, positions) == {1}
    assert [row.num_unread for row in rows.rows] == [1, 0, 1]


AMBIGUOUS = StructuredOutputsParams(grammar='start: s\ns: s s | "a" | " "')


def test_an_ambiguous_grammar_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks take longer with each token. A slow mask is made alone. A very slow one is an error."""
    for module in (grammar_masks, grammar_rows):
        monkeypatch.setattr(module, "SLOW_S", 0.001)
    monkeypatch.setattr(grammar_rows, "_MAX_S", 0.005)
    rows = Rows(4, 6, AMBIGUOUS)
    was_slow = False
    for _ in range(4000):  # a fast machine needs more steps, and a step may make one mask
        held = rows.step()
        was_slow = was_slow or len(held) == 3  # there was time for one row
        if all(row.ending for row in rows.rows):
            break
    assert was_slow
    for row in rows.rows:
        assert "at most 5 ms are allowed; make it simpler" in (row.ending or "")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"ignore_eos": True}, ("ignore_eos=true excludes", "the grammar allows no other token")),
        (
            {"ignore_eos": True, "allowed_token_ids": (EOS, 5)},
            ("ignore_eos=true excludes", "no other token of allowed_token_ids"),
        ),
        ({"allowed_token_ids": (5, 6)}, ("allowed_token_ids has none of the tokens that the",)),
        (
            {"allowed_token_ids": (5, 6), "ignore_eos": True},
            ("allowed_token_ids has none of the tokens that the",),
        ),
        ({"allowed_token_ids": (EOS, 5)}, None),
        ({}, None),
    ],
)
def test_the_error_names_the_parameter_that_leaves_no_token(
    params: dict[str, Any], words: tuple[str, ...] | None
) -> None:
    """The grammar allows only the end-of-sequence token."""
    constraint = StructuredOutputsParams(grammar=f"start: <[{EOS}]>")
    rows = Rows(1, 1, constraint, SamplingParams(**params))
    [row] = rows.rows
    logits = torch.zeros(1, VOCAB_SIZE)
    rows.masks.begin_step()
    rows.masks.apply(logits, rows.rows, [row.position])
    if words is None:
        assert row.ending is None
        assert logits.isfinite().nonzero().tolist() == [[0, EOS]]
    else:
        assert row.ending is not None
        assert [word for word in words if word not in row.ending] == []
        assert row.take(int(logits.argmax())) == row.ending


def test_a_row_is_slow_for_as_long_as_its_masks_are() -> None:
    rows = Rows(4, 6)
    for row in rows.rows:
        row.is_slow = True
    assert len(rows.step()) == 3
    assert [row.is_slow for row in rows.rows].count(True) == 3
    for _ in range(3):
        rows.step()
    assert rows.step() == set()


def test_masks_that_take_long_leave_time_to_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of 2 ms get half of the model's time. Rows with cheap masks do not wait for them."""
    clock = MaskClock(monkeypatch)
    make = GrammarMasks._make

    def make_slowly(
        masks: GrammarMasks, some: list[tuple[GrammarRow, int]], bits: torch.Tensor
    ) -> None:
        make(masks, some, bits)
        clock.seconds += sum(0.002 if row.cost is rows[0].cost else 1e-5 for row, _ in some)

    monkeypatch.setattr(GrammarMasks, "_make", make_slowly)
    tokenizer = load_grammar_tokenizer(DEMO, VOCAB_SIZE, (EOS,))
    matcher = build_matcher(tokenizer, grammar_text(WORDS, {}))
    masks = GrammarMasks(
        vocab_size=VOCAB_SIZE,
        device=CPU,
        matchers=lambda request: RequestMatcher(matcher.deep_copy()),
    )
    masks._num_threads = 2

    def admit(grammar: str, group: int) -> GrammarRow:
        request = Request(
            request_id="r",
            prompt_token_ids=[5, 6, 7],
            sampling=SamplingParams(),
            grammar=grammar,
            group=group,
        )
        row = masks.admit(request, [])
        assert row is not None
        return row

    rows = [*(admit("costly", 1) for _ in range(12)), admit("cheap", 2)]
    num_costly = num_cheap = 0
    for _ in range(40):
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        masks.begin_step(0.01, 0.001)
        held = masks.apply(logits, rows, [row.position for row in rows])
        for index, row in enumerate(rows):
            if index not in held:
                row.take(int(logits[index].isfinite().nonzero()[0]))
        num_costly += 12 - len(held - {12})
        num_cheap += 12 not in held
    assert rows[0].cost.is_costly
    assert not rows[12].cost.is_costly
    assert num_cheap >= 36  # at first it is not known which of the two grammars takes long
    # Half of the model's 40 ms are 10 masks. The first steps do not know which grammar takes long.
    assert 10 <= num_costly <= 20


def config(*overrides: str) -> object:
    return tiny_config(
        *overrides,
        model__config={**MODEL, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS},
        model__tokenizer=DEMO,
    )


SAMPLING = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=24, structured_outputs=WORDS),
    SamplingParams(
        temperature=1.0,
        seed=2,
        max_tokens=24,
        logprobs=2,
        frequency_penalty=0.7,
        repetition_penalty=1.2,
        structured_outputs=WORDS,
    ),
    SamplingParams(
        temperature=0.0,
        max_tokens=24,
        prompt_logprobs=1,
        structured_outputs=StructuredOutputsParams(json={"type": "array", "maxItems": 3}),
    ),
    SamplingParams(
        seed=3, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["yes", "no way"])
    ),
    SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True, presence_penalty=0.5),
    SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6, ignore_eos=True),
]
MIXED = [SAMPLING[index % len(SAMPLING)] for index in range(18)]
PROMPTS = make_prompts(len(MIXED))


def completions(llm: LLM) -> list[list[CompletionOutput]]:
    llm.reset_prefix_cache()
    return [one.outputs for one in llm.generate(PROMPTS, MIXED, use_progress=False)]


@pytest.fixture(scope="module")
def plain() -> list[list[CompletionOutput]]:
    with LLM(config=config("scheduler.overlap=false")) as llm:
        return completions(llm)


@pytest.fixture(scope="module")
def drafting(plain: list[list[CompletionOutput]]) -> Iterator[LLM]:
    drafter = ReplayDrafter(max_drafts=3, vocab_size=VOCAB_SIZE)
    drafter.memorize(PROMPTS, [some[0].token_ids for some in plain])
    drafter.accuracy = 0.7
    with make_llm(config("scheduler.overlap=false"), drafter) as llm:
        yield llm


@pytest.fixture(scope="module")
def overlapped() -> Iterator[LLM]:
    with LLM(config=config("scheduler.overlap=true", "graphs.mode=captured")) as llm:
        yield llm


@pytest.mark.parametrize("kind", ["plain", "overlapped", "drafting"])
def test_rows_that_wait_change_no_answer(
    request: pytest.FixtureRequest,
    plain: list[list[CompletionOutput]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Steps have time for one mask. Texts, log-probabilities and ends stay the same."""
    llm = (
        LLM(config=config("scheduler.overlap=false"))
        if kind == "plain"
        else request.getfixturevalue(kind)
    )
    held = 0
    apply = GrammarMasks.apply

    def counted(self: GrammarMasks, *arguments: object) -> set[int]:
        nonlocal held
        waiting = apply(self, *arguments)
        held += len(waiting)
        return waiting

    monkeypatch.setattr(GrammarMasks, "apply", counted)
    begin = GrammarMasks.begin_step
    with monkeypatch.context() as unlimited:
        unlimited.setattr(GrammarMasks, "begin_step", lambda self, *seconds: begin(self, 1e9, 1e9))
        # On a busy machine, masks can take so long that their grammars count as costly.
        unlimited.setattr(grammar_masks, "_MOST_CREDIT_S", 1e9)
        assert completions(llm) == plain
    assert held == 0
    monkeypatch.setattr(GrammarMasks, "begin_step", lambda self, *seconds: begin(self, 1e-9))
    monkeypatch.setattr(llm._engine._executor._runner._sampler.grammars, "_num_threads", 1)
    assert completions(llm) == plain
    assert held > 50
    llm._engine.check_integrity()


def test_a_request_is_refused_before_its_grammar_is_built(overlapped: LLM) -> None:
    """A refusal within a step would end the engine."""
    engine = overlapped._engine
    text = grammar_text(WORDS, {})

    def request(request_id: str, grammar: str, num_tokens: int = 3) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=[5] * num_tokens,
            sampling=SamplingParams(max_tokens=6, structured_outputs=WORDS),
            eos_token_ids=(EOS,),
            grammar=grammar,
        )

    engine.add_request(request("one", text))
    for grammar in (text, ""):
        with pytest.raises(InvalidRequestError, match="'one' is in use"):
            engine.add_request(request("one", grammar))
    with pytest.raises(InvalidRequestError, match="the prompt must have 1 to"):
        engine.add_request(request("two", text, 10_000))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"one"}
    assert sum(len(output.new_token_ids) for output in outputs) == 6
