"""Reads the keys of hybrid architectures: the layers that are recurrent, and the sizes of mixers.

llama.cpp has one set of names, `ssm.*`, for mixers of several kinds. So `ssm.group_count` is the
number of heads of keys of a gated delta net, and the number of groups of a Mamba-2 mixer.
"""

from __future__ import annotations

from typing import Any

from ostinato.models.gguf.architectures.architecture_keys import ArchitectureKeys, ReadKeys
from ostinato.models.gguf.architectures.decoder_keys import (
    granite_multipliers,
    read_experts,
    refuse_other_scores,
)

__all__ = ("GATED", "HYBRIDS", "read_kv_heads", "read_unused_blocks")

GATED = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures with gated delta nets, whose queries have gates in the same matrix."""

_INTERVAL = 4  # the default of full_attention_interval


def read_kv_heads(keys: ArchitectureKeys, num_blocks: int, num_heads: int) -> int:
    """The number of heads of keys in the layers with attention.

    Raises:
        GGUFError: it differs between these layers, or there is no such layer.
    """
    key = "attention.head_count_kv"
    if keys.file.architecture not in HYBRIDS or keys.file.architecture in GATED:
        return keys.integer(key) or num_heads
    counts = set(keys.numbers(key, num_blocks) or [num_heads])
    attending = counts - {0}
    if len(attending) != 1:
        stated = "differs between layers with attention" if attending else "is 0 in all layers"
        raise keys.error(key, stated, "one number for all layers with attention, at least one, is")
    return attending.pop()


def read_unused_blocks(keys: ArchitectureKeys, num_blocks: int) -> int:
    """The number of blocks after the model's own: layers for multi-token prediction.

    Raises:
        GGUFError: the model would have no block of its own.
    """
    if keys.file.architecture not in (*GATED, "glm4moe"):
        return 0
    unused = keys.integer("nextn_predict_layers") or 0
    if unused >= num_blocks:
        raise keys.error(
            "nextn_predict_layers", f"is {unused}, and block_count is {num_blocks}",
            "only fewer layers than blocks are",
        )  # fmt: skip
    return unused


def _recurrent_blocks(keys: ArchitectureKeys) -> list[bool]:
    """Whether each block is recurrent: a recurrent block has no heads of keys."""
    num_blocks = keys.size("block_count")
    counts = keys.numbers("attention.head_count_kv", num_blocks) or [1] * num_blocks
    return [not count for count in counts]


def _lfm2(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["conv" if one else "full_attention" for one in _recurrent_blocks(keys)],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "conv_bias": keys.has_in_a_block("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,  # the file states the size that results
    }


def _lfm2moe(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    refuse_other_scores(keys)
    width = keys.size("expert_feed_forward_length")
    return {
        **_lfm2(keys, config),
        "architectures": ["Lfm2MoeForCausalLM"],
        "intermediate_size": config.get("intermediate_size") or width,
        "num_dense_layers": keys.integer("leading_dense_block_count") or 0,
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": width,
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "use_expert_bias": keys.has_in_a_block("exp_probs_b.bias"),
    }


def _gated_delta(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """The keys that Qwen3-Next and Qwen3.5 have, besides those of experts and positions."""
    k_heads, v_heads = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    for key, number, divisor in (
        ("ssm.time_step_rank", v_heads, k_heads),
        ("ssm.inner_size", inner, v_heads),
    ):
        if number % divisor:
            raise keys.error(key, f"is {number}", f"only multiples of {divisor} are")
    return {
        "hidden_act": "silu",
        "layer_types": _delta_layers(keys, config["num_hidden_layers"]),
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // v_heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        # The whole head, as in llama.cpp. In a config.json, a missing key means a quarter of it.
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def _delta_layers(keys: ArchitectureKeys, num_layers: int) -> list[str]:
    """`layer_types`. Older files have the interval of layers with attention, and not a list."""
    interval = keys.integer("full_attention_interval")
    if interval == 0:
        raise keys.error("full_attention_interval", "is 0", "a number of at least 1 is")
    listed = keys.numbers("attention.recurrent_layers", keys.size("block_count"))
    if listed is None:
        listed = [(layer + 1) % (interval or _INTERVAL) for layer in range(num_layers)]
    kinds = listed[:num_layers]
    return ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in kinds]


def _experts_of_qwen(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_experts(keys, config),
        "shared_expert_intermediate_size": keys.expert_width(
            "expert_shared_feed_forward_length", "blk.0.ffn_up_shexp.weight"
        ),
    }


def _qwen3next(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gated_delta(keys, config),
        **_experts_of_qwen(keys, config),
        "architectures": ["Qwen3NextForCausalLM"],
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
    }


def _qwen35(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    key = "rope.dimension_sections"
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    sections = keys.numbers(key, 4)  # time, rows, columns, and one that no Qwen has
    if sections is not None:
        if sections[3]:
            raise keys.error(key, f"is {sections}", "only 0 as the fourth number is")
        scaling = {**scaling, "mrope_section": sections[:3]}
    return {
        **_gated_delta(keys, config),
        "architectures": ["Qwen3_5ForCausalLM"],
        "rope_scaling": scaling,
    }


def _qwen35moe(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    if not keys.flag("expert_weights_norm", True):
        raise keys.error("expert_weights_norm", "is false", "only true is")
    return {
        **_qwen35(keys, config),
        **_experts_of_qwen(keys, config),
        "architectures": ["Qwen3_5MoeForCausalLM"],
    }


def _granitehybrid(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Granite 4 with Mamba-2, and Bamba, which has the same blocks without multipliers."""
    hidden, inner = config["hidden_size"], keys.size("ssm.inner_size")
    heads = keys.size("ssm.time_step_rank")
    for divisor in (hidden, heads):
        if inner % divisor:
            raise keys.error("ssm.inner_size", f"is {inner}", f"only multiples of {divisor} are")
    if not keys.flag("expert_weights_norm", True):
        raise keys.error("expert_weights_norm", "is false", "only true is")
    experts, used = keys.integer("expert_count") or 0, keys.integer("expert_used_count") or 0
    shared = keys.integer("expert_shared_feed_forward_length")
    if experts and not shared:
        raise keys.error(
            "expert_shared_feed_forward_length",
            f"is {shared}",
            "beside experts, a number of at least 1 is",
        )
    # The name of this key is misleading: it says whether the layers with attention rotate.
    has_positions = keys.flag("rope.scaling.finetuned", True)
    kinds = ("full_attention", "linear_attention")
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_act": "silu",
        "layer_types": [kinds[is_recurrent] for is_recurrent in _recurrent_blocks(keys)],
        "position_embedding_type": "rope" if has_positions else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "shared_intermediate_size": shared or keys.size("feed_forward_length"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has_in_a_block("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_in_a_block("ssm_in.bias"),
        **granite_multipliers(keys, config),
    }


HYBRIDS: dict[str, ReadKeys] = {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
    "granitehybrid": _granitehybrid,
}
"""`general.architecture` -> the function that reads the keys besides the common ones."""
