"""Keys of config.json: each one has an effect or is refused, and a missing one has the default of
transformers.

The first is checked for each key of each variant in `VARIANTS`. Keys without effect are listed
here. The keys are those that transformers writes, and those that the settings of a variant add. So
the test fails if a new release of transformers adds a key that the family neither reads nor
refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import transformers

from ostinato.models.registry import ARCHITECTURES, model_class
from tests.models.random_checkpoints import VARIANTS, Variant

# Keys without effect in all families: those of training, of generation with transformers, of other
# tasks, and of the file itself.
NEUTRAL = {
    "_name_or_path", "attention_dropout", "attn_pdrop", "chunk_size_feed_forward",
    "classifier_dropout", "dropout", "emb_pdrop", "embd_pdrop", "embedding_dropout",
    "embedding_fraction", "hidden_dropout", "id2label", "init_device", "init_std", "initializer_range",
    "label2id", "layerdrop", "model_type", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "problem_type", "resid_pdrop", "residual_dropout",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "transformers_version",
    "use_cache",
}  # fmt: skip
_LATENT = {
    "head_dim": "qk_rope_head_dim and qk_nope_head_dim decide",
    "qk_head_dim": "qk_rope_head_dim and qk_nope_head_dim decide",
}
_NO_MIXERS = "this variant has attention in all layers"
_NO_EXPERTS = {
    "intermediate_size": "the size of an expert, and this variant has none",
    "num_experts_per_tok": "this variant has no experts",
}
_NO_SPARSE_PARTS = "this variant has no experts"
_NEMOTRON_EXPERTS = dict.fromkeys(
    (
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "n_routed_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "topk_group",
    ),
    _NO_SPARSE_PARTS,
)
_NO_ROPE = {
    "rope_parameters.rope_theta": "this variant has no rotary embedding",
    "rope_parameters.rope_type": "this variant has no rotary embedding",
}
# Model type or name of a variant -> keys that change nothing there, and why.
NEUTRAL_IN = {
    "bamba": {
        "mamba_chunk_size": "changes only the order of additions",
        "num_logits_to_keep": "selects logits of a prompt; requests do that here",
        "z_loss_coefficient": "training",
    },
    "bloom": {
        "intermediate_size": "the variant adds it; in BLOOM it is always 4 times the hidden size",
        "pretraining_tp": "changes only the order of additions",
        "slow_but_exact": "changes only the order of additions",
    },
    "falcon-rw": {"rope_parameters.rope_theta": "this variant has ALiBi"},
    "falcon": {
        "intermediate_size": "the variants add it; Falcon reads ffn_hidden_size",
        "multi_query": "read only if new_decoder_architecture is false",
        "num_kv_heads": "read only if new_decoder_architecture is true",
        "num_ln_in_parallel_attn": "read only if new_decoder_architecture is true",
    },
    "codegen": {"n_ctx": "it has no effect in transformers either"},
    "deepseek_v2": {**_LATENT, "pretraining_tp": "changes only the order of additions"},
    "deepseek-v2": {"n_group": "topk_method is greedy", "topk_group": "topk_method is greedy"},
    "deepseek_v3": {
        **_LATENT,
        "num_nextn_predict_layers": "read for speculation.method=mtp alone",
        "pretraining_tp": "changes only the order of additions",
    },
    "gemma3_text": {"_sliding_window_pattern": "layer_types decides"},
    "glm4_moe": {"num_nextn_predict_layers": "read for speculation.method=mtp alone"},
    "glm4_moe_lite": {
        **_LATENT,
        "first_k_dense_replace": "mlp_layer_types decides",
        "pretraining_tp": "changes only the order of additions",
    },
    "gpt2": {
        "reorder_and_upcast_attn": "asks for float32 attention scores, which are used anyway",
        "summary_activation": "a head of another task",
        "summary_first_dropout": "a head of another task",
        "summary_proj_to_labels": "a head of another task",
        "summary_type": "a head of another task",
        "summary_use_proj": "a head of another task",
    },
    "gpt_neox": {"is_decoder": "the model is always a decoder"},
    "granite4": _NO_ROPE,
    "granite4-attention": {
        **_NO_ROPE,
        **_NO_EXPERTS,
        "mamba_conv_bias": _NO_MIXERS,
        "mamba_d_conv": _NO_MIXERS,
        "mamba_d_head": _NO_MIXERS,
        "mamba_d_state": _NO_MIXERS,
        "mamba_expand": _NO_MIXERS,
        "mamba_n_groups": _NO_MIXERS,
        "mamba_n_heads": _NO_MIXERS,
        "mamba_proj_bias": _NO_MIXERS,
        "time_step_limit": _NO_MIXERS,
    },
    "granite4-dense": _NO_EXPERTS,
    "granitemoehybrid": {"mamba_chunk_size": "changes only the order of additions"},
    "lfm2": {"full_attn_idxs": "layer_types decides"},
    "lfm2-bias": {
        "block_ffn_dim_multiplier": "block_auto_adjust_ff_dim is off",
        "block_multiple_of": "block_auto_adjust_ff_dim is off",
    },
    "llama-dynamic": {"rope_parameters.factor": "only for longer contexts than are served"},
    "llama4_text": {
        "interleave_moe_layer_step": "moe_layers decides",
        "no_rope_layers": "`other` adds an entry, which is past the last layer",
        "no_rope_layer_interval": "no_rope_layers decides",
    },
    "llama4-two-experts": {
        "attn_scale": "attn_temperature_tuning is off",
        "floor_scale": "attn_temperature_tuning is off",
    },
    "llama": {"pretraining_tp": "changes only the order of additions"},
    "llama-tied": {"sliding_window": "a Llama has no window"},
    "mpt": {
        "attn_config.architectures": "a general key of transformers",
        "attn_config.dtype": "a general key of transformers",
        "attn_config.is_encoder_decoder": "a general key of transformers",
        "attn_config.attn_impl": "selects a kernel; all kernels give the same result",
        "attn_config.attn_pdrop": "training",
        "learned_pos_emb": "read only without ALiBi, and models without ALiBi are refused",
        "norm_type": "the kinds of norms differ in precision only",
    },
    "nemotron_h": {
        "chunk_size": "changes only the order of additions",
        "expand": "mamba_num_heads and mamba_head_dim decide",
        "moe_shared_expert_overlap": "changes only the order of computation",
        "mtp_layers_block_type": "speculation.method=mtp is refused for recurrent layers",
        "num_logits_to_keep": "selects logits of a prompt; requests do that here",
        "num_nextn_predict_layers": "speculation.method=mtp is refused for recurrent layers",
        "rescale_prenorm_residual": "training",
        "time_step_floor": "training",
        "time_step_max": "training",
        "time_step_min": "training",
        "use_mamba_kernels": "it has no effect in transformers either",
    },
    "nemotron-h": _NEMOTRON_EXPERTS,
    "nemotron-h-attention": {
        **_NEMOTRON_EXPERTS,
        "conv_kernel": _NO_MIXERS,
        "mamba_head_dim": _NO_MIXERS,
        "mamba_num_heads": _NO_MIXERS,
        "n_groups": _NO_MIXERS,
        "ssm_state_size": _NO_MIXERS,
        "time_step_limit": _NO_MIXERS,
        "use_bias": _NO_MIXERS,
        "use_conv_bias": _NO_MIXERS,
    },
    "nemotron-h-bias": _NEMOTRON_EXPERTS,
    "opt": {"intermediate_size": "no key of OPT, which has ffn_dim"},
    "phi3": {"original_max_position_embeddings": "only for scaled rotary embeddings"},
    "qwen2": {
        "max_window_layers": "layer_types decides",
        "sliding_window": "use_sliding_window is off",
        "use_sliding_window": "there is no window",
    },
    "qwen3": {
        "max_window_layers": "layer_types decides",
        "sliding_window": "use_sliding_window is off",
        "use_sliding_window": "there is no window",
    },
    "qwen3_5_moe_text": {"intermediate_size": "the variant adds it; every block has experts"},
    "qwen3.5": {"rope_parameters.mrope_section": "a token of a text has one position"},
    "qwen2_moe": {"max_window_layers": "layer_types decides"},
    "qwen3-moe": {
        "sliding_window": "use_sliding_window is off",
        "use_sliding_window": "there is no window",
    },
    "smollm3": {
        "no_rope_layers": "`other` adds an entry, which is past the last layer",
        "no_rope_layer_interval": "no_rope_layers decides",
    },
}


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int():
            return value * 2 or 1
        case float():
            return value * 2 or 0.5
        case str():
            return value + "_other"
        case None:
            return 3
        case [str(), *rest]:
            return [*rest, "other"]
        case list():
            return [*value, 5]
    raise TypeError(f"no other value for {value!r}: add its type to `other`")


def mutations(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, the config with another value for it). A key inside an object is "object.key"."""
    for key, value in config.items():
        if not isinstance(value, dict):
            yield key, {**config, key: other(value)}
            continue
        for inner, changed in mutations(value):
            yield f"{key}.{inner}", {**config, key: changed}


def config_of(variant: Variant) -> dict[str, Any]:
    """The config.json that transformers writes for a variant."""
    config = transformers.AutoConfig.for_model(variant.model_type, **variant.settings)
    model = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return {**config.to_dict(), "architectures": [model.__name__]}


@pytest.mark.parametrize("name", VARIANTS)
def test_no_key_is_ignored(name: str) -> None:
    config = config_of(VARIANTS[name])
    family = model_class(config["architectures"][0])
    expected = family.read_config(config)
    here = (NEUTRAL_IN.get(VARIANTS[name].model_type, {}), NEUTRAL_IN.get(name, {}))
    neutral = NEUTRAL.union(*here)
    ignored = set()
    for key, changed in mutations(config):
        try:
            if family.read_config(changed) == expected:
                ignored.add(key)
        except ValueError:
            continue
    # A nested object may be a configuration of transformers too, with all the general keys.
    assert {key for key in ignored if not NEUTRAL.intersection(key.split("."))} - neutral == set()


OF_OTHER_KINDS = (None, "other", 0, -1, 2.5, True, [], ["other"], [[]], {}, float("inf"))


def replaced(config: Mapping[str, Any], value: Any) -> Iterator[dict[str, Any]]:
    """The config with `value` for each key, also for each key of an object in it."""
    for key, stated in config.items():
        yield {**config, key: value}
        if isinstance(stated, dict):
            for changed in replaced(stated, value):
                yield {**config, key: changed}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_value_of_another_kind_is_refused_or_read(name: str) -> None:
    config = config_of(VARIANTS[name])
    family = model_class(config.pop("architectures")[0])
    lists = ("layer_types", "full_attn_idxs", "mlp_only_layers", "no_rope_layers")
    for variant in (config, {**config, **dict.fromkeys(lists)}):
        for value in OF_OTHER_KINDS:
            for changed in replaced(variant, value):
                with suppress(ValueError):  # any other error fails
                    family.read_config({**changed, "architectures": [family.__name__]})


def refusal(config: Mapping[str, Any]) -> str:
    """The error message, empty if the config is accepted."""
    try:
        model_class(config["architectures"][0]).read_config(config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_flag_or_a_number_is_not_read_from_another_kind(name: str) -> None:
    config = config_of(VARIANTS[name])
    family = model_class(config["architectures"][0])
    expected = family.read_config(config)
    unnamed = []
    for key, value in config.items():
        if key.endswith("_token_id"):
            continue  # it may be a list, and -1
        try:
            if not isinstance(value, int | float) or (
                family.read_config({**config, key: other(value)}) == expected
            ):
                continue  # the key has no effect
        except ValueError:  # only one value is supported
            continue
        numbers = (True, -1, float("nan"))
        for wrong in ("false", [[value]], 2.5) if isinstance(value, bool) else ("x", *numbers):
            message = refusal({**config, key: wrong})
            if key not in message:
                unnamed.append((key, wrong, message))
    assert unnamed == []


# Other defaults than in transformers would only give matrices other shapes, which a checkpoint then
# does not have; or they are tokens, which the tokenizer names too.
OTHER_DEFAULTS = {
    "bos_token_id", "eos_token_id", "head_dim", "num_key_value_heads", "q_lora_rank",
}  # fmt: skip
# Values that transformers' own default configuration lacks.
MISSING = {
    "BambaForCausalLM": {"attn_layer_indices": [9]},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    # The default number of embeddings does not fit the default tower.
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 49},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba"] * 31 + ["attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv"] * 31 + ["full_attention"]},
    # transformers unties the head if a checkpoint has one. The files that state nothing have one.
    "Mistral3ForConditionalGeneration": {"tie_word_embeddings": False},
    # By default the tower's results are not of the decoder's size.
    "Qwen2VLForConditionalGeneration": {"vision_config": {"hidden_size": 8192}},
    "Qwen2_5_VLForConditionalGeneration": {"vision_config": {"out_hidden_size": 8192}},
    "Qwen3_5ForConditionalGeneration": {"vision_config": {"out_hidden_size": 4096}},
    "Qwen3_5MoeForConditionalGeneration": {"vision_config": {"out_hidden_size": 2048}},
    "Qwen3VLForConditionalGeneration": {"vision_config": {"out_hidden_size": 4096}},
    "Qwen3VLMoeForConditionalGeneration": {"vision_config": {"out_hidden_size": 2048}},
}


NOT_IN_TRANSFORMERS = {"MPTForCausalLM"}  # the name in files from before transformers had MPT


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - NOT_IN_TRANSFORMERS))
def test_a_missing_key_has_the_default_of_transformers(architecture: str) -> None:
    defaults = getattr(transformers, architecture).config_class().to_dict()
    config = {**defaults, "architectures": [architecture], **MISSING.get(architecture, {})}
    family = model_class(architecture)
    expected = family.read_config(config)
    other = set()
    for key in config.keys() - OTHER_DEFAULTS:
        try:
            if (
                family.read_config({each: config[each] for each in config.keys() - {key}})
                != expected
            ):
                other.add(key)
        except ValueError:  # the key must be stated
            continue
    assert other == set()


STATED = {"lfm2_moe"}  # model types whose config must state the types of layers


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, each in VARIANTS.items()
        if config_of(each).get("layer_types") and each.model_type not in STATED
    ],
)
def test_layer_types_that_are_not_stated_are_those_of_transformers(name: str) -> None:
    """transformers writes the list of layer types that it has made from the other keys."""
    settings = {**VARIANTS[name].settings, "layer_types": None}
    config = config_of(Variant(VARIANTS[name].model_type, settings))
    family = model_class(config["architectures"][0])
    missing = {**config, "layer_types": None}
    if set(config["layer_types"]) == {"linear_attention"}:
        with pytest.raises(ValueError, match="layer_types must have full_attention"):
            family.read_config(missing)
        return
    assert family.read_config(missing) == family.read_config(config)
