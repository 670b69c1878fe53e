"""ModelConfig from the forms of config.json that are in use; errors that name the wrong key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.conf.schema import DType
from ostinato.models.config.hf_fields import architecture_of
from ostinato.models.config.model_config import ModelConfig, resolve_dtype
from ostinato.models.families.gpt2 import GPT2LMHeadModel
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.registry import ARCHITECTURES, build_model, model_class
from ostinato.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}

EXPERTS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = EXPERTS | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
IMAGES: dict[str, Any] = {  # keys of models that take images
    "text_config": {
        **LLAMA,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "rope_scaling": {"mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    },
}
FLAT_IMAGES = IMAGES | {"vision_config": IMAGES["vision_config"] | {"deepstack_visual_indexes": []}}
TILES: dict[str, Any] = {  # keys of models that cut images into tiles
    "text_config": {**LLAMA, "num_key_value_heads": 8, "model_type": "llama"},
    "vision_config": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    },
}
SOUNDS: dict[str, Any] = {"text_config": {**LLAMA, "num_key_value_heads": 8}}
MAMBA = {"mamba_n_heads": 8}
MOE_TEXT = {"text_config": IMAGES["text_config"] | EXPERTS}
OF_FAMILY = {
    "AudioFlamingo3ForConditionalGeneration": SOUNDS,
    "WhisperForConditionalGeneration": {
        "is_encoder_decoder": True,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 8,
        "encoder_ffn_dim": 128,
        "decoder_layers": 4,
        "decoder_attention_heads": 8,
        "decoder_ffn_dim": 128,
    },
    "BambaForCausalLM": {**MAMBA, "attn_layer_indices": [1]},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "Gemma3ForConditionalGeneration": {
        "text_config": {**LLAMA, "num_key_value_heads": 8},
        "mm_tokens_per_image": 49,
    },
    "GPT2LMHeadModel": {"n_positions": 2048},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "GraniteMoeHybridForCausalLM": EXPERTS | MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "Glm4MoeLiteForCausalLM": LATENT,
    "Idefics3ForConditionalGeneration": TILES,
    "InternVLForConditionalGeneration": TILES,
    "SmolVLMForConditionalGeneration": TILES,
    "Lfm2MoeForCausalLM": {**EXPERTS, "layer_types": ["conv"] * 3 + ["full_attention"]},
    "Llama4ForCausalLM": EXPERTS | {"intermediate_size_mlp": 64},
    "LlavaForConditionalGeneration": {"text_config": {**LLAMA, "model_type": "llama"}},
    "Mistral3ForConditionalGeneration": {"text_config": {**LLAMA, "num_key_value_heads": 8}},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*-"},
    "Qwen2AudioForConditionalGeneration": SOUNDS,
    "Qwen2VLForConditionalGeneration": IMAGES,
    "Qwen2_5_VLForConditionalGeneration": IMAGES,
    "Qwen3NextForCausalLM": {**EXPERTS, "head_dim": 8},
    "Qwen3_5MoeForCausalLM": {**EXPERTS, "head_dim": 8},
    "Qwen3_5ForConditionalGeneration": FLAT_IMAGES,
    "Qwen3_5MoeForConditionalGeneration": FLAT_IMAGES | MOE_TEXT,
    "Qwen3VLForConditionalGeneration": IMAGES,
    "Qwen3VLMoeForConditionalGeneration": IMAGES | MOE_TEXT,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_positions": 8}


def read(**changes: Any) -> ModelConfig:
    settings = {**LLAMA, **changes}
    hf_config = {key: value for key, value in settings.items() if value != "absent"}
    return model_class(architecture_of(hf_config)).read_config(hf_config)


def test_llama_defaults() -> None:
    assert read() == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        max_model_len=2048,
        norm_eps=1e-5,
        activation="silu",
        tie_word_embeddings=False,
        rope=Rope(rotary_dim=8, theta=10_000.0),
        sliding_windows=(0, 0, 0, 0),
        dtype=torch.float32,
        eos_token_ids=(),
        bos_token_id=None,
    )


def test_gpt2_names() -> None:
    config = GPT2LMHeadModel.read_config(
        {
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "eos_token_id": 50256,
        }
    )
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (768, 3072, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (12, 12, 12)
    assert (config.max_model_len, config.rope, config.activation) == (1024, None, "gelu_new")
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (50256,)


def test_config_is_hashable() -> None:
    assert hash(read()) == hash(read())


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": None,
            "rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 5e5},
        },
    ],
)
def test_both_forms_of_rope_settings(settings: dict[str, Any]) -> None:
    config = read(**settings)
    assert config.rope == Rope(rotary_dim=8, theta=5e5, scaling=LinearScaling(factor=2.0))
    assert config.max_model_len == 4096


def test_llama3_rope_states_the_stretched_context() -> None:
    config = read(
        max_position_embeddings=131072,
        rope_theta=5e5,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    assert config.max_model_len == 131072
    assert config.rope is not None
    assert config.rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


def test_yarn_stretches_the_context() -> None:
    config = read(
        max_position_embeddings=32768,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    )
    assert config.max_model_len == 131072
    assert config.rope is not None
    assert config.rope.scaling == YarnScaling(
        factor=4.0, original_max_position=32768, attention_factor=1.138629436111989
    )


def test_dynamic_rope_offers_the_context_that_needs_no_scaling() -> None:
    config = read(max_position_embeddings=2048, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert config.max_model_len == 2048
    assert config.rope == Rope(rotary_dim=8, theta=10_000.0)


WINDOW = {"sliding_window": 16}
QWEN = WINDOW | {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 3}
MISTRAL = WINDOW | {"architectures": ["MistralForCausalLM"]}
IN_TURN = {"layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        (WINDOW, (0, 0, 0, 0)),  # Llama has none
        (MISTRAL, (16, 16, 16, 16)),
        (MISTRAL | {"sliding_window": None}, (0, 0, 0, 0)),
        (MISTRAL | IN_TURN, (16, 0, 16, 0)),  # unlike transformers, like vLLM
        (QWEN, (0, 0, 0, 0)),  # off by default
        (QWEN | {"use_sliding_window": True}, (0, 0, 0, 16)),
        (QWEN | IN_TURN | {"use_sliding_window": True}, (16, 0, 16, 0)),
        (QWEN | IN_TURN, (0, 0, 0, 0)),
    ],
)
def test_sliding_windows(settings: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(**settings).sliding_windows == windows


def test_the_context_of_a_gemma_3_includes_its_linear_scaling() -> None:
    scaling = {"type": "linear", "factor": 8.0}
    config = read(architectures=["Gemma3ForCausalLM"], rope_scaling=scaling)
    assert config.max_model_len == 2048
    assert config.rope == Rope(rotary_dim=8, theta=1_000_000.0, scaling=LinearScaling(factor=8.0))


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "ids"),
    [
        (2, "absent", (2,)),
        ([2, 7], "absent", (2, 7)),
        (None, "absent", ()),
        (2, [128001, 128009], (128001, 128009)),
        (0, None, (0,)),
    ],
)
def test_eos_token_ids(config_ids: Any, generation_ids: Any, ids: tuple[int, ...]) -> None:
    generation = {} if generation_ids == "absent" else {"eos_token_id": generation_ids}
    config = LlamaForCausalLM.read_config({**LLAMA, "eos_token_id": config_ids}, generation)
    assert config.eos_token_ids == ids


@pytest.mark.parametrize(
    ("settings", "choice", "dtype"),
    [
        ({"dtype": "bfloat16"}, DType.auto, torch.bfloat16),
        ({"torch_dtype": "float16"}, DType.auto, torch.float16),
        ({"torch_dtype": "bfloat16"}, DType.float32, torch.float32),
        ({}, DType.auto, torch.float32),
    ],
)
def test_dtype(settings: dict[str, Any], choice: DType, dtype: torch.dtype) -> None:
    assert resolve_dtype(choice, read(**settings)) == dtype


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"architectures": []}, ["architectures", "[]"]),
        ({"hidden_size": "absent"}, ["hidden_size", "None"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=8", "num_key_value_heads=3"]),
        ({"num_attention_heads": 7}, ["head_dim"]),
        ({"hidden_act": "mish"}, ["hidden_act='mish'", "silu"]),
        ({**GPT2, "activation_function": "mish"}, ["activation_function='mish'"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        (
            {"rope_scaling": {"type": "spiral", "factor": 2.0}},
            ["rope_type='spiral'", "default, dynamic, linear, llama3, longrope, yarn"],
        ),
        (
            {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
            ["rope_type='dynamic' with alpha"],
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            ["rope_type='longrope'", "4 numbers in short_factor", "None"],
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0] * 3,
                }
            },
            ["4 numbers in long_factor", "got 3"],
        ),
        ({"rope_scaling": {"type": "linear"}}, ["'linear'", "factor"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_type='default' with factor=2.0"]),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            [
                "rope_parameters has rope_theta=1000000.0",
                "rope_theta says 10000.0",
                "set model.config.rope_theta=null",
            ],
        ),
        (
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            [
                "rope_type='default'",
                "rope_scaling says 'linear'",
                "to use rope_parameters set model.config.rope_scaling=null, to ignore it set "
                "model.config.rope_parameters=null",
            ],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["by layer type", "full_attention"],
        ),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, ["factor", "two"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        (
            {**MISTRAL, "layer_types": ["full_attention", "mamba"] * 2},
            ["layer_types", "full_attention or sliding_attention", "mamba"],
        ),
        (
            {**MISTRAL, "layer_types": ["full_attention"]},
            ["layer_types", "each of the 4 layers", "got ['full_attention']"],
        ),
        (
            {**GPT2, "scale_attn_by_inverse_layer_idx": True},
            ["scale_attn_by_inverse_layer_idx=True"],
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "yarn", "factor": 4.0}},
            ["rope_type='longrope'", "short_factor"],
        ),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder=True"]),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "sentence_transformers": {"activation_fn": "torch.nn.Tanh"},
            },
            ["sentence_transformers.activation_fn=torch.nn.Tanh is not", "Sigmoid"],
        ),
        ({"head_dim": 7}, ["even", "7"]),
        ({"hidden_size": 60}, ["no head_dim", "60", "8 attention heads"]),
    ],
)
def test_refusals_name_the_key(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        read(**settings)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_kv_cache_and_attention_specs() -> None:
    config = read(**MISTRAL, num_key_value_heads=2)
    cache = config.kv_cache_spec(32, torch.bfloat16)
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (4, 2, 8)
    assert cache.bytes_per_block == 4 * 2 * 2 * 32 * 8 * 2
    spec = config.attention_spec(32, torch.bfloat16, torch.device("cpu"))
    assert (spec.num_heads, spec.num_kv_heads, spec.sliding_window) == (8, 2, 16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_built_on_meta_without_memory(architecture: str) -> None:
    has_experts = any(part in architecture for part in ("Moe", "moe", "Mixtral", "GptOss"))
    more = OF_FAMILY.get(architecture, EXPERTS if has_experts else {})
    config = read(architectures=[architecture], **more)
    model = build_model(
        config,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        attention_backend="reference",
        max_model_len=100,
        num_media_rows=9,
    )
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert len(model.layers) == 4


def test_layers_with_equal_keys_share_a_program() -> None:
    config = read(
        architectures=["Qwen2ForCausalLM"],
        sliding_window=16,
        use_sliding_window=True,
        max_window_layers=2,
    )
    model = build_model(
        config, dtype=torch.float32, device=torch.device("meta"), attention_backend="reference"
    )
    keys = [layer.static_key() for layer in model.layers]  # pyright: ignore[reportCallIssue]
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert keys[0] != keys[2]


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'FooForCausalLM' is not supported.*LlamaForCausalLM"):
        read(architectures=["FooForCausalLM"])


def test_longer_than_the_model_states() -> None:
    with pytest.raises(ValueError, match=r"model\.max_model_len must be at most 2048.*got 4096"):
        build_model(
            read(),
            dtype=torch.float32,
            device=torch.device("meta"),
            attention_backend="reference",
            max_model_len=4096,
        )
