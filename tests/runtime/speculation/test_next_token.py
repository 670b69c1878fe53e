"""Next-token layers (MTP): drafts are those of transformers, and change no output."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.conf.root import RunConfig
from ostinato.runtime.errors import StartupError
from tests.runtime.drafters import DraftRecorder
from tests.runtime.speculation.next_token_reference import ReferenceLayer
from tests.runtime.tiny import tiny_config

SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True),
    SamplingParams(
        temperature=0.8, seed=4, max_tokens=16, ignore_eos=True, frequency_penalty=0.7, logprobs=0
    ),
]


def config(model: Path, *words: str) -> RunConfig:
    return load_config(
        [
            f"model.path={model}",
            "model.dtype=float32",
            "graphs.bundle=false",
            "graphs.cost_table_budget_s=0",
            "cache.memory_gib=0.05",
            "scheduler.max_num_seqs=8",
            "scheduler.max_num_batched_tokens=24",
            "speculation.max_tokens=3",
            *words,
        ]
    )


def prompts() -> list[list[int]]:
    """Prompts of 5 to 60 tokens; some are computed in several chunks."""
    generator = random.Random(3)
    return [[generator.randrange(8, 199) for _ in range(count)] for count in (5, 17, 40, 60)]


@pytest.mark.parametrize(
    ("variant", "mode"),
    [
        ("deepseek-v3-yarn", "eager"),
        ("glm4-moe", "captured"),
        pytest.param("glm4-moe-lite", "eager", marks=pytest.mark.slow),
        pytest.param("deepseek-v3-yarn", "captured", marks=pytest.mark.slow),
    ],
)
def test_drafts_are_those_of_transformers_and_change_nothing(
    variant: str, mode: str, tmp_path: Path
) -> None:
    """Prompts run in chunks and batches, after refused drafts, and with a cached prefix."""
    reference = ReferenceLayer(variant, tmp_path)
    answers = []
    drawn: list[tuple[list[int], list[int]]] = []
    for method, graphs in (("none", "eager"), ("mtp", mode)):
        with LLM(
            config=config(tmp_path, f"graphs.mode={graphs}", f"speculation.method={method}")
        ) as llm:
            if method == "mtp":
                drawn = DraftRecorder(llm).drawn
            for _ in range(2):
                outputs = llm.generate(prompts(), SAMPLING, use_progress=False)
                answers.append([one.outputs for one in outputs])
            llm._engine.check_integrity()
    assert answers[:2] == answers[2:]
    assert len(drawn) > 40
    greedy = [
        (token_ids, drafts)
        for token_ids, drafts in drawn
        if token_ids[:5] in [prompt[:5] for prompt in prompts()[:2]]
    ]
    for token_ids, drafts in greedy[::3]:
        assert drafts
        found = reference.draft_logits(token_ids, drafts)
        assert all(one[draft] > one.max() - 1e-2 for one, draft in zip(found, drafts, strict=True))


def refusal(chosen: RunConfig) -> str:
    with pytest.raises(StartupError) as error:
        LLM(config=chosen)
    return str(error.value)


def test_a_model_of_another_family_is_refused() -> None:
    assert refusal(tiny_config("speculation=mtp")) == (
        "speculation.method=mtp: layers of LlamaForCausalLM that predict further tokens are not "
        "supported; those of DeepseekV3ForCausalLM, Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM "
        "are; set speculation.method=auto"
    )


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    """Its config does not name the layer, or its files lack it."""
    ReferenceLayer("glm4-moe", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    chosen = config(tmp_path, "graphs.mode=eager", "speculation=mtp")
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_nextn_predict_layers": 0}))
    assert refusal(chosen) == (
        "speculation.method=mtp: config.json has num_nextn_predict_layers=0: the checkpoint has no "
        "layer that predicts further tokens; take a checkpoint with at least 1, or set "
        "speculation.method=auto"
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tensors = load_file(tmp_path / "model.safetensors")
    left = {name: one for name, one in tensors.items() if ".layers.3." not in name}
    save_file(left, tmp_path / "model.safetensors")
    assert refusal(chosen) == (
        f"speculation.method=mtp: {tmp_path} lacks the tensor model.layers.3.eh_proj.weight, "
        "although its config.json has num_nextn_predict_layers=1; take a checkpoint that was saved "
        "with this layer, or set speculation.method=auto"
    )


def test_a_model_through_transformers_is_refused(tmp_path: Path) -> None:
    """Its family has such layers, but a model through transformers shows no hidden states."""
    ReferenceLayer("glm4-moe", tmp_path)
    chosen = config(
        tmp_path, "graphs.mode=eager", "speculation=mtp", "model.implementation=transformers"
    )
    assert refusal(chosen) == (
        "speculation.method=mtp: Glm4MoeForCausalLM runs through transformers "
        "(model.implementation=transformers), which shows no hidden states; set "
        "model.implementation=native, or set speculation.method=auto"
    )
