"""Small random checkpoints made with transformers: one or more variants of each architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.recurrent_variants import RECURRENT
from tests.models.state_space_variants import STATE_SPACE
from tests.models.variant import SHARED, TWO_KV_HEADS, Variant

WINDOW = {"use_sliding_window": True, "sliding_window": 9}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FALCON = {
    **SHARED,
    "num_kv_heads": 2,
    "ffn_hidden_size": 112,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA = {**SHARED, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
GPTJ = {
    "vocab_size": 199,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "rotary_dim": 8,
    "initializer_range": 0.15,
    "bos_token_id": 7,
    "eos_token_id": 7,
}
LLAMA4 = {
    **SHARED,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "attn_scale": 0.4,
    "rope_parameters": LLAMA3,
}
QWEN3_MOE = {
    **SHARED,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
DEEPSEEK = {
    **SHARED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GROWING = {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.7}
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}


VARIANTS = {
    "bloom": Variant(
        "bloom",
        {**SHARED, "num_attention_heads": 6, "hidden_size": 48, "tie_word_embeddings": True},
    ),
    "codegen": Variant("codegen", {**GPTJ, "n_inner": 96}),
    "cohere": Variant("cohere", {**TWO_KV_HEADS, "attention_bias": True}),
    "cohere2": Variant(
        "cohere2",
        {
            **TWO_KV_HEADS,
            "sliding_window": 13,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "deepseek-v2": Variant("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek-v2-groups": Variant(
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        "60KB",
    ),
    "deepseek-v3": Variant("deepseek_v3", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "deepseek-v3-yarn": Variant(
        "deepseek_v3",
        {
            **DEEPSEEK,
            "v_head_dim": 16,
            "n_group": 2,
            "topk_group": 1,
            "rope_interleave": False,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "falcon-7b": Variant("falcon", {**FALCON, "num_attention_heads": 3, "hidden_size": 48}),
    "falcon-11b": Variant(
        "falcon", {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}
    ),
    "falcon-40b": Variant("falcon", {**FALCON, "new_decoder_architecture": True}, "60KB"),
    "falcon-sequential": Variant(
        "falcon",
        {**FALCON, "num_kv_heads": 4, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon-rw": Variant(
        "falcon",
        {
            **FALCON,
            "num_kv_heads": 4,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "alibi": True,
        },
        attention="sdpa",  # its eager attention adds ALiBi twice: to the products and to the mask
    ),
    "gemma": Variant("gemma", GEMMA),
    "gemma2": Variant(
        "gemma2",
        {
            **GEMMA,
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Variant(
        "gemma3_text",
        {
            **GEMMA,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "glm4": Variant("glm4", {**TWO_KV_HEADS, "head_dim": 16}),
    "glm4-moe": Variant(
        "glm4_moe",
        {
            **TWO_KV_HEADS,
            "head_dim": 16,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "glm4-moe-lite": Variant(
        "glm4_moe_lite", {**DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    ),
    "gpt-oss": Variant(
        "gpt_oss",
        {
            **TWO_KV_HEADS,
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "granitemoe": Variant(
        "granitemoe",
        {
            **TWO_KV_HEADS,
            "intermediate_size": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
        "60KB",
    ),
    "gpt2": Variant(
        "gpt2",
        {
            "vocab_size": 199,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "initializer_range": 0.15,
            "bos_token_id": 7,
            "eos_token_id": 7,
        },
    ),
    "gptj": Variant("gptj", GPTJ),
    "gpt-neox": Variant("gpt_neox", SHARED),
    "gpt-neox-sequential": Variant(
        "gpt_neox", {**SHARED, "use_parallel_residual": False, "rotary_pct": 1.0}
    ),
    "granite": Variant(
        "granite",
        {
            **TWO_KV_HEADS,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 3.0,
        },
    ),
    # Llama has no window, whatever its configuration says.
    "llama-tied": Variant("llama", {**SHARED, "tie_word_embeddings": True, "sliding_window": 5}),
    "llama3": Variant(
        "llama",
        {
            **TWO_KV_HEADS,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3,
        },
        shard_size="60KB",
    ),
    "llama-linear-bias": Variant(
        "llama",
        {
            **SHARED,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
        pickled=True,
    ),
    "llama4": Variant("llama4_text", LLAMA4),
    "llama4-two-experts": Variant(
        "llama4_text",
        {
            **LLAMA4,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "moe_layers": [0, 1],
        },
        "60KB",
    ),
    "llama4-yarn": Variant("llama4_text", {**LLAMA4, "rope_parameters": YARN}),
    "llama-yarn": Variant("llama", {**SHARED, "rope_parameters": YARN}),
    "llama-dynamic": Variant(
        "llama",
        {
            **SHARED,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama-mqa": Variant("llama", {**SHARED, "num_key_value_heads": 1, "head_dim": 32}),
    "ministral3": Variant(
        "ministral3",
        {**TWO_KV_HEADS, "head_dim": 16, "rope_parameters": GROWING},
    ),
    "mistral": Variant("mistral", {**TWO_KV_HEADS, "sliding_window": 11}),
    "mpt": Variant(
        "mpt",
        {
            "vocab_size": 199,
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": 256,
            "initializer_range": 0.15,
            "bos_token_id": None,
            "eos_token_id": 7,
            "attn_config": {"clip_qkv": 0.9, "softmax_scale": 0.3},
        },
    ),
    "mixtral": Variant(
        "mixtral",
        {**TWO_KV_HEADS, "intermediate_size": 48, "num_local_experts": 4},
        "60KB",
    ),
    "olmo2": Variant("olmo2", TWO_KV_HEADS, "60KB"),
    "olmo3": Variant(
        "olmo3",
        {
            **TWO_KV_HEADS,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "olmoe": Variant(
        "olmoe",
        {
            **TWO_KV_HEADS,
            "intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "opt": Variant("opt", {**SHARED, "ffn_dim": 96, "tie_word_embeddings": True}),
    "phi": Variant("phi", TWO_KV_HEADS),
    "phi3": Variant("phi3", {**TWO_KV_HEADS, "sliding_window": 13}),
    "phi3-partial": Variant(
        "phi3",
        {
            **TWO_KV_HEADS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        shard_size="60KB",
    ),
    "phi3-longrope": Variant(
        "phi3",
        {
            **TWO_KV_HEADS,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 4.0, 7.0],
            },
        },
    ),
    "qwen2": Variant("qwen2", TWO_KV_HEADS),
    "qwen2-window": Variant(
        "qwen2",
        {
            **TWO_KV_HEADS,
            **WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen2-moe": Variant(
        "qwen2_moe",
        {
            **TWO_KV_HEADS,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "decoder_sparse_step": 2,
            **WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen3": Variant(
        "qwen3",
        {**TWO_KV_HEADS, "head_dim": 24, "tie_word_embeddings": False},
    ),
    "qwen3-tied": Variant(
        "qwen3",
        {**TWO_KV_HEADS, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen3-moe": Variant("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": Variant(
        "qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [0], **WINDOW}, "60KB"
    ),
    "smollm3": Variant("smollm3", {**TWO_KV_HEADS, "no_rope_layers": [1, 0, 1], **WINDOW}),
    "stablelm": Variant("stablelm", {**TWO_KV_HEADS, "use_qkv_bias": True}),
    "stablelm-parallel": Variant(
        "stablelm", {**SHARED, "num_key_value_heads": 4, "use_parallel_residual": True}
    ),
    "starcoder2": Variant("starcoder2", {**TWO_KV_HEADS, "sliding_window": 17}),
    **RECURRENT,
    **STATE_SPACE,
}


def reference_model(variant: Variant) -> Any:
    """The variant's transformers model in float32, with noise added to constant weights."""
    config = transformers.AutoConfig.for_model(variant.model_type, **variant.settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=variant.attention
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.dim() == 1
            ):  # norms start at 1 and biases at 0: such weights would hide mistakes
                parameter += torch.randn(parameter.shape, generator=generator) * 0.1
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # starts at 0 as well
                buffer += torch.randn(buffer.shape, generator=generator) * 0.1
    return model.float().eval()


def save(model: Any, variant: Variant, directory: Path) -> Path:
    """Write the checkpoint as its variant says and return the directory."""
    model.save_pretrained(directory, max_shard_size=variant.shard_size)
    if variant.pickled:
        file = directory / "model.safetensors"
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
        file.unlink()
    return directory
