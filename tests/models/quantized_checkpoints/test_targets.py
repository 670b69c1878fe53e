"""Which group of a compressed-tensors checkpoint a module belongs to: as in the library."""

from __future__ import annotations

from compressed_tensors.utils.match import match_targets
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

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
