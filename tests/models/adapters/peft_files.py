"""Adapters that PEFT makes for small random models, and what PEFT's merged weights are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.conf.schema import ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.choose_weights import PLAIN
from ostinato.models.layers.adapter_slots import ModuleAdapter
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from tests.models.parity import load
from tests.models.random_checkpoints import VARIANTS, Variant, reference_model

MAX_RANK = 512
TOLERANCE = 1e-5  # float32: PEFT adds the same products in another order


def small(name: str, **settings: object) -> Variant:
    """A variant in one file, with the settings replaced."""
    found = VARIANTS[name].as_one_file()
    return Variant(found.model_type, {**found.settings, **settings}, attention=found.attention)


ONE_LAYER = small("llama3", num_hidden_layers=1)


def save_base(variant: Variant, directory: Path) -> Path:
    """Write the checkpoint of the base model."""
    reference_model(variant).save_pretrained(directory)
    return directory


def save_adapter(variant: Variant, directory: Path, **settings: Any) -> Path:
    """Write a random adapter; `settings` are those of PEFT's LoraConfig."""
    torch.manual_seed(2)
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **settings})
    get_peft_model(reference_model(variant), config).save_pretrained(directory)
    return directory


def save_merged(variant: Variant, adapter: Path, directory: Path) -> Path:
    """Write the checkpoint into which PEFT merges an adapter."""
    model = PeftModel.from_pretrained(reference_model(variant), adapter)
    model.merge_and_unload().save_pretrained(directory)
    return directory


def load_base(directory: Path, shard: Shard = WHOLE) -> CausalLM:
    """Our model of a checkpoint, in float32."""
    model, _ = load(directory, "reference", shard=shard)
    return model


def edit_config(directory: Path, **values: object) -> None:
    """Replace keys of adapter_config.json."""
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of adapter_model.safetensors in place."""
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def product(module: LinearBase, adapter: ModuleAdapter) -> Tensor:
    """What the adapter adds to the module's matrix: [out_features, in_features]."""
    total = torch.zeros(module.out_features, module.in_features)
    first = 0
    for position, number in enumerate(module.stacking):
        rows = slice(first, first + module.outputs[number].size)
        rank = adapter.ranks[position]
        assert not adapter.a[position, rank:].any()
        assert bool(rank) == bool(adapter.scales[position])
        total[rows] = adapter.scales[position] * adapter.b[:, rows].T @ adapter.a[position]
        first = rows.stop
    return total


def matrices(model: CausalLM) -> dict[str, LinearBase]:
    """The modules with a matrix by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, LinearBase)}


def check_merged(model: CausalLM, modules: dict[str, ModuleAdapter], merged: CausalLM) -> None:
    """Check the sum of base matrix and product of every module, and that others do not change."""
    others = matrices(merged)
    assert modules
    assert modules.keys() <= others.keys()
    for name, module in matrices(model).items():
        want = others[name].dense()
        if name not in modules:
            assert torch.equal(module.dense(), want), name
            continue
        added = product(module, modules[name])
        assert added.abs().max() > 100 * TOLERANCE, name
        torch.testing.assert_close(
            module.dense() + added, want, atol=TOLERANCE, rtol=0, msg=lambda text, n=name: n + text
        )


def build(directory: Path, shard: Shard = WHOLE, *, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Our model of a checkpoint, without weights."""
    config = read_model_config(open_checkpoint(ModelSection(path=str(directory))))
    model = build_model(
        config,
        dtype=dtype,
        device=torch.device("cpu"),
        attention_backend="reference",
        weights=PLAIN,
        shard=shard,
    )
    assert isinstance(model, CausalLM)
    return model
