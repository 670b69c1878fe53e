"""The decoder's keys that the config.json of a model with images or sounds may leave out.

The values are those of the config classes in transformers.
"""

from __future__ import annotations

from typing import Any

__all__ = (
    "GEMMA3_TEXT",
    "LLAVA_TEXTS",
    "MISTRAL3_TEXT",
    "MISTRAL3_TEXTS",
    "QWEN2_TEXT",
    "QWEN2_VL_TEXT",
    "QWEN3_5_MOE_TEXT",
    "QWEN3_5_TEXT",
    "QWEN3_VL_MOE_TEXT",
    "QWEN3_VL_TEXT",
)

_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2_TEXT: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAVA_TEXTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": QWEN2_TEXT,
    "qwen3": {**QWEN2_TEXT, "head_dim": 128},
}
"""`model_type` of the decoder of a LLaVA -> its defaults."""

GEMMA3_TEXT: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
MISTRAL3_TEXTS: dict[str, dict[str, Any]] = {
    "mistral": LLAVA_TEXTS["mistral"],
    "ministral3": {
        **LLAVA_TEXTS["mistral"],
        "vocab_size": 131_072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
    },
}
"""`model_type` of the decoder of a Mistral 3 -> its defaults."""

MISTRAL3_TEXT: dict[str, Any] = {
    **LLAVA_TEXTS["mistral"],
    "model_type": "mistral",
    "vocab_size": 131_072,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "num_hidden_layers": 40,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
}
"""The decoder of a Mistral 3 config without `text_config`."""

QWEN2_VL_TEXT: dict[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
QWEN3_VL_TEXT: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
}
QWEN3_VL_MOE_TEXT: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128_000,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "norm_topk_prob": True,
}
QWEN3_5_TEXT: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
}
QWEN3_5_MOE_TEXT: dict[str, Any] = {
    **QWEN3_5_TEXT,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
}
