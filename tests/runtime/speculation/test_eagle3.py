"""EAGLE-3 heads: drafts are those of a plain implementation, and change no output."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

import ostinato
from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.conf.root import RunConfig
from ostinato.models.config.head_spec import HeadSpec
from ostinato.models.demo.training.corpus import HELD_OUT
from ostinato.models.draft_heads.eagle3 import read_head_config
from ostinato.runtime.errors import StartupError
from ostinato.runtime.speculation.head_drafter import HeadDrafter
from tests.runtime.drafters import DraftRecorder
from tests.runtime.speculation.eagle_reference import AUX_LAYERS, ReferenceHead, write_head

DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"
TARGET = json.loads((DEMO / "config.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def config(head: Path | None, *words: str) -> RunConfig:
    drafts = [] if head is None else ["speculation.method=eagle3", f"speculation.model={head}"]
    return load_config(
        [
            "model.dtype=float32",
            "graphs.bundle=false",
            "graphs.cost_table_budget_s=0",
            "cache.memory_gib=0.05",
            "scheduler.max_num_seqs=8",
            "scheduler.max_num_batched_tokens=48",
            "speculation.max_tokens=4" if drafts else "speculation.method=none",
            *drafts,
            *words,
        ]
    )


def prompts() -> list[list[int]]:
    """Prompts of 5 to 100 tokens; some are computed in several chunks."""
    generator = random.Random(3)
    return [[generator.randrange(3, 3000) for _ in range(count)] for count in (5, 17, 40, 64, 100)]


@pytest.mark.parametrize(("mode", "norm_before_residual"), [("eager", False), ("captured", True)])
def test_drafts_are_those_of_a_plain_implementation(
    tmp_path: Path, mode: str, norm_before_residual: bool
) -> None:
    """Prompts run in chunks and batches, after refused drafts, and with a cached prefix."""
    tensors = write_head(tmp_path, TARGET, norm_before_residual=norm_before_residual)
    with LLM(config=config(tmp_path, f"graphs.mode={mode}")) as llm:
        recorder = DraftRecorder(llm)
        for _ in range(2):
            llm.generate(prompts(), GREEDY, use_progress=False)
        llm._engine.check_integrity()
        stats = llm.stats()
    model = Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    head = ReferenceHead(
        tensors, model.model.embed_tokens.weight, norm_before_residual=norm_before_residual
    )
    assert len(recorder.drawn) > 60
    assert stats.speculation is not None
    assert stats.speculation.drafting_seconds > 0
    if mode == "captured":
        assert stats.layers_by_program["captured"] == TARGET["num_hidden_layers"]
    with torch.inference_mode():
        for token_ids, drafts in recorder.drawn[::3]:
            assert drafts
            output = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True)
            hidden = torch.cat([output.hidden_states[layer][0] for layer in AUX_LAYERS], 1)
            for logits, draft in zip(
                head.draft_logits(token_ids, hidden, drafts), drafts, strict=True
            ):
                assert logits[draft] > logits.max() - 1e-2


def test_a_head_changes_no_output_whatever_the_scheduler_does(tmp_path: Path) -> None:
    """Few blocks cause preemptions; some requests have drafts and others have none."""
    write_head(tmp_path, TARGET)
    words = ("graphs.mode=eager", "cache.memory_gib=0.0012", "model.max_model_len=160")
    sampling = [
        SamplingParams(
            temperature=0.8, seed=index, max_tokens=40, ignore_eos=True, speculation=index % 3 != 1
        )
        for index in range(15)
    ]
    texts = [one[:90] for one in prompts()] * 3
    answers = []
    for head in (None, tmp_path):
        with LLM(config=config(head, *words)) as llm:
            answers.append(
                [
                    one.outputs[0].token_ids
                    for one in llm.generate(texts, sampling, use_progress=False)
                ]
            )
            llm._engine.check_integrity()
            assert llm.stats().num_preemptions > 0
    assert answers[0] == answers[1]


def test_the_bundled_head_gives_two_tokens_a_step() -> None:
    """The training text of the model and of the head does not contain these questions."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    asked = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in HELD_OUT
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=64)
    answers = []
    for head in (None, DEMO / "eagle3"):
        words = ("graphs.mode=eager", "model.dtype=bfloat16", "scheduler.max_num_seqs=1")
        with LLM(config=config(head, *words)) as llm:
            outputs = llm.generate(asked, sampling, use_progress=False)
            answers.append([one.outputs[0].token_ids for one in outputs])
            stats = llm.stats()
    assert answers[0] == answers[1]
    # Every prompt is one step, which gives the first token of its answer.
    steps = stats.num_steps - len(asked)
    assert sum(len(answer) - 1 for answer in answers[0]) >= 2.0 * steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 3000},
            "its vocabulary has 3000 tokens, and the model's has 3072",
        ),
        (
            {"target_hidden_size": 128},
            "it was trained for another model: it reads hidden states of 128 values "
            "(target_hidden_size), and the model's have 256",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
            "it was trained for another model: it reads the hidden states that enter layers 1, 2, "
            "5, which must be ascending and among the 5 layers of the model, 0 to 4",
        ),
        (
            {"target_num_hidden_layers": 32},
            "it was trained for another model: its target has 32 layers "
            "(target_num_hidden_layers), and the model has 5",
        ),
        (
            {"architectures": ["Eagle3Speculator"]},
            "its architecture is Eagle3Speculator, and speculation.method=eagle3 needs "
            "LlamaForCausalLMEagle3",
        ),
        (
            {"num_hidden_layers": 2},
            "config.json: num_hidden_layers=2 is not supported, only 1",
        ),
        (
            {"norm_before_residual": "no"},
            "config.json: norm_before_residual must be true or false, got 'no'",
        ),
        (
            {"target_num_hidden_layers": "5"},
            "config.json: target_num_hidden_layers must be an integer of at least 1, got '5'",
        ),
    ],
)
def test_a_head_for_another_model_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_head(tmp_path, TARGET)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, **changes}))
    assert refusal(config(tmp_path)) == (
        f"speculation.model={tmp_path} cannot be the head: {message}"
    )


def refusal(chosen: RunConfig) -> str:
    with pytest.raises(StartupError) as error:
        LLM(config=chosen)
    return str(error.value)


def test_a_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    write_head(tmp_path, TARGET)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"][-1] = 5000
    save_file(tensors, tmp_path / "model.safetensors")
    assert refusal(config(tmp_path, "graphs.mode=eager")) == (
        f"speculation.model={tmp_path} cannot be the head: its d2t names token 6535, and the "
        "model has 3072 tokens"
    )


def test_auto_takes_the_head_beside_the_texts(tmp_path: Path) -> None:
    """That `speculation.model` is a head follows from its config."""
    write_head(tmp_path, TARGET)
    words = ("graphs.mode=eager", "speculation.method=auto")
    repeating = [[5, 9, 14, 20, 27, 35, 44] * 8]
    with LLM(config=config(tmp_path, *words)) as llm:
        recorder = DraftRecorder(llm)
        answer = llm.generate(repeating, GREEDY, use_progress=False)[0].outputs[0].token_ids
        drafts = llm._engine._scheduler.drafts
        assert drafts is not None
        assert isinstance(drafts.proposer, HeadDrafter)
        stats = drafts.stats
    with LLM(config=config(None, "graphs.mode=eager")) as llm:
        plain = llm.generate(repeating, GREEDY, use_progress=False)[0].outputs[0].token_ids
    assert answer == plain
    # Some steps have drafts of the head, and others of the text.
    assert stats.num_drafts > sum(bool(draft) for _, draft in recorder.drawn)


def test_one_compiled_function_shows_no_hidden_states(tmp_path: Path) -> None:
    write_head(tmp_path, TARGET)
    text = refusal(config(tmp_path, "graphs.form=model"))
    assert text.endswith("shows no hidden states; set graphs.form=layer")


def test_layers_of_sglangs_configs_are_those_that_the_states_leave(tmp_path: Path) -> None:
    """Configs of both layouts give the same layers of hidden states."""
    write_head(tmp_path, TARGET)
    settings = json.loads((tmp_path / "config.json").read_text())
    entered = read_head_config(settings).head
    assert isinstance(entered, HeadSpec)
    assert entered.aux_layers == (1, 2, 4)
    del settings["eagle_aux_hidden_state_layer_ids"]
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    left = read_head_config({**settings, "eagle_config": nested}).head
    assert left == entered
    default = read_head_config(settings).head
    assert isinstance(default, HeadSpec)
    assert default.layers_of(32) == (2, 16, 29)
