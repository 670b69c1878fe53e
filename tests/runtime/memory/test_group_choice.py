"""KV groups in the plan of an engine: which it has and why, and the bytes of their blocks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from ostinato.conf.root import RunConfig
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.models.sharding import shard_of_rank
from ostinato.runtime.startup.loading import open_bundle
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.plan.identity import block_identity
from tests.runtime.tiny import MODEL, tiny_config

WINDOW = 32
KINDS = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
GROUPS = (KVGroup(0, units=6, pieces=1), KVGroup(WINDOW, units=1, pieces=6))
LAYER_BYTES = 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 floats, for one token


def with_windows(*words: str, kinds: list[str] = KINDS, **keys: object) -> RunConfig:
    model = {
        **MODEL,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": WINDOW,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        **keys,
    }
    return tiny_config(*words, **{"model.config": model})


def plan_of(config: RunConfig, rank: int = 0) -> EnginePlan:
    parallel = config.engine.parallel
    shard = shard_of_rank(rank, parallel.tensor, parallel.pipeline)
    return make_plan(config.engine, 1, shard=shard)


def reason(plan: EnginePlan) -> str:
    [line] = [text for text in plan.memory.reasons if text.startswith("KV groups")]
    return line


def test_layers_of_both_kinds_share_blocks_of_one_size() -> None:
    plan = plan_of(with_windows())
    assert plan.source.kv_groups == plan.memory.groups == GROUPS
    # One slot for the layer without a window; the six others are its pieces.
    assert plan.memory.bytes_per_block == 48 * LAYER_BYTES == plan.kv_cache_spec.bytes_per_block
    assert plan.memory.bytes_per_token == 7 * LAYER_BYTES == plan.kv_cache_spec.bytes_per_token
    pages = plan.kv_cache_spec.allocate(3, torch.device("cpu")).pages
    assert sum(page.nbytes for page in pages) == 3 * plan.memory.bytes_per_block
    assert reason(plan) == (
        "KV groups: 1 layer keeps all tokens (blocks of 48), 6 layers keep 32 tokens (blocks of 8)"
    )


def test_a_model_without_windows_has_no_line() -> None:
    plan = plan_of(tiny_config())
    assert plan.memory.groups == WHOLE_CACHE
    assert not any("KV groups" in text for text in plan.memory.reasons)


def test_all_layers_have_a_window() -> None:
    plan = plan_of(with_windows(kinds=["sliding_attention"] * 2))
    assert plan.memory.groups == (KVGroup(WINDOW),)
    assert plan.memory.bytes_per_block == 8 * plan.memory.bytes_per_token
    assert reason(plan) == "KV groups: 2 layers keep 32 tokens (blocks of 8)"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("model.max_model_len=32",), "no sequence is longer than the window"),
        (("cache.disk_dir={}",), "cache.disk_dir copies blocks that hold all layers"),
        (("cache.keep_all_tokens=true",), "cache.keep_all_tokens is set"),
    ],
)
def test_a_model_with_windows_that_keeps_all_tokens_says_why(
    tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    plan = plan_of(with_windows(*(word.format(tmp_path) for word in words)))
    assert plan.memory.groups == plan.source.kv_groups == WHOLE_CACHE
    assert plan.memory.bytes_per_block == 8 * plan.memory.bytes_per_token
    assert reason(plan) == (
        f"KV groups: none. Every layer keeps all tokens, although 6 of 7 have a window: {why}"
    )


def draft_words(directory: Path, model: RunConfig) -> tuple[str, ...]:
    (directory / "config.json").write_text(json.dumps(model.engine.model.config))
    return ("speculation.method=draft", f"speculation.model={directory}", "parallel.tensor=2")


def test_a_draft_model_keeps_all_tokens_in_blocks_of_the_first_group(tmp_path: Path) -> None:
    words = draft_words(tmp_path, with_windows())
    plans = [plan_of(with_windows(*words), rank) for rank in range(2)]
    assert [plan.source.kv_groups for plan in plans] == [GROUPS, GROUPS]
    draft = plans[0].draft
    assert draft is not None
    assert plans[1].draft is None
    assert draft.source.kv_groups == draft.memory.groups == (KVGroup(units=6),)
    draft_bytes = 7 * 48 * LAYER_BYTES
    assert draft.kv_cache_spec.bytes_per_block == draft.memory.bytes_per_block == draft_bytes
    own_bytes = 48 * LAYER_BYTES // 2  # each rank has one head of the model
    assert plans[0].memory.bytes_per_block == own_bytes + draft_bytes
    assert plans[1].memory.bytes_per_block == own_bytes


def test_a_model_that_keeps_no_token_for_its_draft_model(tmp_path: Path) -> None:
    """If all layers have windows, the draft model would have no table of all tokens."""
    words = draft_words(tmp_path, with_windows())
    plan = plan_of(with_windows(*words, kinds=["sliding_attention"] * 2))
    assert plan.source.kv_groups == plan.memory.groups == WHOLE_CACHE
    assert reason(plan).endswith("the draft model or head needs a block table of all tokens")


def test_drafts_from_text_leave_the_groups() -> None:
    assert plan_of(with_windows("speculation.method=ngram")).memory.groups == GROUPS


def test_stages_have_the_groups_of_the_whole_model() -> None:
    config = with_windows("parallel.pipeline=2")
    plans = [plan_of(config, rank) for rank in (1, 0)]  # rank 0 has the last stage
    assert [plan.source.kv_groups for plan in plans] == [GROUPS, GROUPS]
    layers = [plan.source.shard.layers(7) for plan in plans]
    assert [(part.start, part.size) for part in layers] == [(0, 4), (4, 3)]
    # Four layers with windows are in one slot; so are one without and two with windows.
    assert [plan.memory.bytes_per_block for plan in plans] == [48 * LAYER_BYTES] * 2


def test_programs_and_blocks_of_other_groups_are_others(tmp_path: Path) -> None:
    words = ("graphs.mode=captured", "graphs.bundle=true", f"graphs.bundle_dir={tmp_path}/bundles")
    plans = [plan_of(with_windows(*words, *more)) for more in ((), (f"cache.disk_dir={tmp_path}",))]
    bundles = [open_bundle(plan) for plan in plans]
    assert all(bundle is not None for bundle in bundles)
    assert len({bundle.directory for bundle in bundles if bundle is not None}) == 2
    identities = [block_identity(plan)["groups"] for plan in plans]
    assert identities == [repr(GROUPS), repr(WHOLE_CACHE)]


def test_a_long_context_of_windows_needs_no_more_blocks_than_a_window() -> None:
    """The context is not shortened to the tokens of all blocks."""
    config = with_windows(kinds=["sliding_attention"] * 2)
    block = plan_of(config).memory.bytes_per_block
    words = f"cache.memory_gib={16 * block / (1 << 30)}"
    short = plan_of(with_windows(words, kinds=["sliding_attention"] * 2)).memory
    # 32 + 64 + 8 tokens in 13 blocks, and one more because they begin within a block.
    assert (short.num_blocks, short.sequence_blocks(256)) == (16, 14)
    assert short.max_model_len == short.longest_sequence == 256
    assert dataclasses.replace(short, num_blocks=14).longest_sequence == 13 * 8
