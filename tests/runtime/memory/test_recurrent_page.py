"""The table of docs/recurrent.md has the sizes that the code computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.recurrent_spec import (
    DeltaSpec,
    RecurrentSpec,
    ShortConvSpec,
    StateSpaceSpec,
)
from ostinato.runtime.startup.plan.model_source import open_model
from tests.runtime.tiny import tiny_config

PAGE = Path(__file__).parents[3] / "docs" / "recurrent.md"


def layers(count: int, *attention: int) -> tuple[bool, ...]:
    return tuple(layer not in attention for layer in range(count))


def parts(letter: str) -> tuple[bool, ...]:
    """The layers of Nemotron-Nano-9B-v2 that have this letter."""
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    return tuple(each == letter for each in pattern)


def delta(count: int) -> DeltaSpec:
    return DeltaSpec(
        layers=layers(count, *range(3, count, 4)),
        num_k_heads=16,
        num_v_heads=32,
        k_dim=128,
        v_dim=128,
        conv_width=4,
    )


# Model -> its recurrent layers, heads of keys and the size of a head, as its config.json has them.
MODELS: dict[str, tuple[RecurrentSpec, int, int]] = {
    "Qwen3.5-4B": (delta(32), 4, 256),
    "Qwen3-Next-80B-A3B": (delta(48), 2, 256),
    "LFM2-1.2B": (
        ShortConvSpec(
            layers=layers(16, 2, 5, 8, 10, 12, 14), channels=2048, conv_width=3, has_bias=False
        ),
        8,
        64,
    ),
    "Granite-4.0-H-Tiny": (
        StateSpaceSpec(
            layers=layers(40, 5, 15, 25, 35),
            num_heads=48,
            head_dim=64,
            state_size=128,
            num_groups=1,
            conv_width=4,
            has_conv_bias=True,
            has_bias=False,
            step_limits=(0.0, float("inf")),
            norm_eps=1e-5,
        ),
        4,
        128,
    ),
    "Nemotron-Nano-9B-v2": (
        StateSpaceSpec(
            layers=parts("M"),
            num_heads=128,
            head_dim=80,
            state_size=128,
            num_groups=8,
            conv_width=4,
            has_conv_bias=True,
            has_bias=False,
            step_limits=(0.0, float("inf")),
            norm_eps=1e-5,
        ),
        8,
        128,
    ),
}
MLP_LAYERS = {"Nemotron-Nano-9B-v2": parts("-")}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return open_model(tiny_config().engine).config


@pytest.mark.parametrize("name", MODELS)
def test_the_page_has_the_sizes_of_the_code(config: ModelConfig, name: str) -> None:
    spec, num_kv_heads, head_dim = MODELS[name]
    count = len(spec.layers)
    model = dataclasses.replace(
        config,
        num_layers=count,
        sliding_windows=(0,) * count,
        recurrent=spec,
        mlp_layers=MLP_LAYERS.get(name, ()),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    cache = model.kv_cache_spec(16, torch.bfloat16)
    assert cache.recurrent is not None
    slot, token = cache.recurrent.bytes_per_slot, cache.bytes_per_token
    size = f"{slot / (1 << 20):.1f} MiB" if slot >= 1 << 20 else f"{slot / 1024:.0f} KiB"
    num_recurrent = sum(spec.layers)
    row = f"{num_recurrent} + {count - num_recurrent} | {size} | {token / 1024:.0f} KiB | "
    row += f"{slot / token:,.0f} |"
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert line.endswith(row), row
