"""Which settings of a checkpoint a module has: as in the libraries that write them."""

from __future__ import annotations

import pytest
from compressed_tensors.utils.match import match_targets
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ostinato.models.quantized_checkpoints import auto_round
from ostinato.models.quantized_checkpoints.compressed_tensors import from_checkpoint
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import WeightMethod

NAMES = ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"]
TARGETS = [*NAMES, "Linear", "re:.*down_proj", "re:.*mlp.*", "re:.*q_proj", "re:.*layers.0.*"]


@given(st.lists(st.sampled_from(TARGETS), unique=True, min_size=1), st.sampled_from(NAMES))
def test_the_group_of_a_module(targets: list[str], name: str) -> None:
    """Each target has a group of its own, and the groups differ in their size."""
    sizes = dict(zip(targets, (16, 32, 64, 128, 256, 512, 1024), strict=False))
    groups = {
        f"group_{index}": {
            "targets": [target],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": sizes[target],
                "symmetric": True,
            },
        }
        for index, target in enumerate(targets)
    }
    stated = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": [],
    }
    rule = from_checkpoint(stated, Plain(), {}).rule_for(name)
    matches = match_targets(name, nn.Linear(1, 1), targets)
    if matches:
        assert isinstance(rule, WeightMethod)
        assert f"groups of {sizes[matches[0]]}" in rule.name
    else:
        assert rule == "quantization_config.config_groups"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([".*down_proj", NAMES[0]], 1),  # the name comes first
        ([NAMES[0], ".*down_proj"], 0),
        ([".*q_proj", r"layers\.\d+\.mlp", ".*down_proj"], 1),  # the first pattern that fits
        (["model.layers.0.mlp.down", "down_proj", "lm_head"], None),  # parts of names are none
    ],
)
def test_the_entry_of_a_module_in_auto_round(entries: list[str], expected: int | None) -> None:
    sizes = (16, 32, 64)
    extra = {one: {"group_size": size} for one, size in zip(entries, sizes, strict=False)}
    stated = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    policy = auto_round.from_checkpoint({**stated, "extra_config": extra}, Plain(), {})
    rule = policy.rule_for(NAMES[0])
    assert isinstance(rule, WeightMethod)
    assert f"groups of {128 if expected is None else sizes[expected]}" in rule.name


def test_a_broken_pattern_of_auto_round_is_named() -> None:
    stated = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    broken = {**stated, "extra_config": {"(layers": {"bits": 16}}}
    with pytest.raises(ValueError, match=r"extra_config has the pattern '\(layers': missing \)"):
        auto_round.from_checkpoint(broken, Plain(), {})
