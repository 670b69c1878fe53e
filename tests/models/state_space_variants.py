"""Variants of families in which some layers have a Mamba-2 mixer."""

from __future__ import annotations

from typing import Any

from tests.models.variant import TWO_KV_HEADS, Variant

_MAMBA = {
    **TWO_KV_HEADS,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
_BAMBA = {**_MAMBA, "mamba_n_groups": 2, "attn_layer_indices": [1]}
_GRANITE = {
    **_MAMBA,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}
_NEMOTRON = {
    **TWO_KV_HEADS,
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 16,
    # transformers 5.24 takes this value of training as a lower limit of time steps in prompts, and
    # reads no `time_step_limit`. As low as this it changes nothing.
    "time_step_min": 1e-9,
    "time_step_floor": 0.3,
    "time_step_max": 1.0,
}
_NEMOTRON_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.5,
}


def _parts(pattern: str) -> dict[str, Any]:
    """Nemotron-H with these parts, one letter for each block."""
    return {**_NEMOTRON, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


STATE_SPACE = {
    "bamba": Variant("bamba", _BAMBA, "60KB"),
    "bamba-bias": Variant(
        "bamba",
        {
            **_BAMBA,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "mamba_n_groups": 1,
            "attn_layer_indices": [0],
            "time_step_limit": [0.9, 1.6],
        },
    ),
    "granite4": Variant(
        "granitemoehybrid",
        {
            **_GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            # The norm of a mixer has this one, and those before mixers another one.
            "rms_norm_eps": 0.05,
        },
        "60KB",
    ),
    "granite4-dense": Variant(
        "granitemoehybrid",
        {
            **_GRANITE,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mamba_n_groups": 4,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "granite4-attention": Variant(
        "granitemoehybrid",
        {**_GRANITE, "layer_types": ["full_attention"] * 3},
    ),
    "nemotron-h": Variant("nemotron_h", _parts("MM-*M-"), "60KB"),
    "nemotron-h-attention": Variant("nemotron_h", _parts("*--*")),
    "nemotron-h-bias": Variant(
        "nemotron_h",
        {
            **_parts("-M*"),
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 1,
            "mlp_hidden_act": "silu",
            "layer_norm_epsilon": 0.05,
        },
    ),
    "nemotron-h-moe": Variant(
        "nemotron_h", {**_parts("ME*E"), **_NEMOTRON_EXPERTS, "n_group": 2, "topk_group": 1}
    ),
    "nemotron-h-mixed": Variant(
        "nemotron_h",
        {**_parts("-M*E"), **_NEMOTRON_EXPERTS, "norm_topk_prob": False, "mlp_bias": True},
    ),
}
