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
}
