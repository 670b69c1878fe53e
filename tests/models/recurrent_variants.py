"""Variants of families in which some layers have a recurrent mixer in place of attention."""

from __future__ import annotations

from typing import Any

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
GATED_DELTA: dict[str, Any] = {
    **SHARED,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    # With a smaller one, transformers' own algorithms for prompts and for single tokens differ by
    # more than the tolerance, because some random heads are almost zero before they are normalised.
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
}
QWEN3_NEXT = {
    **GATED_DELTA,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MROPE = {
    **GATED_DELTA["rope_parameters"],
    "mrope_section": [2, 2, 2],
    "mrope_interleaved": True,
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
    "qwen3-next": Variant("qwen3_next", QWEN3_NEXT),
    "qwen3-next-mixed": Variant(
        "qwen3_next",
        {
            **QWEN3_NEXT,
            "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
        "60KB",
    ),
    "qwen3.5": Variant("qwen3_5_text", {**GATED_DELTA, "rope_parameters": MROPE}, "60KB"),
    "qwen3.5-moe": Variant("qwen3_5_moe_text", {**QWEN3_NEXT, "attention_bias": True}),
}
