"""Every key of PEFT's LoraConfig changes the result, is refused, or has no effect in PEFT either."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import Tensor

from ostinato.models.adapters.adapter_config import (
    HONOURED,
    IGNORED,
    REFUSED,
    read_adapter_config,
)
from ostinato.models.adapters.adapter_files import AdapterError
from ostinato.models.adapters.peft_adapter import read_adapter
from ostinato.models.base import CausalLM
from tests.models.adapters.peft_files import (
    MAX_RANK,
    edit_config,
    load_base,
    matrices,
    product,
    save_adapter,
    save_base,
    small,
)
from tests.models.random_checkpoints import reference_model

VARIANT = small("llama3")
TARGETS = ["q_proj", "v_proj", "down_proj"]

# Key -> another value, and how it changes the result ("" = the scales of modules change).
CHANGES: dict[str, tuple[Any, str]] = {
    "alpha_pattern": ({"q_proj": 2.5}, ""),
    "lora_alpha": (7.5, ""),
    "use_rslora": (True, ""),
    "r": (3, r"must have shape \[3, 96\], by the rank in adapter_config.json"),
    "rank_pattern": ({"v_proj": 3}, r"must have shape \[3, 64\], by the rank"),
    "target_modules": (["q_proj", "v_proj"], r"tensors of model\.layers\.0\.mlp\.down_proj, a mod"),
    "exclude_modules": (r".*\.2\..*\.q_proj", r"tensors of model\.layers\.2\.self_attn\.q_proj, a"),
    "layers_to_transform": ([0, 1], r"tensors of model\.layers\.2\.mlp\.down_proj, a module that"),
    "layers_pattern": ("h", "layers_pattern must be null, because layers_to_transform is null"),
    "init_lora_weights": ("pissa_niter_4", "init_lora_weights must be true, false, gaussian, eva,"),
    "peft_type": ("LOHA", "peft_type must be 'LORA', got 'LOHA'; train a plain LoRA adapter"),
    "bias": ("lora_only", r"bias must be 'none' \(trained biases are not supported\), got 'lora_o"),
}

SAME: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "LlamaModel", "parent_library": "transformers"},
    "base_model_name_or_path": "someone/another-model",
    "inference_mode": False,
    "peft_version": "0.9.0",
    "revision": "main",
    "runtime_config": {"ephemeral_gpu_offload": True},
    "task_type": "CAUSAL_LM",
    "lora_dropout": 0.5,
    "merge_weights": True,
    "corda_config": {"corda_method": "kpm"},
    "eva_config": {"rho": 2.5},
    "loftq_config": {"loftq_bits": 4},
    "lora_ga_config": {"direction": "ArBr"},
    "megatron_core": "another.core",
    "qalora_group_size": 4,
    "fan_in_fan_out": True,
    "ensure_weight_tying": True,
}

OTHERS: dict[str, Any] = {
    "alora_invocation_tokens": [3, 4],
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1.0},
    "layer_replication": [[0, 2], [1, 3]],
    "lora_bias": True,
    "megatron_config": {"tensor_model_parallel_size": 2},
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"num_samples": 4},
    "target_parameters": ["experts.down_proj"],
    "trainable_token_indices": [1, 2],
    "use_bdlora": {"nblocks": 2},
    "use_dora": True,
    "use_qalora": True,
    "velora_config": {"num_groups": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_base(save_base(VARIANT, tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(VARIANT, tmp_path_factory.mktemp("adapter"), target_modules=TARGETS)


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


def products(directory: Path, model: CausalLM) -> dict[str, Tensor]:
    """What the adapter adds to each matrix."""
    found = read_adapter(directory, model, MAX_RANK).modules
    modules = matrices(model)
    return {name: product(modules[name], module) for name, module in found.items()}


def merged_by_peft(directory: Path) -> dict[str, Tensor]:
    model = PeftModel.from_pretrained(reference_model(VARIANT), directory)
    return model.merge_and_unload().state_dict()


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_every_key_has_one_class() -> None:
    keys = [field.name for field in fields(LoraConfig)]
    assert len(keys) > 35
    assert [
        key for key in keys if (key in HONOURED) + (key in IGNORED) + (key in REFUSED) != 1
    ] == []
    assert {*HONOURED, *IGNORED, *REFUSED} - set(keys) == {"merge_weights"}, (
        "keys of older versions"
    )
    assert (CHANGES.keys(), SAME.keys(), OTHERS.keys()) == (HONOURED, IGNORED, REFUSED.keys())


def test_all_defaults_of_peft_are_accepted() -> None:
    stated = LoraConfig(target_modules=["q_proj"]).to_dict()
    stated = {
        key: list(value) if isinstance(value, set) else value for key, value in stated.items()
    }
    read = read_adapter_config(json.dumps(stated).encode(), Path("adapter_config.json"))
    assert read == read_adapter_config(
        b'{"peft_type": "LORA", "target_modules": ["q_proj"]}', Path("adapter_config.json")
    )
    assert (read.rank, read.alpha, read.uses_rslora) == (8, 8.0, False)


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_changes_the_result(adapter: Path, model: CausalLM, key: str) -> None:
    before = products(adapter, model), merged_by_peft(adapter)
    value, message = CHANGES[key]
    edit_config(adapter, **{key: value})
    if message:
        with pytest.raises(AdapterError, match=message):
            read_adapter(adapter, model, MAX_RANK)
        return
    after = products(adapter, model)
    assert not equal(before[0], after)
    theirs = merged_by_peft(adapter)
    for layer in range(3):
        name = f"layers.{layer}.mlp.down_proj"
        stored = f"model.{name}.weight"
        torch.testing.assert_close(
            after[name] - before[0][name], theirs[stored] - before[1][stored], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("key", SAME)
def test_a_key_without_effect(adapter: Path, model: CausalLM, key: str) -> None:
    before = products(adapter, model), merged_by_peft(adapter)
    edit_config(adapter, **{key: SAME[key]})
    assert equal(before[0], products(adapter, model))
    assert equal(before[1], merged_by_peft(adapter)), "it has an effect in PEFT"


@pytest.mark.parametrize("key", OTHERS)
def test_a_refused_key(adapter: Path, model: CausalLM, key: str) -> None:
    edit_config(adapter, **{key: OTHERS[key]})
    with pytest.raises(AdapterError) as refused:
        read_adapter(adapter, model, MAX_RANK)
    meaning, remedy = REFUSED[key]
    start = (
        f"{adapter}/adapter_config.json: {key} must be null, false or empty ({meaning} is not sup"
    )
    assert str(refused.value).startswith(start)
    assert str(refused.value).endswith(remedy)


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_an_unknown_key_that_is_off(adapter: Path, model: CausalLM, value: object) -> None:
    before = products(adapter, model)
    edit_config(adapter, use_something_new=value)
    assert equal(before, products(adapter, model))


@pytest.mark.parametrize("value", [True, 0, "x", [0], {"a": None}])
def test_an_unknown_key_that_is_on(adapter: Path, model: CausalLM, value: object) -> None:
    edit_config(adapter, use_something_new=value)
    with pytest.raises(AdapterError, match="'use_something_new' must be null, false or empty, bec"):
        read_adapter(adapter, model, MAX_RANK)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_model(
    adapter: Path, model: CausalLM, init: object
) -> None:
    before = products(adapter, model)
    edit_config(adapter, init_lora_weights=init)
    assert equal(before, products(adapter, model))


@pytest.mark.parametrize("init", ["pissa", "olora", "OLoRA", "corda", "loftq", "lora_ga", 1.5, []])
def test_initialisations_that_change_the_base_model(
    adapter: Path, model: CausalLM, init: object
) -> None:
    edit_config(adapter, init_lora_weights=init)
    with pytest.raises(AdapterError, match=r"init_lora_weights must be .* which writes a plain ad"):
        read_adapter(adapter, model, MAX_RANK)


NAMES = st.builds(
    "{}{}.{}.{}".format,
    st.sampled_from(["model.layers.", "layers.", "h.", ""]),
    st.sampled_from([0, 1, 12]),
    st.sampled_from(["self_attn", "mlp", "mlp.experts.3", "layers.0.attn"]),
    st.sampled_from(["q_proj", "kq_proj", "proj", "up_proj"]),
)
ENDS = ["q_proj", "kq_proj", "proj", "up_proj"]
EXPRESSIONS = st.one_of(
    st.sampled_from(
        [*ENDS, ".*", ".*q_proj", r".*\.1\..*", "mlp.*", "model.*mlp", "^q", "q|up_proj"]
    ),
    NAMES,
)
ANYWHERE = {
    "exclude_modules": st.one_of(EXPRESSIONS, st.lists(EXPRESSIONS)),
    "rank_pattern": st.dictionaries(EXPRESSIONS, st.integers(1, 9)),
    "alpha_pattern": st.dictionaries(EXPRESSIONS, st.floats(-9, 9)),
    "use_rslora": st.booleans(),
}
LAYERS = st.one_of(st.integers(0, 3), st.lists(st.sampled_from([0, 1, 3, 12]), min_size=1))
CONFIGS = st.one_of(
    st.fixed_dictionaries({"target_modules": EXPRESSIONS}, optional=ANYWHERE),
    st.fixed_dictionaries(
        {"target_modules": st.lists(EXPRESSIONS, min_size=2)},
        optional={**ANYWHERE, "layers_to_transform": st.one_of(LAYERS, st.just([]))},
    ),
    st.fixed_dictionaries(
        {
            "target_modules": st.just(ENDS),
            "layers_to_transform": LAYERS,
            "layers_pattern": st.one_of(
                st.sampled_from(["layers", "h", ""]), st.lists(st.sampled_from(["h", "layers"]))
            ),
        },
        optional=ANYWHERE,
    ),
)


@settings(max_examples=200, deadline=None)
@given(stated=CONFIGS, name=NAMES)
@example(  # the first number is the layer's
    stated={"target_modules": ["q_proj"], "layers_to_transform": 1},
    name="model.layers.1.mlp.experts.3.q_proj",
)
@example(  # a number needs two names before it
    stated={"target_modules": ["q_proj"], "layers_to_transform": 1}, name="layers.1.mlp.q_proj"
)
@example(  # a whole name is chosen in every layer
    stated={"target_modules": ["model.layers.1.mlp.q_proj"], "layers_to_transform": 0},
    name="model.layers.1.mlp.q_proj",
)
@example(stated={"target_modules": "model.*mlp"}, name="model.layers.0.mlp.q_proj")
@example(
    stated={"target_modules": ".*", "exclude_modules": "model.*mlp"},
    name="model.layers.0.mlp.q_proj",
)
@example(stated={"target_modules": ".*", "exclude_modules": ["proj"]}, name="h.0.mlp.q_proj")
def test_names_are_matched_as_in_peft(stated: dict[str, Any], name: str) -> None:
    content = json.dumps({"peft_type": "LORA", **stated}).encode()
    ours = read_adapter_config(content, Path("adapter_config.json"))
    theirs = LoraConfig(**stated)
    rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, name), theirs.r)
    alpha = theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern, name), theirs.lora_alpha)
    assert ours.rank_of(name) == rank
    assert ours.scale_of(name) == pytest.approx(alpha / (rank**0.5 if theirs.use_rslora else rank))
    assert ours.has_target(name) == bool(check_target_module_exists(theirs, name))


@pytest.mark.parametrize("stated", ["all-linear", "All-Linear"])
def test_all_linear_chooses_every_module_that_is_not_excluded(stated: str) -> None:
    content = {"peft_type": "LORA", "target_modules": stated, "exclude_modules": ["q_proj"]}
    config = read_adapter_config(json.dumps(content).encode(), Path("adapter_config.json"))
    assert config.has_target("model.layers.0.mlp.up_proj")
    assert not config.has_target("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("key", ["layers_to_transform", "layers_pattern"])
def test_layers_with_a_regular_expression(key: str) -> None:
    """PEFT refuses them too."""
    stated = {"target_modules": "q_proj", key: [1] if key == "layers_to_transform" else ["h"]}
    with pytest.raises(ValueError, match=f"`{key}` cannot be used when `target_modules` is a str"):
        LoraConfig(**stated)
    with pytest.raises(AdapterError, match=f"{key} must be null, because"):
        read_adapter_config(
            json.dumps({"peft_type": "LORA", **stated}).encode(), Path("adapter_config.json")
        )
