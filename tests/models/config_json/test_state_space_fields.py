"""Mamba-2 mixers of config.json: the forms that published files have, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.recurrent_spec import StateSpaceSpec
from ostinato.models.registry import model_class
from ostinato.ops.rope import Rope

SHARED: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
}
GRANITE = SHARED | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 80,
    "position_embedding_type": "nope",
    "rope_theta": 10000,
    "residual_multiplier": 0.5,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M-*E",
    "num_attention_heads": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
}
LIST = {"hybrid_override_pattern": "absent"}
BAMBA = SHARED | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1]}


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    stated = {key: value for key, value in {**config, **changes}.items() if value != "absent"}
    return model_class(stated["architectures"][0]).read_config(stated)


def mixer(config: ModelConfig) -> StateSpaceSpec:
    assert isinstance(config.recurrent, StateSpaceSpec)
    return config.recurrent


@pytest.mark.parametrize("config", [GRANITE, BAMBA])
def test_sizes_and_defaults(config: dict[str, Any]) -> None:
    assert mixer(read(config)) == StateSpaceSpec(
        layers=(True, False, True, True),
        num_heads=8,
        head_dim=16,
        state_size=16,
        num_groups=1,
        conv_width=4,
        has_conv_bias=True,
        has_bias=False,
        step_limits=(0.0, math.inf),
        norm_eps=1e-5,
    )


def test_the_names_of_layers_in_older_and_newer_files() -> None:
    newer = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    assert read(GRANITE, layer_types=newer) == read(GRANITE)


@pytest.mark.parametrize(
    ("stated", "limits"),
    [
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),  # written by transformers 5
        ([0.0, math.inf], (0.0, math.inf)),  # by older ones
        ([0.001, 0.1], (0.001, 0.1)),
        ("absent", (0.0, math.inf)),
    ],
)
def test_limits_of_time_steps(stated: Any, limits: tuple[float, float]) -> None:
    assert mixer(read(BAMBA, time_step_limit=stated)).step_limits == limits


def test_granite_without_experts_has_the_mlp_of_all_tokens_alone() -> None:
    config = read(GRANITE)
    assert (config.moe, config.intermediate_size) == (None, 80)
    sparse = read(GRANITE, num_local_experts=4, num_experts_per_tok=2)
    assert sparse.moe is not None
    assert (sparse.moe.intermediate_size, sparse.moe.shared_size) == (96, 80)


def test_granite_rotates_only_if_it_says_so() -> None:
    assert (read(GRANITE).rope, read(GRANITE).has_positions) == (None, False)
    assert read(GRANITE, position_embedding_type=None) == read(GRANITE)
    rotating = read(GRANITE, position_embedding_type="rope")
    assert (rotating.rope, rotating.has_positions) == (Rope(rotary_dim=16, theta=10_000.0), True)


def test_the_multiplier_of_branches_does_not_change_the_norm_of_a_mixer() -> None:
    config = read(GRANITE)
    assert (config.norm_eps, mixer(config).norm_eps) == (4e-5, 1e-5)


def test_attention_in_all_layers() -> None:
    assert read(GRANITE, layer_types=["attention"] * 4).recurrent is None


def test_parts_of_nemotron() -> None:
    config = read(NEMOTRON)
    assert mixer(config) == StateSpaceSpec(
        layers=(True, False, False, False),
        num_heads=8,
        head_dim=16,
        state_size=16,
        num_groups=2,
        conv_width=4,
        has_conv_bias=True,
        has_bias=False,
        step_limits=(0.0, math.inf),
        norm_eps=1e-5,
    )
    assert config.mlp_layers == (False, True, False, True)
    assert config.moe is not None
    assert config.moe.layers == (False, False, False, True)
    assert (config.activation, config.block.is_gated) == ("relu2", False)
    assert (config.rope, config.has_positions, len(config.attention_windows)) == (None, False, 1)


@pytest.mark.parametrize(
    "kinds",
    [
        ["mamba", "mlp", "attention", "moe"],
        ["linear_attention", "mlp", "full_attention", "moe"],
    ],
)
@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
@pytest.mark.parametrize("pattern", ["absent", "M-*E"])
def test_the_parts_in_other_files(kinds: list[str], key: str, pattern: str) -> None:
    stated = {key: kinds, "hybrid_override_pattern": pattern, "num_hidden_layers": "absent"}
    assert read(NEMOTRON, **stated) == read(NEMOTRON)


def test_older_names_of_the_keys_of_nemotron() -> None:
    older = {
        "mamba_conv_bias": False,
        "mamba_d_conv": 3,
        "mamba_dt_limit": [0.1, 0.5],
        "mamba_n_groups": 4,
    }
    newer = {"use_conv_bias": False, "conv_kernel": 3, "time_step_limit": [0.1, 0.5], "n_groups": 4}
    assert read(NEMOTRON, **older) == read(NEMOTRON, **newer) != read(NEMOTRON)


def test_only_layers_with_a_dense_mlp_divide_it() -> None:
    sparse = read(NEMOTRON, hybrid_override_pattern="ME*E", intermediate_size=97)
    assert sparse.why_unshardable(2) is None
    assert "intermediate_size=97" in str(read(NEMOTRON, intermediate_size=97).why_unshardable(2))
    groups = read(NEMOTRON, n_groups=1).why_unshardable(2)
    assert "groups=1 cannot be divided among 2" in str(groups)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (GRANITE, {"layer_types": ["mamba"] * 4}, ["layer_types", "at least one"]),
        (GRANITE, {"layer_types": ["mamba", "attention"]}, ["layer_types", "each of the 4 layers"]),
        (GRANITE, {"layer_types": ["mlp"] * 4}, ["layer_types", "mlp"]),
        (GRANITE, {"position_embedding_type": "alibi"}, ["position_embedding_type", "alibi"]),
        (GRANITE, {"layer_types": 4}, ["layer_types", "got 4"]),
        (GRANITE, {"residual_multiplier": None, "logits_scaling": "x"}, ["logits_scaling", "'x'"]),
        (BAMBA, {"attn_layer_indices": 1}, ["attn_layer_indices=1", "layers 0 to 3"]),
        (BAMBA, {"attn_layer_indices": None}, ["attn_layer_indices", "at least one"]),
        (BAMBA, {"attn_layer_indices": [4]}, ["attn_layer_indices=[4]", "layers 0 to 3"]),
        (BAMBA, {"attn_rotary_emb": 16}, ["attn_rotary_emb=16", "only 8"]),
        (BAMBA, {"hidden_act": "gelu"}, ["hidden_act=gelu", "only silu"]),
        (BAMBA, {"mamba_d_head": 8}, ["mamba_d_head=8", "mamba_n_heads=8", "128"]),
        (BAMBA, {"mamba_n_heads": 7}, ["mamba_n_heads=7", "128"]),
        (BAMBA, {"mamba_n_groups": 3}, ["mamba_n_heads=8", "mamba_n_groups=3"]),
        (BAMBA, {"mamba_d_conv": 1}, ["mamba_d_conv=1", "from 2 to 16"]),
        (BAMBA, {"mamba_d_conv": 17}, ["mamba_d_conv=17", "from 2 to 16"]),
        (BAMBA, {"time_step_limit": None}, ["time_step_limit", "None"]),
        (BAMBA, {"time_step_limit": [0.2, 0.1]}, ["time_step_limit", "[0.2, 0.1]"]),
        (BAMBA, {"time_step_limit": [0.0, "many"]}, ["time_step_limit", "many"]),
        (NEMOTRON, {"hybrid_override_pattern": "M-M-"}, ["full_attention", "at least one"]),
        (NEMOTRON, {"hybrid_override_pattern": "M-*X"}, ["M-*X", "M * - E"]),
        (NEMOTRON, {"hybrid_override_pattern": ["M"]}, ["hybrid_override_pattern=['M']"]),
        (NEMOTRON, {"hybrid_override_pattern": "M-*"}, ["num_hidden_layers=4", "has 3 layers"]),
        (NEMOTRON, {"layers_block_type": ["mamba", "attention"]}, ["differ", "M-*E"]),
        (NEMOTRON, LIST | {"layer_types": ["mamba", "conv"]}, ["layer_types", "conv"]),
        (NEMOTRON, LIST | {"layers_block_type": 4}, ["layers_block_type", "got 4"]),
        (NEMOTRON, {"attention_bias": True}, ["attention_bias=True", "only False"]),
        (NEMOTRON, {"attention_head_dim": 64}, ["attention_head_dim=64", "only 128"]),
        (NEMOTRON, {"mamba_hidden_act": "gelu"}, ["mamba_hidden_act=gelu", "only silu"]),
        (NEMOTRON, {"mamba_num_groups": 4}, ["mamba_num_groups=4", "only 2"]),
        (NEMOTRON, {"mamba_ssm_cache_dtype": "float16"}, ["mamba_ssm_cache_dtype", "float32"]),
        (NEMOTRON, {"moe_latent_size": 32}, ["moe_latent_size=32"]),
        (NEMOTRON, {"n_groups": 3}, ["mamba_num_heads=8", "n_groups=3"]),
        (NEMOTRON, {"n_shared_experts": 2}, ["n_shared_experts=2", "only 1"]),
        (NEMOTRON, {"residual_in_fp32": True}, ["residual_in_fp32=True"]),
        (NEMOTRON, {"rms_norm_eps": 1e-6}, ["rms_norm_eps=1e-06", "only 1e-05"]),
        (NEMOTRON, {"sliding_window": 64}, ["sliding_window=64"]),
        (NEMOTRON, {"tie_word_embeddings": True}, ["tie_word_embeddings=True"]),
    ],
)
def test_refusals_name_the_key(
    config: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        read(config, **changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("groups", "ranks", "words"),
    [
        (1, 2, "mamba_n_groups=1 cannot be divided among 2 .* set parallel.tensor to 1"),
        (2, 4, "mamba_n_groups=2 cannot be divided among 4 .* set parallel.tensor to 1 or 2"),
        (4, 2, None),
    ],
)
def test_ranks_hold_whole_groups(groups: int, ranks: int, words: str | None) -> None:
    """The norm of a group is over the values of all its heads, so a rank must have them all."""
    reason = read(BAMBA, mamba_n_groups=groups).why_unshardable(ranks)
    if words is None:
        assert reason is None
    else:
        assert reason is not None
        assert re.search(words, reason)
