"""Every model option with a configuration of its own describes the model that it names."""

import pytest
import torch

from ostinato.conf.compose import group_options, load_config
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.registry import build_model, read_model_config

# Parameters as the models' authors state them, tied weights counted once, and tokens of context.
KNOWN = {
    "falcon-7b": (6_921_720_704, 2048),
    "gpt2": (124_439_808, 1024),
    "llama-1b": (1_235_814_400, 131_072),
    "llama-45m": (56_369_664, 4096),
    "llama-8b": (8_030_261_248, 131_072),
    "mistral-7b": (7_248_023_552, 32_768),
    "pythia-160m": (162_322_944, 2048),
    "qwen2.5-0.5b": (494_032_768, 32_768),
    "qwen3-0.6b": (596_049_920, 40_960),
    "qwen3-8b": (8_190_735_360, 40_960),
}


def test_every_option_is_known_here():
    assert set(group_options()["model"]) == {"demo", *KNOWN}


@pytest.mark.parametrize("option", KNOWN)
def test_parameters_and_context(option: str):
    section = load_config([f"model={option}", "model.load_format=dummy"]).model
    config = read_model_config(open_checkpoint(section))
    model = build_model(
        config, dtype=config.dtype, device=torch.device("meta"), attention_backend="reference"
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (count, config.max_model_len) == KNOWN[option]
