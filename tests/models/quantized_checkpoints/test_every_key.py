"""Other values of a key of a quantization_config change the result, or are refused.

Each key of each format's settings, nested ones too, gets other values of its own type and of
other types. Keys without effect are listed here. Most of them say how a checkpoint was made. A
change from or to a null or empty value may have no effect.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.choose_weights import choose_weights
from ostinato.models.weight_policy import WeightPolicy
from tests.models.quantized_checkpoints.loading import load
from tests.models.quantized_checkpoints.writers import WRITERS, Form, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU = torch.device("cpu")
WITHOUT_EFFECT = {
    "autoround_version",
    "damp_percent",
    "input_activations",  # the kernels round activations more finely, or not at all
    "iters",
    "kv_cache_quant_algo",  # FP8; other values are refused
    "meta",
    "observer",
    "quantization_status",
    "true_sequential",
}
# The tensors show these settings: by zero points, g_idx, and the dimensions of scales.
TOLD_BY_TENSORS = {
    "checkpoint_format",
    "packing_format",
    "desc_act",
    "sym",
    "actorder",
    "zero_point",
}
UNKNOWN = ("unknown_key",)  # a key that no format has; every value but an empty one is refused
DYNAMIC = {r"+:.*\.1\.mlp\.down_proj": {"bits": 4, "group_size": 32, "sym": True}}
EXTRA = {"model.layers.1.mlp.down_proj": {"bits": 4, "group_size": 32, "sym": True}}
FORMS = [
    Form("gptq", settings={"dynamic": DYNAMIC}),
    Form("awq", symmetric=False),
    Form(
        "auto_round",
        settings={"packing_format": "auto_round:auto_gptq", "extra_config": EXTRA},
    ),
    Form("auto_round", symmetric=False, settings={"packing_format": "auto_round:auto_awq"}),
    Form("pack_quantized"),
    Form("int_quantized", bits=8, group=-1),
    Form("float_quantized", bits=8, group=-1),
    Form("float_quantized", bits=8, group=32),
    Form("nvfp4_pack", group=16),
    Form("fp8", bits=8, group=64),
    Form("fp8", bits=8, group=-1),
    Form("modelopt", bits=8, group=-1),
    Form("modelopt", group=16),
    Form("mxfp4"),
]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> its float checkpoint."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        return save(reference_model(VARIANTS[name]), VARIANTS[name].as_one_file(), folder)

    return make


Keys = tuple[str, ...]


def keys_in(settings: dict[str, Any], before: Keys = ()) -> Iterator[Keys]:
    for key, value in settings.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from keys_in(value, (*before, key))


def others(key: str, value: Any) -> list[Any]:
    """Other values, of the same type and of other types."""
    found: list[Any] = ["other", 3, [3], {"other": 3}, None]
    if isinstance(value, bool):
        found += [not value]
    elif isinstance(value, int):
        found += [2 * value, value // 2, -1, str(value)]
    elif isinstance(value, list):
        # `targets` gets a name that no module has; other lists get all notations of one module.
        found += [["other"] if key == "targets" else ["re:.*down_proj", "*down_proj", "down_proj"]]
    elif isinstance(value, dict):
        found += [{**value, "other": 3}, {}]
    return [each for each in found if each != value or type(each) is not type(value)]


def changed(settings: dict[str, Any], keys: Keys, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(settings)
    at = result
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return result


def policy_of(directory: Path) -> WeightPolicy:
    section = ModelSection(path=str(directory))
    checkpoint = open_checkpoint(section)
    return choose_weights(section, checkpoint, pack=True, device=CPU, dtype=torch.float32)


def weights_of(directory: Path) -> Tensor:
    module = load(directory)[0].layers[1].mlp  # type: ignore[union-attr]
    experts = getattr(module, "experts", module)
    return experts.down_proj.dense()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)
def test_every_key_changes_the_result_or_is_refused(floats, tmp_path: Path, form: Form) -> None:
    directory = tmp_path / "x"
    write(floats("gpt-oss" if form.method == "mxfp4" else "qwen2"), directory, form)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    settings = config["quantization_config"]
    policy, before = policy_of(directory), weights_of(directory)
    tried = 0
    for keys in [*keys_in(settings), UNKNOWN]:
        for value in others(keys[-1], _at(settings, keys)):
            if WITHOUT_EFFECT & set(keys):
                continue
            wrong = config | {"quantization_config": changed(settings, keys, value)}
            file.write_text(json.dumps(wrong))
            tried += 1
            try:
                is_same = policy_of(directory) == policy or torch.equal(
                    weights_of(directory), before
                )
            except ValueError:
                continue
            was_empty = keys != UNKNOWN and _at(settings, keys) in (None, {})
            is_default = value is None or value in ([], {}) or was_empty
            assert not is_same or is_default or keys[-1] in TOLD_BY_TENSORS, (
                f"{'.'.join(keys)}={value!r} has no effect"
            )
    assert tried > 10


def _at(settings: dict[str, Any], keys: Keys) -> Any:
    value: Any = settings
    for key in keys:
        value = value.get(key)
    return value


def test_every_format_is_tried() -> None:
    assert {form.method for form in FORMS} | {"gptq_v2"} == set(WRITERS)
