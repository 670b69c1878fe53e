"""Variants of families in which some layers have a recurrent mixer in place of attention."""

from __future__ import annotations

from tests.models.variant import SHARED, Variant

LFM2 = {
    **SHARED,
    "num_key_value_heads": 2,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.25,
}
LFM2_MOE = {
    **SHARED,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}

RECURRENT = {
    "lfm2": Variant("lfm2", {**LFM2, "full_attn_idxs": [1]}),
    "lfm2-bias": Variant(
        "lfm2",
        {
            **LFM2,
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
        "60KB",
    ),
    "lfm2-moe": Variant("lfm2_moe", LFM2_MOE),
    "lfm2-moe-unbiased": Variant(
        "lfm2_moe",
        {**LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 2},
        "60KB",
    ),
}
