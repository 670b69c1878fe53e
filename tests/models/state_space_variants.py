"""Variants of families in which some layers have a Mamba-2 mixer in place of attention."""

from __future__ import annotations

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
}
