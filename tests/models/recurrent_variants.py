"""Variants of families in which some layers have a recurrent mixer in place of attention."""

from __future__ import annotations

from tests.models.variant import SHARED, Variant

LFM2 = {
    **SHARED,
    "num_key_value_heads": 2,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.25,
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
}
