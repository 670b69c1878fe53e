"""Reads the keys of architectures whose layers all have attention."""

from __future__ import annotations

from typing import Any

from ostinato.models.gguf.architectures.architecture_keys import ArchitectureKeys, ReadKeys

__all__ = (
    "DECODERS",
    "LAYER_NORMED",
    "granite_multipliers",
    "read_experts",
    "refuse_other_scores",
)

LAYER_NORMED = ("command-r", "cohere2")
"""Architectures with layer norms; the others have RMS norms."""

_SIGMOID = 2  # a value of expert_gating_func

_MIXER_SIZES = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")


def _refuse_partial_rotation(keys: ArchitectureKeys, config: dict[str, Any]) -> None:
    """Whole heads rotate where the two rows of a rotary pair are side by side, as in llama.cpp."""
    if "partial_rotary_factor" in config:
        raise keys.error(
            "rope.dimension_count", "differs from the size of a head", "only equal ones are"
        )


def _llama(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    _refuse_partial_rotation(keys, config)
    if not keys.integer("expert_count"):
        keys.ignore("expert_used_count")
        return {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    return {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
    }


def _dense(architecture: str) -> ReadKeys:
    return lambda keys, config: {"architectures": [architecture], "hidden_act": "silu"}


def _qwen2moe(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_qwen3moe(keys, config),
        "architectures": ["Qwen2MoeForCausalLM"],
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "shared_expert_intermediate_size": keys.expert_width(
            "expert_shared_feed_forward_length", "blk.0.ffn_up_shexp.weight"
        ),
        "qkv_bias": config["attention_bias"],
    }


def read_experts(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """The numbers and the width of experts, with the keys of Qwen's config.json."""
    width = keys.expert_width("expert_feed_forward_length", "blk.0.ffn_up_exps.weight")
    return {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": width,
        "intermediate_size": config.get("intermediate_size") or width,
    }


def _qwen3moe(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_experts(keys, config),
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "silu",
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
    }


def _gemma(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}


def _newer_gemma(
    keys: ArchitectureKeys, config: dict[str, Any], architecture: str, layers_of_27b: int
) -> dict[str, Any]:
    """Gemma 2 and 3. Files do not have `query_pre_attn_scalar`. It is the size of a head, except in
    the models of 27B parameters. These are recognised by their number of layers, as in llama.cpp.
    """
    is_27b = config["num_hidden_layers"] == layers_of_27b
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "architectures": [architecture],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "sliding_window": keys.size("attention.sliding_window"),
    }


def _gemma2(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_newer_gemma(keys, config, "Gemma2ForCausalLM", 46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping") or 30.0,
    }


def _gemma3(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_newer_gemma(keys, config, "Gemma3ForCausalLM", 62),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern") or 6,
        "rope_theta": keys.number("rope.freq_base") or 1_000_000.0,
        "rope_local_base_freq": keys.number("rope.freq_base_swa") or 10_000.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }


def _phi3(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_act": "silu",
        "sliding_window": keys.integer("attention.sliding_window"),
    }


def _gpt_oss(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    if scaling is not None:  # gpt-oss has truncate=false, which GGUF files do not state
        scaling = {**scaling, "truncate": False}
    return {
        "architectures": ["GptOssForCausalLM"],
        "hidden_act": "silu",
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "sliding_window": keys.size("attention.sliding_window"),
        "rope_scaling": scaling,
    }


def _smollm3(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    _refuse_partial_rotation(keys, config)
    return {"architectures": ["SmolLM3ForCausalLM"], "hidden_act": "silu"}


def _mistral3(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Mistral Small 3.1 and newer, and Ministral 3, whose queries grow with their position."""
    _refuse_partial_rotation(keys, config)
    growth = keys.number("attention.temperature_scale")
    scaling = config.get("rope_scaling")
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier")
    if log_multiplier and scaling is not None:
        scaling = {**scaling, "mscale": 1.0, "mscale_all_dim": log_multiplier}
    if not growth:
        return {
            "architectures": ["MistralForCausalLM"],
            "hidden_act": "silu",
            "sliding_window": None,
            "rope_scaling": scaling,
        }
    if scaling is None or "original_max_position_embeddings" not in scaling:
        raise keys.error(
            "attention.temperature_scale",
            f"is {growth}, and rope.scaling.original_context_length is not there",
            "with YaRN and its original context, it is",
        )
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "hidden_act": "silu",
        "rope_scaling": {**scaling, "llama_4_scaling_beta": growth},
    }


def _window_layers(keys: ArchitectureKeys, num_layers: int) -> list[str]:
    """`layer_types`. Files that do not state them have no window in every fourth layer."""
    key = "attention.sliding_window_pattern"
    listed = keys.numbers(key, num_layers)
    if listed is None:
        listed = [(layer + 1) % 4 for layer in range(num_layers)]
    elif max(listed) > 1:
        raise keys.error(key, "is no list of true and false", "only such a list is")
    kinds = ("full_attention", "sliding_attention")
    return [kinds[bool(has_window)] for has_window in listed]


def _olmo2(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has windows."""
    window = keys.integer("attention.sliding_window")
    if not window:
        return {"architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu"}
    theta = config["rope_theta"]
    local_theta = keys.number("rope.freq_base_swa") or theta
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "hidden_act": "silu",
        "sliding_window": window,
        # Layers with a window have no scaling, as in llama.cpp.
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **(config.get("rope_scaling") or {})},
            "sliding_attention": {"rope_theta": local_theta},
        },
        "rope_scaling": None,
        "layer_types": _window_layers(keys, config["num_hidden_layers"]),
    }


def _text_of(read: ReadKeys) -> ReadKeys:
    """The decoder of a model with images. Texts alone have the same position on each axis."""

    def read_text(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
        keys.ignore("rope.dimension_sections", "n_deepstack_layers")
        return read(keys, config)

    return read_text


def _olmoe(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    experts = read_experts(keys, config)
    return {
        **experts,
        "architectures": ["OlmoeForCausalLM"],
        "hidden_act": "silu",
        "intermediate_size": experts["moe_intermediate_size"],
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


def _cohere(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["CohereForCausalLM"],
        "hidden_act": "silu",
        "layer_norm_eps": config["rms_norm_eps"],
        "logit_scale": keys.number("logit_scale") or 1.0,
        "use_qk_norm": keys.has_in_a_block("attn_q_norm.weight"),
    }


def _cohere2(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    theta, key = config["rope_theta"], "rope.freq_base_swa"
    local_theta = keys.number(key) or theta
    if local_theta != theta:
        raise keys.error(key, f"is {local_theta}", f"only {theta}, as in rope.freq_base, is")
    return {
        **_cohere(keys, config),
        "architectures": ["Cohere2ForCausalLM"],
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": _window_layers(keys, config["num_hidden_layers"]),
    }


def _glm4(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Glm4ForCausalLM"],
        "hidden_act": "silu",
        # The whole head, as in llama.cpp. In a config.json, a missing key means half of it.
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def _glm4moe(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    refuse_other_scores(keys)
    return {
        **_glm4(keys, config),
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.size("expert_shared_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count") or 0,
        "n_group": keys.integer("expert_group_count") or 1,
        "topk_group": keys.integer("expert_group_used_count") or 1,
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "use_qk_norm": keys.has_in_a_block("attn_q_norm.weight"),
    }


def refuse_other_scores(keys: ArchitectureKeys) -> None:
    """Refuse experts whose scores are not sigmoids.

    Raises:
        GGUFError: the file states another function.
    """
    scoring = keys.integer("expert_gating_func")
    if scoring not in (None, _SIGMOID):
        raise keys.error("expert_gating_func", f"is {scoring}", f"only {_SIGMOID} (sigmoid) is")


def granite_multipliers(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """The four multipliers of Granite. Keys that are missing get the values of llama.cpp."""
    return {
        "embedding_multiplier": keys.number("embedding_scale") or 1.0,
        "attention_multiplier": keys.number("attention.scale") or config["head_dim"] ** -0.5,
        "residual_multiplier": keys.number("residual_scale") or 1.0,
        "logits_scaling": keys.number("logit_scale") or 1.0,
    }


def _granite(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Granite 3, and Granite 4 without Mamba-2 layers."""
    _refuse_partial_rotation(keys, config)
    # Files of Granite 4 state the sizes of mixers even if no layer has one.
    keys.ignore(*(f"ssm.{size}" for size in _MIXER_SIZES))
    experts, used = keys.integer("expert_count") or 0, keys.integer("expert_used_count") or 0
    shared = keys.integer("expert_shared_feed_forward_length")
    # The name of this key is misleading: it says whether the layers rotate queries and keys.
    has_positions = keys.flag("rope.scaling.finetuned", True)
    common = {
        "hidden_act": "silu",
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        **granite_multipliers(keys, config),
    }
    if has_positions and not (experts and shared):
        family = "GraniteMoeForCausalLM" if experts else "GraniteForCausalLM"
        return {**common, "architectures": [family]}
    if experts and not shared:
        raise keys.error(
            "rope.scaling.finetuned", "is false", "with experts, none shared, only true is"
        )
    return {
        **common,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "position_embedding_type": "rope" if has_positions else "nope",
        "shared_intermediate_size": shared if experts else keys.size("feed_forward_length"),
    }


DECODERS: dict[str, ReadKeys] = {
    "llama": _llama,
    "qwen2": _dense("Qwen2ForCausalLM"),
    "qwen3": _dense("Qwen3ForCausalLM"),
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "mistral3": _mistral3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "qwen2vl": _text_of(_dense("Qwen2ForCausalLM")),
    "qwen3vl": _text_of(_dense("Qwen3ForCausalLM")),
    "qwen3vlmoe": _text_of(_qwen3moe),
    "command-r": _cohere,
    "cohere2": _cohere2,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "granite": _granite,
    "granitemoe": _granite,
}
"""`general.architecture` -> the function that reads the keys besides the common ones."""
