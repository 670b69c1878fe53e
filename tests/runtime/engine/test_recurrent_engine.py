"""Engines of a model with recurrent layers: slots, hits and repeated steps change no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ostinato import LLM, SamplingParams, StructuredOutputsParams
from ostinato.runtime.sampling import grammar_masks
from ostinato.runtime.sampling.grammar_masks import GrammarMasks
from ostinato.runtime.types.outputs import CompletionOutput
from tests.models.random_checkpoints import VARIANTS, reference_model, save
from tests.runtime.drafters import ReplayDrafter, make_llm
from tests.runtime.hybrid import hybrid_config, lfm2
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

DEMO = str(Path(grammar_masks.__file__).parents[2] / "models" / "demo")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)
SAMPLING = {
    "greedy": GREEDY,
    "drawn": SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True, logprobs=2),
    "beams": SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=12, logprobs=1),
    "scored": SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=1),
}
MIXED = [list(SAMPLING.values())[index % len(SAMPLING)] for index in range(16)]


def make_prompts(count: int = 16) -> list[list[int]]:
    """Prompts of which most begin alike, and some are equal."""
    numbers = random.Random(0)
    stems = [[numbers.randrange(2, VOCAB_SIZE) for _ in range(90)] for _ in range(3)]
    lengths = [0, 8, 30, 48, 77, 90]
    return [
        [*numbers.choice(stems)[: numbers.choice(lengths)], *range(5, 5 + numbers.choice([1, 6]))]
        for _ in range(count)
    ]


def completions(llm: LLM, *, is_alone: bool = False) -> list[list[CompletionOutput]]:
    """The outputs of all prompts at once, or of each in an empty cache."""
    pairs = list(zip(make_prompts(), MIXED, strict=True))
    if not is_alone:
        prompts, sampling = zip(*pairs, strict=True)
        outputs = llm.generate(list(prompts), list(sampling), use_progress=False)
        return [output.outputs for output in outputs]
    found = []
    for prompt, sampling in pairs:
        assert llm.reset_prefix_cache()
        found += [one.outputs for one in llm.generate([prompt], sampling, use_progress=False)]
    return found


def finish(llm: LLM) -> None:
    """Run the steps that overlap the last one; then nothing is held."""
    while llm._engine.has_work:
        llm._engine.step()
    llm._engine.check_integrity()
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_state_slots == stats.num_state_slots > 0


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(config=hybrid_config("scheduler.overlap=false")) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[CompletionOutput]]:
    return completions(plain, is_alone=True)


@pytest.mark.parametrize(
    "overrides",
    [
        ("scheduler.overlap=false",),
        ("scheduler.overlap=true",),
        ("scheduler.overlap=true", "graphs.mode=captured"),
        ("scheduler.max_num_batched_tokens=8", "cache.state_slots=9"),
        ("cache.enable_prefix_caching=false", "scheduler.overlap=true"),
        ("cache.block_size=16", "scheduler.max_num_seqs=3", "cache.state_slots=4"),
    ],
    ids=lambda overrides: " ".join(one.partition(".")[2] for one in overrides),
)
def test_outputs_are_those_alone(
    overrides: tuple[str, ...], expected: list[list[CompletionOutput]]
) -> None:
    """The second run finds prefixes in the cache."""
    with LLM(config=hybrid_config(*overrides)) as llm:
        for _ in range(2):
            assert completions(llm) == expected
            finish(llm)
        assert llm.stats().late_compiles == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("cache.block_size=16",),
        ("scheduler.overlap=true", "graphs.mode=captured"),
        ("cache.block_size=32", "scheduler.max_num_seqs=3", "cache.state_slots=8"),
    ],
    ids=lambda overrides: " ".join(one.partition(".")[2] for one in overrides),
)
def test_drafts_change_no_output(
    overrides: tuple[str, ...], expected: list[list[CompletionOutput]]
) -> None:
    drafter = ReplayDrafter(max_drafts=5, vocab_size=VOCAB_SIZE)
    drafter.accuracy = 0.8
    drafter.memorize(make_prompts(), [one[0].token_ids for one in expected])
    with make_llm(hybrid_config(*overrides), drafter) as llm:
        for _ in range(2):
            assert completions(llm) == expected
            finish(llm)
        stats = llm.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 60
    assert stats.num_draft_tokens - stats.num_accepted_tokens > 60


@pytest.mark.parametrize("name", ["qwen3.5", "granite4-dense"])
def test_text_is_drafted_for_every_kind_of_mixer(name: str, tmp_path: Path) -> None:
    path = str(save(reference_model(VARIANTS[name]), VARIANTS[name], tmp_path / "model"))
    values = {"model__config": {}, "model__path": path, "model__tokenizer": DEMO}
    shared = ("model.load_format=auto", "speculation.adaptive=false", "cache.block_size=16")
    shared = (*shared, "speculation.min_match=1")
    prompts = [[5, 9, 14, 20, 27, 35, 44] * 8, [*range(2, 40)], [3, 8] * 12]
    answers, stats = {}, None
    for method in ("none", "ngram"):
        with LLM(config=tiny_config(*shared, f"speculation.method={method}", **values)) as llm:
            outputs = llm.generate(prompts, LONG, use_progress=False)
            answers[method] = [one.outputs for one in outputs]
            stats = llm.stats().speculation
            finish(llm)
    assert answers["ngram"] == answers["none"]
    assert stats is not None
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_preemption_changes_no_output(overlap: str, expected: list[list[CompletionOutput]]) -> None:
    """8 rows share blocks for about two of the longest sequences."""
    memory_gib = (22 * 8 * 2 * 2 * 16 * 4 + 18 * 3 * 2 * 64 * 4) / 2**30
    with LLM(
        config=hybrid_config(
            f"scheduler.overlap={overlap}",
            "cache.state_slots=17",
            model__max_model_len=120,
            cache__memory_gib=memory_gib,
        )
    ) as llm:
        assert completions(llm) == expected
        assert llm.stats().num_preemptions > 3
        finish(llm)


def test_a_hit_counts_the_tokens_of_states() -> None:
    """The third request with a prefix hits, and an equal prompt in all whole units but the last."""
    numbers = random.Random(5)
    shared = [numbers.randrange(2, VOCAB_SIZE) for _ in range(43)]
    prompts = [[*shared, *numbers.choices(range(2, 200), k=20)] for _ in range(3)]
    with LLM(config=hybrid_config("cache.state_slots=40")) as llm:
        cached = []
        for prompt in [*prompts, *prompts]:
            (output,) = llm.generate([prompt], GREEDY, use_progress=False)
            cached.append(output.num_cached_tokens)
        assert cached == [0, 0, 40, 56, 40, 56]
        assert llm.stats().prefix_hits == sum(cached)
        (output,) = llm.generate([[*shared, 7]], SAMPLING["drawn"], use_progress=False)
        assert output.num_cached_tokens == 40


def test_a_conversation_continues_from_its_last_answer() -> None:
    with LLM(config=hybrid_config()) as llm:
        (output,) = llm.generate([[*range(2, 32)]], GREEDY, use_progress=False)
        # All tokens but the last of the 30 + 20 were computed: six units.
        following = [*range(2, 32), *output.outputs[0].token_ids, 9, 9, 9]
        (output,) = llm.generate([following], GREEDY, use_progress=False)
        assert output.num_cached_tokens == 48


@pytest.mark.parametrize(("num_seqs", "slots"), [(1, 2), (1, 3), (2, 4)])
def test_drafts_take_no_checkpoint_of_a_conversation(num_seqs: int, slots: int) -> None:
    """With two slots there are no drafts; with three there are."""
    numbers = random.Random(1)
    drafter = ReplayDrafter(max_drafts=5, vocab_size=VOCAB_SIZE)
    drafter.accuracy = 0.6
    sizes = (f"scheduler.max_num_seqs={num_seqs}", f"cache.state_slots={slots}")
    config = hybrid_config("cache.block_size=16", *sizes)
    sampling = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    with LLM(config=config) as plain, make_llm(config, drafter) as drafting:
        prompt = [numbers.randrange(2, VOCAB_SIZE) for _ in range(40)]
        for _ in range(5):
            (expected,) = plain.generate([prompt], sampling, use_progress=False)
            drafter.memorize([prompt], [expected.outputs[0].token_ids])
            (output,) = drafting.generate([prompt], sampling, use_progress=False)
            assert output.outputs == expected.outputs
            assert output.num_cached_tokens == expected.num_cached_tokens
            further = [numbers.randrange(2, VOCAB_SIZE) for _ in range(9)]
            prompt = [*prompt, *expected.outputs[0].token_ids, *further]
        assert expected.num_cached_tokens == 192
        stats = drafting.stats().speculation
        assert stats is not None
        assert (stats.num_accepted_tokens > 20) == (slots > 2)


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_rows_that_wait_for_masks_change_no_output(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps are repeated, from states before the last token."""
    config = hybrid_config(
        f"scheduler.overlap={overlap}",
        "cache.state_slots=20",
        **{"model.config": {**lfm2(), "vocab_size": 3077, "eos_token_id": 2}},
        model__tokenizer=DEMO,
    )
    words = StructuredOutputsParams(regex="([a-z]+ ){2,9}")
    sampling = [
        SamplingParams(seed=1, max_tokens=24, structured_outputs=words),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=24, structured_outputs=words, n=2, logprobs=1),
    ]
    prompts = make_prompts(9)
    held, fill, numbers = 0, GrammarMasks._fill, random.Random(1)

    def answers(llm: LLM) -> list[list[CompletionOutput]]:
        outputs = llm.generate(prompts, sampling * 3, use_progress=False)
        finish(llm)
        return [output.outputs for output in outputs]

    def fill_some(
        masks: GrammarMasks, states: list[object], num_free: int
    ) -> tuple[torch.Tensor, set[int]]:
        nonlocal held
        bits, waiting = fill(masks, states, num_free)
        waiting |= {place for place in range(len(states)) if numbers.random() < 0.3}
        held += len(waiting)
        return bits, waiting

    with LLM(config=config) as llm:
        with monkeypatch.context() as unlimited:
            begin = GrammarMasks.begin_step
            unlimited.setattr(
                GrammarMasks, "begin_step", lambda self, *seconds: begin(self, 1e9, 1e9)
            )
            unlimited.setattr(grammar_masks, "_MOST_CREDIT_S", 1e9)
            without = answers(llm)
        assert llm.reset_prefix_cache()
        monkeypatch.setattr(GrammarMasks, "_fill", fill_some)
        assert answers(llm) == without
        assert held > 50


def test_stages_give_the_same_outputs(expected: list[list[CompletionOutput]]) -> None:
    """The second stage has recurrent layers only, so it has no keys and values."""
    with LLM(config=hybrid_config("parallel.pipeline=2")) as llm:
        assert completions(llm) == expected


def test_ranks_give_the_same_tokens(expected: list[list[CompletionOutput]]) -> None:
    with LLM(config=hybrid_config("parallel.tensor=2")) as llm:
        for found, alone in zip(completions(llm), expected, strict=True):
            assert [one.token_ids for one in found] == [one.token_ids for one in alone]


@pytest.mark.parametrize("name", ["lfm2", "lfm2-bias", "nemotron-h", "nemotron-h-mixed"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    model = reference_model(variant)
    prompt = [(7 * index * index + 13 * index + 5) % 199 for index in range(70)]
    config = tiny_config(
        "model.load_format=auto",
        "scheduler.max_num_batched_tokens=16",
        model__config={},
        model__path=str(save(model, variant, tmp_path / "model")),
        model__tokenizer=DEMO,
    )
    with LLM(config=config) as llm:
        found = [
            llm.generate([prompt[:length]], GREEDY, use_progress=False)[0].outputs[0].token_ids
            for length in (70, 70, 33)
        ]
    model.generation_config.eos_token_id = None
    for tokens, length in zip(found, (70, 70, 33), strict=True):
        with torch.no_grad():
            reference = model.generate(
                torch.tensor([prompt[:length]]),
                attention_mask=torch.ones(1, length, dtype=torch.int64),
                max_new_tokens=20,
                do_sample=False,
            )
        assert tokens == reference[0, length:].tolist()
