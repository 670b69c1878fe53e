"""The rotary settings of a config.json, in its newer and its older form, against transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from ostinato.models.config.model_config import ModelConfig
from tests.models.config_json.test_config import IMAGES, LLAMA, MOE_TEXT, read

OF_IMAGES: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": IMAGES,
    "Qwen2_5_VLForConditionalGeneration": IMAGES,
    "Qwen3VLForConditionalGeneration": IMAGES,
    "Qwen3VLMoeForConditionalGeneration": IMAGES | MOE_TEXT,
}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1]}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default"}
BY_LAYER_TYPE: list[dict[str, Any]] = [
    {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}},
    {
        "rope_parameters": {"full_attention": None, "sliding_attention": None},
        "rope_theta": 3e4,
        "rope_local_base_freq": 2e3,
    },
    {
        "rope_parameters": {
            "full_attention": {**LINEAR, "rope_theta": 5e4},
            "sliding_attention": {**DEFAULT, "rope_theta": 4e3},
        },
        "rope_theta": 3e4,
        "rope_local_base_freq": 2e3,
    },
    {
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT},
        "rope_scaling": {**LINEAR, "rope_theta": 7e4},
        "rope_theta": 3e4,
    },
    {"rope_theta": 3e4, "rope_scaling": {**LINEAR, "rope_theta": 7e4}},
    {"rope_theta": 3e4},
]


def read_text(architecture: str, **settings: Any) -> ModelConfig:
    """A small model with these keys, which are in `text_config` if the model takes images."""
    if architecture not in OF_IMAGES:
        return read(architectures=[architecture], **settings)
    keys = OF_IMAGES[architecture]
    text = {**keys["text_config"], "rope_scaling": None, **settings}
    return read(architectures=[architecture], **{**keys, "text_config": text})


def saved_parameters(architecture: str, **settings: Any) -> dict[str, Any]:
    """`rope_parameters` of the config.json that transformers saves for these keys."""
    own = json.loads(json.dumps({**LLAMA, **settings}))  # transformers changes its objects
    keys = {"text_config": own} if architecture in OF_IMAGES else own
    config = getattr(transformers, architecture).config_class(**keys)
    return config.get_text_config().rope_parameters


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {"rope_theta": 3e4, "rope_scaling": {**LINEAR, "rope_theta": 7e4}}),
        *(
            (architecture, {**beside, "rope_scaling": {**SECTIONS, "rope_theta": 7e4}})
            for architecture in OF_IMAGES
            for beside in ({}, {"rope_theta": 3e4})
        ),
        *(
            (architecture, settings)
            for architecture in ("Gemma3ForCausalLM", "Olmo3ForCausalLM")
            for settings in BY_LAYER_TYPE
        ),
    ],
)
def test_settings_are_read_as_by_transformers(architecture: str, settings: dict[str, Any]) -> None:
    saved = saved_parameters(architecture, **settings)
    assert read_text(architecture, **settings) == read_text(architecture, rope_parameters=saved)


@pytest.mark.parametrize(
    ("architecture", "settings", "words"),
    [
        (
            "LlamaForCausalLM",
            {
                "rope_parameters": {"rope_theta": 3e4},
                "rope_scaling": {"rope_theta": 7e4},
                "rope_theta": 3e4,
            },
            "rope_parameters has rope_theta=30000.0, but rope_scaling says 70000.0",
        ),
        *(
            (
                architecture,
                {
                    "rope_parameters": {"full_attention": LINEAR, "sliding_attention": None},
                    "rope_scaling": {**LINEAR, "factor": 4.0},
                },
                "rope_parameters has factor=2.0, but rope_scaling says 4.0",
            )
            for architecture in ("Gemma3ForCausalLM", "Olmo3ForCausalLM")
        ),
    ],
)
def test_contradictions_are_refused(
    architecture: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_text(architecture, **settings)
