"""MPT as it was published, before transformers had the architecture."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import architecture_of
from ostinato.models.registry import model_class

# The config.json of mosaicml/mpt-7b.
PUBLISHED = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "auto_map": {
        "AutoConfig": "configuration_mpt.MPTConfig",
        "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
    },
    "d_model": 4096,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {"name": "kaiming_normal_", "verbose": 0},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 2048,
    "model_type": "mpt",
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.28.1",
    "use_cache": False,
    "verbose": 0,
    "vocab_size": 50432,
}


def test_a_published_config_is_that_of_transformers() -> None:
    config = model_class(architecture_of(PUBLISHED)).read_config(PUBLISHED)
    saved = {**PUBLISHED, "architectures": ["MptForCausalLM"]}
    expected = model_class(architecture_of(saved)).read_config(saved)
    assert replace(config, architecture="MptForCausalLM") == expected
    assert (config.num_heads, config.head_dim, config.max_model_len) == (32, 128, 2048)
