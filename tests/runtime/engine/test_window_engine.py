"""Engines of models with sliding windows: freeing blocks outside of the windows changes no token.

The slow twin is the same engine with `cache.keep_all_tokens`.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from tests.models.random_checkpoints import VARIANTS, reference_model, save
from tests.runtime.tiny import MODEL, VOCAB_SIZE, tiny_config

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    "beams": SamplingParams(use_beam_search=True, n=3, max_tokens=20, temperature=0.0),
    "drawn": SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True),
}
GREEDY = SAMPLING["greedy"]
WINDOW = 12
LENGTH = 256
_SLIDING, _FULL = "sliding_attention", "full_attention"
_LLAMA = {**MODEL, "sliding_window": WINDOW}
# More layers with a window, more without, only layers with one.
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        **_LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _SLIDING],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
    },
    "qwen2": {
        **_LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "layer_types": [_FULL, _SLIDING, _FULL, _FULL],
    },
    "mistral": {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
}


def make_llm(name: str, *overrides: str, **values: object) -> LLM:
    return LLM(config=tiny_config(*overrides, model__config=MODELS[name], **values))


def make_prompts() -> list[list[int]]:
    """Prompts of which some begin alike; most are longer than the window."""
    numbers = random.Random(0)
    stems = [[numbers.randrange(2, VOCAB_SIZE) for _ in range(150)] for _ in range(3)]
    return [
        [*numbers.choice(stems)[: numbers.randint(0, 150)], *numbers.choices(range(2, 200), k=5)]
        for _ in range(12)
    ]


def generate(llm: LLM, sampling: str = "greedy") -> list[list[list[int]]]:
    outputs = llm.generate(make_prompts(), SAMPLING[sampling], use_progress=False)
    return [[one.token_ids for one in output.outputs] for output in outputs]


def kv_groups_of(llm: LLM) -> tuple[KVGroup, ...]:
    return llm._engine._cache.groups


@cache
def expected(name: str, *overrides: str, sampling: str = "greedy") -> list[list[list[int]]]:
    """The tokens of an engine that keeps all blocks."""
    llm = make_llm(name, "cache.keep_all_tokens=true", *overrides)
    assert kv_groups_of(llm) == WHOLE_CACHE
    return generate(llm, sampling)


@pytest.mark.parametrize("name", MODELS)
def test_freed_blocks_change_no_token(name: str) -> None:
    """The second run finds its prompts in the cache, in units of 8 tokens."""
    llm = make_llm(name)
    assert generate(llm) == expected(name)
    outputs = llm.generate(make_prompts(), GREEDY, use_progress=False)
    assert [[one.token_ids for one in output.outputs] for output in outputs] == expected(name)
    for output in outputs:
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 8 * 8
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(
    "overrides",
    [
        ("scheduler.max_num_batched_tokens=8",),
        ("graphs.mode=captured",),
        ("speculation.method=ngram", "speculation.adaptive=false"),
        ("scheduler.overlap=true",),
        ("parallel.tensor=2",),
        ("parallel.pipeline=2",),
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_engines_give_the_same_tokens(overrides: tuple[str, ...]) -> None:
    llm = make_llm("gemma3", *overrides)
    try:
        assert generate(llm) == expected("gemma3")
    finally:
        llm.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_of_eight_bits_with_windows(name: str) -> None:
    assert generate(make_llm(name, "cache.dtype=int8")) == expected(name, "cache.dtype=int8")


@pytest.mark.parametrize("name", ["gemma3", "qwen2"])
def test_a_draft_model_beside_windows(name: str, tmp_path: Path) -> None:
    """The draft model is the model itself, so that most of its drafts are right."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    llm = make_llm(
        name,
        "speculation.method=draft",
        f"speculation.model={tmp_path}",
        "scheduler.max_num_seqs=4",
    )
    assert len(kv_groups_of(llm)) == 2
    assert generate(llm) == expected(name)
    drafts = llm.stats().speculation
    assert drafts is not None
    assert 0 < drafts.num_draft_tokens < 1.2 * drafts.num_accepted_tokens


def test_beams_and_candidates_share_blocks_of_windows() -> None:
    llm = make_llm("gemma3")
    for sampling in ("beams", "drawn"):
        assert generate(llm, sampling) == expected("gemma3", sampling=sampling)


@pytest.mark.parametrize(("name", "share"), [("gemma3", 0.5), ("qwen2", 0.9), ("mistral", 0.3)])
def test_little_memory_is_enough(name: str, share: float) -> None:
    """The memory is a share of what one sequence of 256 tokens needs if all layers keep it."""
    step = "scheduler.max_num_batched_tokens=16"
    length = f"model.max_model_len={LENGTH}"
    model = MODELS[name]
    bytes_per_token = model["num_hidden_layers"] * 2 * 2 * 16 * 4  # of all layers
    memory_gib = share * LENGTH * bytes_per_token / 2**30
    llm = make_llm(name, step, length, cache__memory_gib=memory_gib)
    assert generate(llm) == expected(name)
    # If all layers have a window, a sequence has all blocks that it ever needs from the start.
    assert name == "mistral" or llm.stats().num_preemptions > 0


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    variant = VARIANTS["gemma3"]
    model = reference_model(variant)
    window = model.config.sliding_window
    llm = LLM(
        config=tiny_config(
            "model.load_format=auto",
            "scheduler.max_num_batched_tokens=16",
            model__config={},
            model__path=str(save(model, variant, tmp_path / "model")),
        )
    )
    prompt = [(7 * index * index + 13 * index + 5) % 199 for index in range(6 * window)]
    assert len(kv_groups_of(llm)) == 2
    (output,) = llm.generate([prompt], GREEDY, use_progress=False)
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
        )
    assert output.outputs[0].token_ids == tokens[0, len(prompt) :].tolist()
