"""Drafts change neither tokens nor log-probabilities, for every sampling parameter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import ostinato
from ostinato import LLM, SamplingParams
from ostinato.conf.root import RunConfig
from ostinato.runtime.types.outputs import CompletionOutput
from ostinato.runtime.types.params import ThinkingLimit
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams
from ostinato.runtime.types.transcript_rules import TranscriptRules
from tests.runtime.drafters import ReplayDrafter, make_llm
from tests.runtime.engine.test_engine import make_prompts
from tests.runtime.mask_clock import MaskClock
from tests.runtime.tiny import MODEL, tiny_config

VOCAB_SIZE = 3077  # five ids more than the tokenizer has
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=14, ignore_eos=True)


# The largest step has more rows of logits than sequences: 16 sequences of 4 rows each.
def config(mode: str, *overrides: str, model: dict[str, object] | None = None) -> RunConfig:
    return tiny_config(
        "scheduler.max_num_seqs=16",
        "scheduler.overlap=false",
        f"graphs.mode={mode}",
        *overrides,
        model__config=model or {**MODEL, "vocab_size": VOCAB_SIZE, "eos_token_id": 2},
        model__tokenizer=str(Path(ostinato.__file__).parents[1] / "models" / "demo"),
    )


def seeded(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(SEEDED, **changes)


TIMED = TranscriptRules(
    suppressed=(3, 4),
    suppressed_first=(5, 6),
    end_id=2000,
    first_timestamp_id=2006,
    no_timestamps_id=2005,
    max_initial_timestamp=50,
)
SAMPLING = {
    "greedy": seeded(temperature=0.0),
    "seeded": SEEDED,
    "top-k and top-p": seeded(top_k=20, top_p=0.9, min_p=0.01),
    "penalties": seeded(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "greedy penalties": seeded(temperature=0.0, frequency_penalty=1.5),
    "bias": seeded(logit_bias={7: 4.0, 9: 4.0, 11: -50.0}),
    "min_tokens": seeded(min_tokens=6, ignore_eos=False, stop_token_ids=tuple(range(100, 160))),
    "allowed": seeded(allowed_token_ids=(5, 6, 7, 8)),
    "log-probabilities": seeded(logprobs=3, frequency_penalty=0.4),
    "chosen log-probabilities": seeded(logprobs=1, logprob_token_ids=(4, 8, 15)),
    "prompt log-probabilities": seeded(prompt_logprobs=2, logprobs=0),
    "thinking": seeded(
        thinking=ThinkingLimit(max_tokens=4, begin_token_id=2, end_token_id=3, is_open=True)
    ),
    "bad words": seeded(temperature=0.0, bad_words=("the", "a", "in the", ",")),
    "grammar": seeded(
        structured_outputs=StructuredOutputsParams(regex="[a-z]{2,6} (yes|no)"), max_tokens=20
    ),
    "grammar, greedy": seeded(
        temperature=0.0,
        structured_outputs=StructuredOutputsParams(json={"type": "array", "maxItems": 3}),
        min_tokens=3,
        max_tokens=20,
    ),
    "beams": SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6, ignore_eos=True),
    "transcript": seeded(temperature=0.0, transcript=TIMED),
    "transcript, seeded": seeded(transcript=TIMED),
    "transcript without timestamps": seeded(
        transcript=TranscriptRules(suppressed=(3, 4), suppressed_first=(5, 6), end_id=2000)
    ),
    "transcript, beams": SamplingParams(
        use_beam_search=True, n=2, best_of=3, max_tokens=6, ignore_eos=True, transcript=TIMED
    ),
}


PROMPTS = make_prompts(len(SAMPLING))


def completions(
    llm: LLM, prompts: list[list[int]], sampling: list[SamplingParams]
) -> list[list[CompletionOutput]]:
    llm.reset_prefix_cache()
    return [one.outputs for one in llm.generate(prompts, sampling, use_progress=False)]


@pytest.fixture(scope="module")
def plain() -> list[list[CompletionOutput]]:
    """Outputs of an engine without a drafter."""
    with LLM(config=config("eager")) as llm:
        return completions(llm, PROMPTS, list(SAMPLING.values()))


@pytest.fixture(scope="module")
def drafter(plain: list[list[CompletionOutput]]) -> ReplayDrafter:
    drafter = ReplayDrafter(max_drafts=3, vocab_size=VOCAB_SIZE)
    drafter.memorize(PROMPTS, [some[0].token_ids for some in plain])
    return drafter


@pytest.fixture(scope="module")
def drafting(drafter: ReplayDrafter) -> Iterator[LLM]:
    with make_llm(config("captured"), drafter) as llm:
        yield llm


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_any_drafter_gives_the_same(
    drafting: LLM,
    drafter: ReplayDrafter,
    plain: list[list[CompletionOutput]],
    accuracy: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All parameters beside each other in one batch."""
    MaskClock(monkeypatch)  # so no row waits for its mask; the drafts of a waiting row are refused
    drafter.accuracy = accuracy
    scheduler = drafting._engine._scheduler
    assert scheduler.drafts is not None
    drafts = scheduler.drafts.stats
    drafts.num_draft_tokens = drafts.num_accepted_tokens = 0
    assert completions(drafting, PROMPTS, list(SAMPLING.values())) == plain
    assert drafts.num_draft_tokens > 20
    assert (drafts.num_accepted_tokens > 0) is (accuracy > 0.0)
    if accuracy == 1.0:
        # The last token of a grammar counts as not accepted even if it was drafted: no token comes
        # after it. Whether it is drafted depends on the step that began the request.
        num_stopped = sum(one.finish_reason == "stop" for some in plain for one in some)
        refused = drafts.num_draft_tokens - drafts.num_accepted_tokens
        assert 0 <= refused <= num_stopped
    scheduler.check_integrity()
    assert drafting.stats().steps_by_kind["captured"] > 0
