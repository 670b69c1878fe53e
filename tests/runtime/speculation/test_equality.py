"""Outputs with drafts equal those of plain decoding, for each form of weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato import LLM
from ostinato.runtime.types.outputs import CompletionOutput
from tests.runtime.sampling.test_verification import (
    SAMPLING,
    VOCAB_SIZE,
    config,
    make_prompts,
    seeded,
)
from tests.runtime.speculation.eagle_reference import write_head
from tests.runtime.tiny import MODEL

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


# Dummy weights are a function of a model's shapes, so `same` and `near` have the target's weights.
# `near` has another epsilon in its norms. `other` has one layer less.
DRAFT_MODELS = {"same": {}, "near": {"rms_norm_eps": 1e-4}, "other": {"num_hidden_layers": 1}}
OFTEN = {"float32": "near", "bfloat16": "same", "int8": "other", "int4": "near"}


def draft_model(directory: Path, **changes: object) -> str:
    """Writes the config of a draft model; its weights are random."""
    settings = {**MODEL, "vocab_size": VOCAB_SIZE, "eos_token_id": 2, **changes}
    (directory / "config.json").write_text(json.dumps(settings))
    return f"speculation.model={directory}"


@pytest.mark.parametrize(
    "form",
    [
        form if form in ("float32", "int4") else pytest.param(form, marks=pytest.mark.slow)
        for form in FORMS
    ],
    indirect=True,
)
def test_a_head_changes_neither_tokens_nor_log_probabilities(
    form: str, plain: list[list[CompletionOutput]], tmp_path: Path
) -> None:
    """The head's weights are random, so nearly all of its drafts are refused."""
    write_head(
        tmp_path,
        {**MODEL, "vocab_size": VOCAB_SIZE},
        draft_vocab_size=VOCAB_SIZE,
        eagle_aux_hidden_state_layer_ids=[0, 1],
    )
    words = ("speculation.method=eagle3", f"speculation.model={tmp_path}")
    with LLM(config=config("eager", *FORMS[form], *words, "speculation.adaptive=false")) as llm:
        assert completions(llm) == plain
        assert completions(llm) == plain
        llm._engine.check_integrity()
        stats = llm.stats().speculation
    assert stats is not None
    assert stats.num_draft_tokens > 100


GLM = {
    **MODEL,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_a_next_token_layer_changes_neither_tokens_nor_log_probabilities(form: str) -> None:
    """Float32 is in test_next_token.py. The second round finds its prompts in the prefix cache."""
    answers = []
    for method in ("none", "mtp"):
        words = (*FORMS[form], f"speculation={method}", "speculation.adaptive=false")
        with LLM(config=config("eager", *words, model=GLM)) as llm:
            answers += [completions(llm) for _ in range(1 if method == "none" else 2)]
            llm._engine.check_integrity()
            stats = llm.stats().speculation
    assert answers[0] == answers[1] == answers[2]
    assert stats is not None
    assert stats.num_draft_tokens > 100


def test_a_draft_model_changes_neither_tokens_nor_log_probabilities(
    form: str, plain: list[list[CompletionOutput]], tmp_path: Path
) -> None:
    """One draft model for each form of weights."""
    check_draft_model(form, plain, OFTEN[form], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DRAFT_MODELS))
def test_every_draft_model_changes_neither_tokens_nor_log_probabilities(
    form: str, plain: list[list[CompletionOutput]], name: str, tmp_path: Path
) -> None:
    check_draft_model(form, plain, name, tmp_path)


def check_draft_model(
    form: str, plain: list[list[CompletionOutput]], name: str, tmp_path: Path
) -> None:
    """The second round finds its prompts in the prefix cache."""
    words = ("speculation.method=draft", draft_model(tmp_path, **DRAFT_MODELS[name]))
    chosen = config("eager", *FORMS[form], *words, "speculation.adaptive=false")
    with LLM(config=chosen) as llm:
        assert completions(llm) == plain
        assert completions(llm) == plain
        before = llm.stats().speculation
        llm.generate(PROMPTS, seeded(temperature=0.0, max_tokens=30), use_progress=False)
        llm._engine.check_integrity()
        after = llm.stats().speculation
    assert before is not None
    assert after is not None
    assert before.num_draft_tokens > 100
    assert before.drafting_seconds > 0.0
    # Counted over plain greedy requests: penalties, grammars and rules of transcripts make drafts
    # wrong, even those of the same model.
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    share = (after.num_accepted_tokens - before.num_accepted_tokens) / num_drafts
    least, most = {"same": (0.9, 1.0), "near": (0.3, 0.95), "other": (0.0, 0.15)}[name]
    assert least <= share <= most
