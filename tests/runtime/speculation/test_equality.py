"""Outputs with the built-in drafters equal plain decoding: sampling parameters x forms of weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato import LLM
from ostinato.runtime.types.outputs import CompletionOutput
from tests.runtime.sampling.test_verification import SAMPLING, config, make_prompts, seeded

FORMS = {
    "float32": ["model.dtype=float32"],
    "bfloat16": ["model.dtype=bfloat16"],
    "int8": ["model.dtype=bfloat16", "model.quantization=int8"],
    "int4": ["model.dtype=bfloat16", "model.quantization=int4"],
}
# Random prompts, and one that repeats a pattern of 7 tokens.
PROMPTS = [*make_prompts(len(SAMPLING)), [5, 9, 14, 20, 27, 35, 44] * 8]
PARAMETERS = [*SAMPLING.values(), seeded(temperature=0.0, max_tokens=60)]


def completions(llm: LLM) -> list[list[CompletionOutput]]:
    return [one.outputs for one in llm.generate(PROMPTS, PARAMETERS, use_progress=False)]


@pytest.fixture(scope="module", params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(form: str) -> list[list[CompletionOutput]]:
    with LLM(config=config("eager", *FORMS[form])) as llm:
        return completions(llm)


@pytest.fixture(scope="module")
def drafting(form: str) -> Iterator[LLM]:
    with LLM(
        config=config(
            "eager", *FORMS[form], "speculation.method=auto", "speculation.adaptive=false"
        )
    ) as llm:
        yield llm


def test_a_request_without_speculation_has_no_drafts(drafting: LLM) -> None:
    before = drafting.stats().speculation
    sampling = seeded(temperature=0.0, max_tokens=30, speculation=False)
    drafting.generate([PROMPTS[-1]], sampling, use_progress=False)
    assert drafting.stats().speculation == before


def test_the_same_tokens_and_log_probabilities(
    drafting: LLM, plain: list[list[CompletionOutput]]
) -> None:
    """The second round finds its answers in the history of the first."""
    assert completions(drafting) == plain
    before = drafting.stats().speculation
    assert completions(drafting) == plain
    drafting._engine.check_integrity()
    after = drafting.stats().speculation
    assert before is not None
    assert after is not None
    assert after.num_accepted_tokens - before.num_accepted_tokens > 40
    assert sum(after.accepted_per_position) == after.num_accepted_tokens
