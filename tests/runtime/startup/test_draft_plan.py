"""The draft model in the plan: its memory, and the error for each model that cannot draft."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import ostinato
from ostinato.conf.compose import load_config
from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.speculation_schema import NO_DRAFTS
from ostinato.models.sharding import WHOLE, Shard, Stage
from ostinato.models.stage_layers import num_bytes
from ostinato.runtime.errors import StartupError
from ostinato.runtime.execution.hidden_state_pool import num_pool_slots
from ostinato.runtime.memory.footprint import CUDA_GRAPH_BYTES, MeasuredMemory
from ostinato.runtime.memory.memory_plan import MemoryPlan
from ostinato.runtime.startup.plan.engine_plan import make_plan
from ostinato.runtime.startup.plan.model_source import model_skeleton, open_model, part_of
from ostinato.runtime.startup.plan.planning import plan_engine
from ostinato.runtime.startup.rank_group import agree
from ostinato.runtime.text.vocabulary import vocabulary_difference
from tests.runtime.tiny import MODEL, tiny_config

DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"
GLM = {
    **MODEL,
    "architectures": ["Glm4MoeForCausalLM"],
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}


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


def refusal(config: RunConfig) -> str:
    with pytest.raises(StartupError) as error:
        plan_engine(config.engine, open_model(config.engine))
    text = str(error.value)
    assert "\n" not in text
    return text


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    assert refusal(drafting(tmp_path, vocab_size=301)) == (
        f"speculation.model={tmp_path} cannot be the draft model: its vocabulary has "
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


GIB = 1 << 30


def on_gpu(config: EngineConfig, measured: MeasuredMemory | None = None) -> MemoryPlan:
    source = open_model(config, torch.device("cuda"))
    return plan_engine(config, source, free_bytes=64 * GIB, measured=measured)


def test_a_gpu_has_the_memory_and_the_graphs_of_both_models(tmp_path: Path) -> None:
    words = ("graphs.mode=captured", "cache.memory_gib=null")
    config = drafting(tmp_path, *words, num_hidden_layers=1).engine
    plain = dataclasses.replace(config, speculation=NO_DRAFTS)
    source = open_model(config, torch.device("cuda"))
    assert source.draft is not None
    both, alone = on_gpu(config), on_gpu(plain)
    added = num_bytes(model_skeleton(source.draft))
    assert both.weights_bytes == alone.weights_bytes + added
    assert both.graph_bytes > alone.graph_bytes + CUDA_GRAPH_BYTES
    # The draft model's logits and sampling state stay beside those of the model.
    rows = source.draft.limits.max_num_rows
    assert both.activation_bytes > alone.activation_bytes + 16 * rows * MODEL["vocab_size"]
    # The model's memory is measured before the draft model is loaded.
    measured = MeasuredMemory(used_bytes=GIB, step_bytes=GIB)
    again = on_gpu(config, measured)
    assert again.weights_bytes == GIB + added
    assert GIB < again.activation_bytes < GIB + both.activation_bytes
    assert again.num_blocks < on_gpu(plain, measured).num_blocks


def test_a_gpu_has_the_hidden_states_that_wait_for_a_head() -> None:
    words = [
        *("speculation.method=eagle3", f"speculation.model={DEMO / 'eagle3'}"),
        "speculation.max_tokens=7",
    ]
    config = load_config(words).engine
    source = open_model(config, torch.device("cuda"))
    alone = on_gpu(dataclasses.replace(config, speculation=NO_DRAFTS))
    positions = num_pool_slots(source.limits)
    assert positions == 8192 + 256 * (16 + 2 * 8)
    least = positions * 3 * source.config.hidden_size * source.dtype.itemsize
    assert on_gpu(config).activation_bytes > alone.activation_bytes + least


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


# Shards of the leader and of another rank.
DIVISIONS = [
    (Shard(0, 2), Shard(1, 2)),
    (Shard(0, 1, Stage(1, 2)), Shard(0, 1, Stage(0, 2))),
    (Shard(0, 2, Stage(1, 2)), Shard(1, 2, Stage(0, 2))),
]


def check_division(config: EngineConfig, leader: Shard, other: Shard, copied: list[str]) -> None:
    """Checks the plans of two ranks of an engine with a head.

    Args:
        config: the engine's configuration.
        leader: the shard of rank 0.
        other: the shard of another rank.
        copied: modules of the model of which the leader has copies.
    """
    plan = make_plan(config, 1, shard=leader)
    plain = make_plan(without_drafts(config), 1, shard=leader)
    assert plan.draft is not None
    source = plan.draft.source
    assert source.shard == WHOLE
    num_copied = 0
    shard = None if source.tables is None else source.tables.shard
    if source.tables is not None:
        model = model_skeleton(source.tables)
        found = [name for name, one in model.named_children() if list(one.parameters())]
        assert [name for name in found if name != "final_norm"] == copied
        num_copied = num_bytes(model)
        assert any("are copies of the model's embedding" in one for one in plan.memory.reasons)
    else:
        assert copied == []
    added = num_bytes(model_skeleton(source)) + num_copied
    assert plan.memory.weights_bytes == plain.memory.weights_bytes + added
    inputs = plan.source.head_inputs
    there = make_plan(config, 1, max_drafts=7, shard=other, head_inputs=inputs)
    assert there.draft is None
    alone = make_plan(without_drafts(config), 1, shard=other)
    assert there.memory.weights_bytes == alone.memory.weights_bytes
    assert there.source.handoff_shape == plan.source.handoff_shape
    # A model that was opened whole is divided into the same parts.
    whole = open_model(config)
    part = part_of(whole, leader)
    assert part.draft is not None
    assert (None if part.draft.tables is None else part.draft.tables.shard) == shard
    assert part.head_inputs == inputs == part_of(whole, other).head_inputs


def without_drafts(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, speculation=NO_DRAFTS)


@pytest.mark.parametrize(
    ("shards", "copied"),
    list(zip(DIVISIONS, [["embed_tokens"], [], ["embed_tokens"]], strict=True)),
)
def test_a_head_is_planned_on_the_leader(shards: tuple[Shard, Shard], copied: list[str]) -> None:
    """The embedding of the bundled model is its output head, so the last stage has it."""
    words = ["speculation.method=eagle3", f"speculation.model={DEMO / 'eagle3'}"]
    check_division(load_config(words).engine, *shards, copied)
    plan = make_plan(load_config(words).engine, 1, shard=shards[0])
    assert plan.source.handoff_shape.num_states == 4
    states = plan.make_aux_states()
    assert states is not None
    assert len(states.layers) + states.num_earlier == 3
    assert (states.num_earlier > 0) == (shards[0].stage.count > 1)
    inputs = plan.source.head_inputs
    other = make_plan(load_config(words).engine, 1, shard=shards[1], head_inputs=inputs)
    theirs = other.make_aux_states()
    if shards[1].rank == 0:  # the stage before the last
        assert theirs is not None
        assert (len(theirs.layers), theirs.num_earlier) == (states.num_earlier, 0)
    else:
        assert theirs is None


@pytest.mark.parametrize(
    ("shards", "copied"),
    list(zip(DIVISIONS, [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], strict=True)),
)
def test_a_next_token_layer_is_planned_on_the_leader(
    shards: tuple[Shard, Shard], copied: list[str]
) -> None:
    config = tiny_config("speculation=mtp", model__config=GLM).engine
    check_division(config, *shards, copied)
    plan = make_plan(config, 1, shard=shards[0])
    inputs = plan.source.head_inputs
    other = make_plan(config, 1, shard=shards[1], head_inputs=inputs).make_aux_states()
    states = plan.make_aux_states()
    assert states is not None
    assert states.has_final
    # All ranks of the last stage compute the same rows.
    assert (other is not None and other.has_final) == shards[1].stage.is_last


def test_a_next_token_layer_is_planned() -> None:
    config = tiny_config("speculation=mtp", model__config=GLM)
    alone = make_plan(tiny_config(model__config=GLM).engine, 1)
    both = make_plan(config.engine, 1)
    assert both.draft is not None
    assert both.memory.weights_bytes > alone.memory.weights_bytes
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
    assert found.startswith(f"it has another vocabulary: its token {low} is ")
    file.write_text("{}")
    with pytest.raises(StartupError, match="has no vocabulary"):
        vocabulary_difference(tmp_path, DEMO)
