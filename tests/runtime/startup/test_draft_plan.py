"""The draft model in the plan: its memory, and one line for each model that cannot draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ostinato
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.models.sharding import WHOLE, Shard, Stage
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.engine_plan import make_plan
from ostinato.runtime.startup.plan.model_source import open_model, part_of
from ostinato.runtime.startup.plan.planning import plan_engine
from ostinato.runtime.startup.rank_group import agree
from ostinato.runtime.text.vocabulary import vocabulary_difference
from tests.runtime.tiny import MODEL, tiny_config

DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"


def drafting(directory: Path, *words: str, **changes: object) -> RunConfig:
    (directory / "config.json").write_text(json.dumps({**MODEL, **changes}))
    return tiny_config("speculation.method=draft", f"speculation.model={directory}", *words)


def test_its_weights_and_blocks_are_planned(tmp_path: Path) -> None:
    config = drafting(tmp_path, num_hidden_layers=1).engine
    both, alone = make_plan(config, 1), make_plan(tiny_config().engine, 1)
    assert both.draft is not None
    assert alone.draft is None
    draft = make_plan(both.draft.config, 1)
    assert both.memory.weights_bytes == alone.memory.weights_bytes + draft.memory.weights_bytes
    sizes = [plan.memory.bytes_per_block for plan in (both, alone, draft)]
    assert sizes[0] == sizes[1] + sizes[2] == 3 * sizes[2]
    assert both.draft.memory.bytes_per_block == sizes[2]
    assert both.memory.kv_bytes == both.memory.num_blocks * sizes[0]
    assert any(reason.startswith("draft model: ") for reason in both.memory.reasons)


def test_a_shorter_context_of_the_draft_model_does_not_shorten_the_models(tmp_path: Path) -> None:
    plan = make_plan(drafting(tmp_path, max_position_embeddings=64).engine, 1)
    assert plan.draft is not None
    assert (plan.memory.max_model_len, plan.draft.memory.max_model_len) == (256, 64)


def refusal(config: RunConfig, device: torch.device | None = None) -> str:
    with pytest.raises(StartupError) as error:
        plan_engine(config.engine, open_model(config.engine, device))
    text = str(error.value)
    assert "\n" not in text
    return text


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    assert refusal(drafting(tmp_path, vocab_size=301)) == (
        f"speculation.model={tmp_path} cannot be the draft model: it has another vocabulary, of "
        "301 tokens, and the model's has 300"
    )


def test_a_model_that_does_not_generate_is_refused(tmp_path: Path) -> None:
    encoder = {"architectures": ["BertModel"], "model_type": "bert", "type_vocab_size": 2}
    words = "scheduler.max_num_batched_tokens=256"
    config = drafting(tmp_path, words, **encoder, layer_norm_eps=1e-12, hidden_act="gelu")
    assert refusal(config).endswith("BertModel does not generate")


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    config = tiny_config("speculation.method=draft", f"speculation.model={tmp_path}/no such")
    assert refusal(config) == f"speculation.model='{tmp_path}/no such': no such directory"


def test_a_gpu_has_no_draft_model_yet(tmp_path: Path) -> None:
    assert refusal(drafting(tmp_path), torch.device("cuda")) == (
        f"speculation.model={tmp_path} needs a CPU, and the model runs on cuda; set "
        "speculation.method=auto without a model"
    )


@pytest.mark.parametrize(
    ("leader", "other"),
    [
        (Shard(0, 2), Shard(1, 2)),
        (Shard(0, 1, Stage(1, 2)), Shard(0, 1, Stage(0, 2))),
    ],
)
def test_only_the_leader_holds_the_draft_model(tmp_path: Path, leader: Shard, other: Shard) -> None:
    config, plain = drafting(tmp_path).engine, tiny_config().engine
    plan = make_plan(config, 1, shard=leader)
    assert plan.draft is not None
    assert plan.draft.source.shard == WHOLE
    assert plan.memory.weights_bytes > make_plan(plain, 1, shard=leader).memory.weights_bytes
    without = make_plan(config, 1, max_drafts=7, shard=other)
    assert without.draft is None
    assert without.memory.weights_bytes == make_plan(plain, 1, shard=other).memory.weights_bytes
    whole = open_model(config)
    assert part_of(whole, leader).draft is not None
    assert part_of(whole, other).draft is None


def test_ranks_agree_on_the_blocks_of_both_models(tmp_path: Path) -> None:
    plan = make_plan(drafting(tmp_path).engine, 1, shard=Shard(0, 2))
    fewer = plan.memory.num_blocks - 3

    def meet(name: str, numbers: list[int]) -> list[list[int]]:
        return [numbers, [fewer, *numbers[1:]]]

    agreed, _ = agree(plan, meet)
    assert agreed.draft is not None
    assert agreed.memory.num_blocks == agreed.draft.memory.num_blocks == fewer


@pytest.mark.parametrize(
    ("shard", "divided", "remedy"),
    [
        (Shard(0, 2), "parallel.tensor=2", "parallel.tensor=1"),
        (Shard(0, 1, Stage(1, 2)), "parallel.pipeline=2", "parallel.pipeline=1"),
        (
            Shard(0, 2, Stage(1, 2)),
            "parallel.tensor=2, parallel.pipeline=2",
            "parallel.tensor=1 and parallel.pipeline=1",
        ),
    ],
)
def test_several_ranks_have_no_head_yet(shard: Shard, divided: str, remedy: str) -> None:
    head = DEMO / "eagle3"
    config = load_config(["speculation.method=eagle3", f"speculation.model={head}"]).engine
    with pytest.raises(StartupError) as error:
        open_model(config, shard=shard)
    assert str(error.value) == (
        f"speculation.model={head} reads the whole model on one rank, and {divided}; set "
        f"speculation.method=draft with a draft model, or {remedy}"
    )


def test_a_next_token_layer_drafts_on_one_rank_of_a_cpu() -> None:
    glm = {"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    model = {**MODEL, **glm, **experts, "moe_intermediate_size": 32}
    config = tiny_config("speculation=mtp", model__config=model)
    alone = make_plan(tiny_config(model__config=model).engine, 1)
    both = make_plan(config.engine, 1)
    assert both.draft is not None
    assert both.memory.weights_bytes > alone.memory.weights_bytes
    assert refusal(config, torch.device("cuda")) == (
        "speculation.method=mtp needs a CPU, and the model runs on cuda; set "
        "speculation.method=auto without a model"
    )
    with pytest.raises(StartupError, match=r"^speculation\.method=mtp reads the whole model on"):
        open_model(config.engine, shard=Shard(0, 2))
    with pytest.raises(ConfigError, match="must be left out unless"):
        load_config(["speculation=mtp", "speculation.model=x"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["speculation.method=draft"],
            "speculation.model must be set with speculation.method=draft",
        ),
        (
            ["speculation=ngram", "speculation.model=x"],
            "speculation.model must be left out unless speculation.method is draft, eagle3 or "
            "auto, got 'x'",
        ),
        (["speculation.max_tokens=32"], "speculation.max_tokens must be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(words)
    assert message in str(error.value)


def test_vocabularies_are_compared_token_by_token(tmp_path: Path) -> None:
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    file = tmp_path / "tokenizer.json"
    assert vocabulary_difference(tmp_path, DEMO) is None  # no tokenizer to compare
    file.write_text(json.dumps(tokenizer, indent=1))
    assert vocabulary_difference(tmp_path, DEMO) is None
    first, second = list(vocab)[500:502]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    low = min(vocab[first], vocab[second])
    found = vocabulary_difference(tmp_path, DEMO)
    assert found is not None
    assert found.startswith(f"it has another vocabulary: token {low} is ")
    file.write_text("{}")
    with pytest.raises(StartupError, match="has no vocabulary"):
        vocabulary_difference(tmp_path, DEMO)
