"""Small models that run through transformers, one for each architecture, and refused models."""

from __future__ import annotations

from tests.models.random_checkpoints import SHARED, VARIANTS, Variant

GROUPED = {**SHARED, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]

UNKNOWN = {
    "afmoe": Variant("afmoe", {**HEADS, **EXPERTS, "num_dense_layers": 1}),
    "apertus": Variant("apertus", GROUPED),
    "arcee": Variant("arcee", GROUPED),
    "bitnet": Variant("bitnet", GROUPED),
    "cwm": Variant("cwm", {**HEADS, "bos_token_id": 1}),
    "dots1": Variant(
        "dots1",
        {
            **HEADS,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "ernie4_5": Variant("ernie4_5", HEADS),
    "ernie4_5_moe": Variant(
        "ernie4_5_moe",
        {**HEADS, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "exaone4": Variant("exaone4", {**HEADS, "sliding_window": 11, "layer_types": WINDOWS}),
    "exaone_moe": Variant("exaone_moe", {**HEADS, **EXPERTS}),
    "flex_olmo": Variant("flex_olmo", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm": Variant("glm", HEADS),
    "gpt_bigcode": Variant("gpt_bigcode", VARIANTS["gpt2"].settings),
    "granite_swa": Variant("granite_swa", GROUPED),
    "helium": Variant("helium", HEADS),
    "hunyuan_v1_dense": Variant("hunyuan_v1_dense", HEADS),
    "hunyuan_v1_moe": Variant("hunyuan_v1_moe", {**HEADS, "num_experts": 4, "moe_topk": 2}),
    "hyperclovax": Variant("hyperclovax", GROUPED),
    "jais2": Variant("jais2", GROUPED),
    "mellum": Variant("mellum", GROUPED),
    "minimax_m2": Variant(
        "minimax_m2",
        {**HEADS, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "ministral": Variant("ministral", {**HEADS, "sliding_window": 11}),
    "nanochat": Variant("nanochat", GROUPED),
    "nemotron": Variant("nemotron", GROUPED),
    "olmo": Variant("olmo", GROUPED),
    "persimmon": Variant("persimmon", SHARED),
    "phimoe": Variant(
        "phimoe",
        {**GROUPED, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "seed_oss": Variant("seed_oss", HEADS),
}
"""Architectures that have no implementation here; by model type."""

FORCED = (
    "cohere",
    "cohere2",
    "gemma2",
    "glm4",
    "granite",
    "llama3",
    "mistral",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""Variants with an implementation here, which `model.implementation=transformers` does not use."""

REFUSED = {
    "DiffLlamaForCausalLM": ("diffllama", GROUPED, "makes 2 attention calls, not one"),
    "Gemma4ForCausalLM": ("gemma4_text", HEADS, "layers differ in"),
    "Mamba2ForCausalLM": ("mamba2", {}, "computes attention itself"),
    "MiniCPM3ForCausalLM": (
        "minicpm3",
        {**SHARED, "num_key_value_heads": 4, **LATENT},
        "computes aten.new_empty.default, which has no rule here",
    ),
    "T5ForConditionalGeneration": ("t5", {}, "is an encoder-decoder"),
}
"""Architecture -> model type, settings, and a part of the reason why it is not served."""
