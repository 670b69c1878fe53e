"""Keys of config.json: each has an effect or is refused, and a missing one has its default."""

from __future__ import annotations

import copy
import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from docs.list_models import REFUSED as LISTED
from ostinato.conf.schema import ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.vision_config import TowerKind
from ostinato.models.registry import model_class, read_model_config
from tests.models.config_json.test_every_key import NEUTRAL, mutations
from tests.models.vision.image_variants import (
    MINISTRAL3,
    VARIANTS,
    ImageVariant,
    hf_class_of,
    hf_config_of,
)

ALL = {**VARIANTS, "ministral3": MINISTRAL3}

# Keys without effect: those that other modules read, those of training and of other tasks.
EXTRA = {
    "image_seq_length", "image_token_id", "image_token_index", "initializer_factor",
    "projection_dim", "tokens_per_second", "video_token_id", "vision_end_token_id",
    "vision_start_token_id", "vision_use_head",
}  # fmt: skip
# The general keys of transformers in its nested configurations.
GENERAL = {
    "text_config.architectures", "text_config.dtype", "vision_config.architectures",
    "vision_config.dtype", "vision_config.is_encoder_decoder",
}  # fmt: skip
GEMMA_TOKENS = {"boi_token_index", "eoi_token_index"}
WINDOW = {"max_window_layers", "sliding_window", "use_sliding_window"}
# Only the key at the top level is read.
HEAD = "text_config.tie_word_embeddings"
INTERN = {
    "hidden_dropout_prob", "layer_scale_init_value", "projection_dropout", HEAD,
    "use_mask_token",  # the tensor is not used
}  # fmt: skip
IDEFICS = {"pretraining_tp", "_pad_token_id", HEAD}
NEUTRAL_IN = {
    "internvl": WINDOW | INTERN,
    "internvl-qwen3": WINDOW | INTERN,
    # The state that is read has no norm.
    "internvl-llama": INTERN | {"pretraining_tp", "vision_config.use_mean_pooling"},
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "llava": {"pretraining_tp"},
    "llava-mistral": set[str](),
    # The key is true in both places, and one of them is enough.
    "llava-siglip": WINDOW | {"tie_word_embeddings"},
    # Only the key at the top level is read. `layer_types` is there, so the interval has no effect.
    "gemma3": {"_sliding_window_pattern", "text_config.tie_word_embeddings", *GEMMA_TOKENS},
    "pixtral": {"image_size"},  # transformers 5.24 does not read it
    # The key is true at the top level.
    "mistral3": {"image_size", "text_config.tie_word_embeddings"},
    "ministral3": {"image_size", "text_config.rope_parameters.max_position_embeddings"},
    "qwen2-vl": WINDOW,
    "qwen2.5-vl": WINDOW | {"text_config.tie_word_embeddings"},
    "qwen3-vl": {"sliding_window", HEAD},
    "qwen3-vl-moe": {"sliding_window", HEAD},
    "qwen3.5": set[str](),
    "qwen3.5-moe": {"intermediate_size"},  # every block has experts
}


def config_of(variant: ImageVariant) -> dict[str, Any]:
    """The config.json that transformers writes for a variant."""
    return {**hf_config_of(variant).to_dict(), "architectures": [hf_class_of(variant).__name__]}


def read(config: dict[str, Any]) -> ModelConfig:
    return model_class(config["architectures"][0]).read_config(config)


@pytest.mark.parametrize("name", ALL)
def test_no_key_is_ignored(name: str) -> None:
    config = config_of(ALL[name])
    expected = read(config)
    ignored = set[str]()
    for key, changed in mutations(config):
        try:
            if read(changed) == expected:
                ignored.add(key)
        except ValueError:
            continue
    neutral = NEUTRAL | EXTRA | GENERAL | NEUTRAL_IN[name]
    left = {key for key in ignored if not neutral.intersection((key, *key.split(".")))}
    assert left == set()


@pytest.mark.parametrize("name", ALL)
def test_a_missing_key_has_the_default_of_transformers(name: str) -> None:
    """Of a configuration with the defaults in its parts, each key may be left out."""
    variant = ALL[name]
    settings = {
        part: {"model_type": variant.settings[part]["model_type"]}
        for part in ("text_config", "vision_config")
        if "model_type" in variant.settings[part]
    }
    config = {
        **getattr(transformers, f"{variant.kind}Config")(**settings).to_dict(),
        "architectures": [hf_class_of(variant).__name__],
    }
    if variant.kind == "Gemma3":
        config["mm_tokens_per_image"] = 49  # the default does not fit the default tower
    if variant.is_pixtral:
        config["vision_feature_select_strategy"] = "full"
    sizes = {"Gemma3": "", "Llava": "", "Mistral3": "", "Qwen2VL": "hidden_size"}
    size_key = sizes.get(variant.kind, "out_hidden_size")
    if size_key:
        hidden_size = config["text_config"]["hidden_size"]
        config["vision_config"] = {**config["vision_config"], size_key: hidden_size}
    expected = read(config)
    for part in ("text_config", "vision_config"):
        for key in config[part].keys() - {size_key, "model_type"}:
            fewer = {each: value for each, value in config[part].items() if each != key}
            assert read({**config, part: fewer}) == expected, key


def test_qwen2_vl_with_all_keys_at_the_top_level() -> None:
    """As in the published files of Qwen2-VL."""
    config = config_of(VARIANTS["qwen2-vl"])
    text = config.pop("text_config")
    grid = text["rope_parameters"]
    text = {key: value for key, value in text.items() if key not in (*config, "rope_parameters")}
    old = {
        **config,
        **text,
        "rope_theta": grid["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": grid["mrope_section"]},
        "torch_dtype": "bfloat16",
        "dtype": None,
    }
    new = {**config, "text_config": {**text, "rope_parameters": grid}, "dtype": "bfloat16"}
    assert read(old) == read(new)


def test_llava_with_the_defaults_of_its_parts() -> None:
    """As in the published file of LLaVA 1.5 7B."""
    config = read(
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "image_token_index": 32000,
            "model_type": "llava",
            "projector_hidden_act": "gelu",
            "text_config": {
                "architectures": ["LlamaForCausalLM"],
                "max_position_embeddings": 4096,
                "model_type": "llama",
                "rms_norm_eps": 1e-05,
                "torch_dtype": "float16",
                "vocab_size": 32064,
            },
            "torch_dtype": "float16",
            "vision_config": {
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "model_type": "clip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "projection_dim": 768,
                "vocab_size": 32000,
            },
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "vocab_size": 32064,
        }
    )
    assert (config.hidden_size, config.num_layers, config.intermediate_size) == (4096, 32, 11_008)
    assert (config.vocab_size, config.max_model_len) == (32_064, 4096)
    assert config.vision is not None
    assert config.vision.kind is TowerKind.clip
    assert config.vision.feature_layers == (23,)
    assert config.vision.num_used_layers == 23


def test_the_head_of_an_internvl_without_the_key(tmp_path: Path) -> None:
    """It is tied unless the checkpoint has one. Published files lack the key, and have a head."""
    hf_config = config_of(VARIANTS["internvl"])
    del hf_config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(hf_config, default=str))
    for names, is_tied in (
        (["model.language_model.embed_tokens.weight"], True),
        (["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"], False),
        (["lm_head.weight"], False),
    ):
        save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
        section = ModelSection(path=str(tmp_path))
        assert read_model_config(open_checkpoint(section)).tie_word_embeddings is is_tied
    section = ModelSection(path=str(tmp_path), config={"tie_word_embeddings": True})
    assert read_model_config(open_checkpoint(section)).tie_word_embeddings


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("internvl", {"downsample_ratio": 0.3}, "downsample_ratio=0.3 is not supported; it must be 1"),
    ("internvl", {"downsample_ratio": 1 / 3}, "merges 3 patches in a row, so vision_config.image"),
    ("internvl", {"vision_feature_layer": [-1]}, r"vision_feature_layer=\[-1\] must be one of -4"),
    ("internvl", {"vision_config": {"image_size": [28, 14]}}, "both numbers must be the same"),
    ("internvl", {"vision_config": {"num_attention_heads": 3}}, "multiple of the number of heads"),
    ("internvl", {"text_config": {"model_type": "gemma"}}, "supported: qwen2, qwen3, llama"),
    ("idefics3", {"scale_factor": 0}, "scale_factor must be an integer of at least 1, got 0"),
    (
        "idefics3",
        {"vision_config": {"image_size": 6}},
        "image_size=6 must be at least patch_size=7",
    ),
    ("smolvlm", {"text_config": {"model_type": "qwen2"}}, "text_config.model_type=qwen2"),
    (
        "llava",
        {"vision_feature_layer": 4},
        "vision_feature_layer=4 must be one or several of -4 to 3",
    ),
    ("llava", {"vision_feature_layer": []}, r"vision_feature_layer=\[\]"),
    ("llava", {"vision_feature_select_strategy": "cls"}, "supported: default, full"),
    ("llava", {"text_config": {"model_type": "gemma"}}, "text_config.model_type=gemma"),
    ("llava", {"vision_config": {"model_type": "dinov2"}}, "vision_config.model_type=dinov2"),
    (
        "pixtral",
        {"vision_feature_select_strategy": "default"},
        "vision_feature_select_strategy='default' is not supported with .*it must be 'full'",
    ),
    ("pixtral", {"vision_config": {"head_dim": 8}}, "head_dim=8 is not .* which is 16"),
    ("pixtral", {"vision_config": {"hidden_size": 36}}, "four times the number of heads"),
    ("pixtral", {"vision_config": {"patch_size": [4, 4]}}, "patch_size must be an integer"),
    (
        "pixtral",
        {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}},
        "vision_config.rope_parameters.rope_type='yarn'",
    ),
    ("pixtral", {"vision_feature_layer": [0, 4]}, r"=\[0, 4\] must be one or several of -4 to 3"),
    ("mistral3", {"vision_feature_layer": [-1, -2]}, r"vision_feature_layer=\[-1, -2\] is not"),
    ("mistral3", {"vision_config": {"model_type": "dinov2"}}, "vision_config.model_type=dinov2"),
    ("mistral3", {"text_config": {"model_type": "gemma"}}, "text_config.model_type=gemma"),
    ("mistral3", {"spatial_merge_size": 0}, "spatial_merge_size must be an integer of at least 1"),
    ("mistral3", {"text_config": 3}, "text_config must be an object"),
    (
        "ministral3",
        {"text_config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        "rope_parameters must have a number llama_4_scaling_beta, got None",
    ),
    ("llava", {"vision_config": {"num_channels": 1}}, "vision_config.num_channels=1 is not"),
    ("llava", {"vision_config": {"patch_size": 5}}, "image_size=28 must be a multiple"),
    (
        "llava",
        {"vision_config": {"patch_size": [7, 7]}},
        r"vision_config.patch_size must be an int",
    ),
    ("llava", {"vision_config": {"hidden_act": "tanh"}}, "vision_config.hidden_act='tanh'"),
    (
        "qwen2-vl",
        {"vision_config": {"hidden_size": 32}},
        "is not the hidden size of the decoder, 64",
    ),
    ("qwen2-vl", {"vision_config": {"embed_dim": 36}}, "four times the number of heads"),
    ("qwen2-vl", {"vision_config": {"in_channels": 4}}, "vision_config.in_channels=4 is not"),
    ("qwen2.5-vl", {"vision_config": {"window_size": 4}}, "window_size=4 must be at least the 8"),
    (
        "qwen2.5-vl",
        {"vision_config": {"fullatt_block_indexes": 3}},
        "fullatt_block_indexes must be a list",
    ),
    (
        "qwen2.5-vl",
        {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 4]}}},
        "must add up to the 8 rotated pairs",
    ),
    (
        "qwen2.5-vl",
        {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [8]}}},
        "at least three numbers",
    ),
    (
        "qwen2.5-vl",
        {"text_config": {"rope_parameters": {"mrope_interleaved": True}}},
        "mrope_interleaved=True is not supported, only False",
    ),
    (
        "qwen3-vl",
        {"text_config": {"rope_parameters": {"mrope_interleaved": False}}},
        "mrope_interleaved=False is not supported, only True",
    ),
    (
        "qwen3-vl",
        {"vision_config": {"deepstack_visual_indexes": [0, 3]}},
        r"deepstack_visual_indexes=\[0, 3\] must be different layers of the tower, 0 to 2",
    ),
    (
        "qwen3-vl",
        {"vision_config": {"deepstack_visual_indexes": [0, 1, 2]}},
        "a decoder of 3 layers can have at most 2",
    ),
    ("qwen3-vl", {"vision_config": {"num_position_embeddings": 24}}, "must be the square"),
    (
        "qwen3-vl",
        {"vision_config": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}},
        "vision_config.rope_parameters.rope_type='linear'",
    ),
    ("qwen3-vl", {"vision_config": 3}, "vision_config must be an object"),
    ("qwen3-vl", {"text_config": 3}, "text_config must be an object"),
    ("qwen3-vl-moe", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob=False is not"),
    ("qwen3-vl", {"text_config": {"use_sliding_window": True}}, "use_sliding_window=True is not"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_unsupported_values_are_refused_by_name(
    name: str, changes: dict[str, Any], words: str
) -> None:
    config = config_of(ALL[name])
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=words) as error:
        read(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ALL)
def test_what_the_page_lists_is_refused_by_its_key(name: str) -> None:
    config = config_of(ALL[name])
    listed = LISTED[config["architectures"][0]]
    assert listed
    for key, value, _, _ in listed:
        *outer, inner = key.split(".")
        changed = copy.deepcopy(config)
        reduce(dict[str, Any].__getitem__, outer, changed)[inner] = value
        with pytest.raises(ValueError, match=re.escape(f"{inner}={value} is not supported")):
            read(changed)
