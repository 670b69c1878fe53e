"""Draft models and heads on a CUDA device: same tokens, no waits, no late compilations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.conf.root import RunConfig
from ostinato.runtime.speculation.proposer import DraftJob
from tests.gpu.test_engine_gpu import generate, make_prompts
from tests.gpu.tiny_llama import MODEL, cuda_config
from tests.runtime.speculation.eagle_reference import write_head

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLING = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=2, top_k=8, top_p=0.9, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, min_p=0.02, max_tokens=24, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=0.7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=24, speculation=False),
]


def drafting(name: str, directory: Path, *words: str) -> RunConfig:
    """The configuration of an engine with a draft head or a draft model.

    The draft model has the target's weights, and another epsilon of the norms.
    """
    if name == "head":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        write_head(directory, MODEL, eagle_aux_hidden_state_layer_ids=[0, 1], **heads)
        method = "eagle3"
    else:
        (directory / "config.json").write_text(json.dumps({**MODEL, "rms_norm_eps": 1e-4}))
        method = "draft"
    return cuda_config(
        f"speculation.method={method}",
        f"speculation.model={directory}",
        "speculation.max_tokens=3",
        "speculation.adaptive=false",
        *words,
    )


def watch_drafting(llm: LLM) -> list[int]:
    """Makes the engine fail if `draw` waits for the device; returns the numbers of draft tokens."""
    drafts = llm._engine._scheduler.drafts
    assert drafts is not None
    draw = drafts.proposer.draw
    counts: list[int] = []

    def watched(jobs: Sequence[DraftJob], most_tokens: int) -> list[list[int]]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = draw(jobs, most_tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum(map(len, found)))
        return found

    drafts.proposer.draw = watched
    return counts


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("name", ["model", "head"])
def test_tokens_are_those_without_the_drafter(name: str, overlap: str, tmp_path: Path) -> None:
    words = (f"scheduler.overlap={overlap}",)
    prompts = make_prompts(2 * len(SAMPLING), seed=7, longest=150)
    plain = LLM(config=cuda_config(*words))
    expected = generate(plain, prompts, SAMPLING * 2)
    del plain
    llm = LLM(config=drafting(name, tmp_path, *words))
    counts = watch_drafting(llm)
    for _ in range(2):  # the second time with cached prefixes
        assert generate(llm, prompts, SAMPLING * 2) == expected
    llm._engine.check_integrity()
    stats = llm.stats()
    assert sum(counts) > 200
    assert stats.late_compiles == []
    assert stats.speculation is not None
    if name == "model":
        assert stats.speculation.num_accepted_tokens > 100


@pytest.mark.parametrize("name", ["model", "head"])
def test_preemption_changes_no_token(name: str, tmp_path: Path) -> None:
    block_bytes = 2 * 3 * 2 * 16 * 64 * 4 + (2 * 2 * 16 * 64 * 4 if name == "model" else 0)
    words = ("model.max_model_len=112", f"cache.memory_gib={13 * block_bytes / 2**30}")
    prompts = make_prompts(10, seed=3, longest=40)
    sampling = SamplingParams(temperature=0.8, seed=6, max_tokens=60, ignore_eos=True)
    plain = LLM(config=cuda_config("model.max_model_len=112"))
    expected = generate(plain, prompts, sampling)
    del plain
    tight = LLM(config=drafting(name, tmp_path, *words))
    assert generate(tight, prompts, sampling) == expected
    stats = tight.stats()
    assert stats.num_preemptions > 0
    assert stats.late_compiles == []
    assert stats.speculation is not None
    assert stats.speculation.num_draft_tokens > 100


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["model", "head"])
def test_many_shapes_compile_nothing_late_and_leak_nothing(
    name: str, dtype: str, tmp_path: Path
) -> None:
    llm = LLM(config=drafting(name, tmp_path, f"model.dtype={dtype}"))
    allocated: list[int] = []
    for seed in range(12):
        prompts = make_prompts(1 + seed, seed=seed)
        generate(llm, prompts, [SAMPLING[index % 7] for index in range(len(prompts))])
        allocated.append(torch.cuda.memory_allocated())
    stats = llm.stats()
    assert stats.late_compiles == []
    assert stats.steps_by_kind["captured"] > 0
    assert stats.num_free_blocks == stats.num_blocks
    # The first rounds may load kernels with workspaces that stay.
    assert allocated[6:] == [allocated[6]] * len(allocated[6:])


def test_measured_costs_choose_the_number_of_drafts(tmp_path: Path) -> None:
    """With step costs measured at the start, drafts change no token and compile nothing late."""
    words = ("speculation.adaptive=true", "graphs.cost_table_budget_s=1")
    plain = LLM(config=cuda_config())
    prompts = make_prompts(6, seed=9, longest=60)
    expected = generate(plain, prompts)
    del plain
    llm = LLM(config=drafting("model", tmp_path, *words))
    assert llm._engine.draft_costs is not None
    assert generate(llm, prompts) == expected
    assert llm.stats().late_compiles == []
