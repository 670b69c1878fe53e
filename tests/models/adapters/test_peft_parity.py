"""Base matrix plus product equals the matrix into which PEFT merges the same adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import transformers_weight_conversion
from transformers.pytorch_utils import Conv1D

from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.models.adapters.peft_adapter import read_adapter
from tests.models.adapters.peft_files import (
    MAX_RANK,
    check_merged,
    edit_config,
    edit_tensors,
    load_base,
    matrices,
    save_adapter,
    save_base,
    save_merged,
    small,
)
from tests.models.random_checkpoints import Variant, reference_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
SHARED = ["shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"]
DENSE = [f"0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]

# What differs between families: names, prefixes, row orders, and which matrices are stored merged.
FAMILIES = {
    "llama3": None,
    "phi3": None,  # qkv and gate-up stored merged
    "glm4": None,  # interleaved rotary pairs, gate-up stored merged
    "gpt-neox": None,  # rows by head
    "bloom": None,
    "falcon-7b": None,
    "falcon-40b": None,  # rows by group of heads
    "gptj": None,  # interleaved rotary pairs
    "cohere": None,
    "codegen": None,  # rows by part, and interleaved rotary pairs
    "gpt2": None,  # stored transposed
    "mpt": None,
    "opt": None,
    "phi": None,
    "starcoder2": None,
    "gemma2": None,
    "qwen3-moe-mixed": ATTENTION,
    "mixtral": ATTENTION,
    "gpt-oss": ATTENTION,
    "llama4": [*ATTENTION, "shared_expert.gate_proj", "shared_expert.down_proj"],
    "deepseek-v2": LATENT,
    "deepseek-v3": LATENT,
    "deepseek-v3-yarn": LATENT,  # rotary pairs not interleaved
}


def check(variant: Variant, tmp_path: Path, **settings: Any) -> None:
    adapter = save_adapter(variant, tmp_path / "adapter", **settings)
    model = load_base(save_base(variant, tmp_path / "base"))
    merged = load_base(save_merged(variant, adapter, tmp_path / "merged"))
    read = read_adapter(adapter, model, MAX_RANK)
    assert read.digest == adapter_digest(adapter)
    check_merged(model, read.modules, merged)


@pytest.mark.parametrize(("name", "targets"), FAMILIES.items(), ids=FAMILIES)
def test_a_family(tmp_path: Path, name: str, targets: list[str] | None) -> None:
    check(small(name), tmp_path, target_modules=targets or "all-linear")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3-moe-mixed", [*ATTENTION, *DENSE]),
        ("glm4-moe", [*ATTENTION, *SHARED, *DENSE]),
        ("deepseek-v3", [*LATENT, *SHARED, *DENSE]),
    ],
)
def test_dense_layers_and_shared_experts_beside_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, targets: list[str]
) -> None:
    """With transformers 5, PEFT takes these names for those of experts too. Before, it did not."""
    monkeypatch.setattr(transformers_weight_conversion, "_convert_peft_config_moe", lambda *_: None)
    check(small(name), tmp_path, target_modules=targets)


@pytest.mark.parametrize("name", ["llama3", "gpt2", "phi3", "glm4", "gptj"])
def test_every_matrix_of_a_dense_layer_can_have_an_adapter(tmp_path: Path, name: str) -> None:
    variant = small(name)
    model = load_base(save_base(variant, tmp_path / "base"))
    adapter = save_adapter(variant, tmp_path / "adapter", target_modules="all-linear")
    modules = read_adapter(adapter, model, MAX_RANK).modules
    assert modules.keys() == {each for each in matrices(model) if each.startswith("layers.")}


SETTINGS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1},
    "rank above the matrix's": {"r": 100},
    "fraction as alpha": {"lora_alpha": 2.5},
    "rsLoRA": {"use_rslora": True, "r": 5},
    "some of a merged module": {"target_modules": ["k_proj", "down_proj"]},
    "one of gate and up": {"target_modules": ["up_proj"]},
    "regular expression": {"target_modules": r"model\.layers\.[02]\.self_attn\.[qv]_proj"},
    "whole names": {"target_modules": ["model.layers.1.mlp.up_proj", "0.self_attn.q_proj"]},
    "excluded names": {"exclude_modules": ["v_proj", "model.layers.1.self_attn.q_proj"]},
    "excluded by a regular expression": {"exclude_modules": r".*\.1\..*"},
    "one layer": {"layers_to_transform": 1},
    "layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "no layers stated": {"layers_to_transform": []},
    "ranks": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*_proj": 7, "mlp.up_proj": 3}},
    "a whole name's rank": {"rank_pattern": {"^model.layers.0.self_attn.k_proj": 9}},
    "alphas": {"alpha_pattern": {r".*\.0\..*": 3.5, "v_proj": 11, "q_proj": 0.25}},
    "ranks and alphas with rsLoRA": {
        "use_rslora": True,
        "rank_pattern": {"self_attn.*": 3},
        "alpha_pattern": {"k_proj": 1, "up_proj": 5},
    },
    "patterns that match no module": {"rank_pattern": {"proj": 2}, "alpha_pattern": {"q": 1}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    check(small("llama3"), tmp_path, **{"target_modules": targets, **settings})


def test_layers_of_gpt2(tmp_path: Path) -> None:
    check(
        small("gpt2"),
        tmp_path,
        target_modules=["c_attn", "mlp.c_proj"],
        layers_to_transform=[2],
        layers_pattern=["layers", "h"],
        fan_in_fan_out=True,
    )


def test_b_of_conv1d_is_not_transposed(tmp_path: Path) -> None:
    """PEFT stores [r, in] and [out, r], although GPT-2's matrices are stored as [in, out]."""
    variant = small("gpt2")
    adapter = save_adapter(variant, tmp_path, target_modules=["c_attn"])
    layer = reference_model(variant).transformer.h[0].attn.c_attn
    assert isinstance(layer, Conv1D)
    assert list(layer.weight.shape) == [64, 192]

    def look(tensors: dict[str, torch.Tensor]) -> None:
        name = "base_model.model.transformer.h.0.attn.c_attn.lora_"
        assert list(tensors[f"{name}A.weight"].shape) == [4, 64]
        assert list(tensors[f"{name}B.weight"].shape) == [192, 4]

    edit_tensors(adapter, look)


def test_a_module_without_some_outputs(tmp_path: Path) -> None:
    variant = small("llama3")
    adapter = save_adapter(
        variant,
        tmp_path / "adapter",
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"v_proj": 2},
    )
    model = load_base(save_base(variant, tmp_path / "base"))
    modules = read_adapter(adapter, model, MAX_RANK).modules
    assert modules.keys() == {f"layers.{layer}.self_attn.qkv_proj" for layer in range(3)}
    module = modules["layers.0.self_attn.qkv_proj"]
    assert module.ranks == (4, 0, 2)
    assert module.scales == (1.5, 0.0, 3.0)
    assert list(module.a.shape) == [3, 4, 64]
    assert list(module.b.shape) == [4, 128]
    assert not module.a[1].any()
    assert not module.a[2, 2:].any()
    assert not module.b[:, 64:96].any()  # the keys
    assert not module.b[2:, 96:].any()


def test_one_stored_matrix_gives_all_outputs_the_same_a(tmp_path: Path) -> None:
    variant = small("phi3")
    adapter = save_adapter(variant, tmp_path / "adapter", target_modules=["qkv_proj"])
    model = load_base(save_base(variant, tmp_path / "base"))
    module = read_adapter(adapter, model, MAX_RANK).modules["layers.1.self_attn.qkv_proj"]
    assert module.ranks == (4, 4, 4)
    assert torch.equal(module.a[0], module.a[1])
    assert torch.equal(module.a[0], module.a[2])


def test_other_names_and_files_of_the_same_adapter(tmp_path: Path) -> None:
    """Names with the adapter's own name, names without the model's prefix, and a pickled file."""
    variant = small("llama3")
    adapter = save_adapter(variant, tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    model = load_base(save_base(variant, tmp_path / "base"))
    want = read_adapter(adapter, model, MAX_RANK)

    def rename(old: str, new: str) -> None:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):
                assert old in name
                tensors[name.replace(old, new)] = tensors.pop(name)

        edit_tensors(adapter, edit)

    def check_same() -> None:
        got = read_adapter(adapter, model, MAX_RANK)
        assert got.modules.keys() == want.modules.keys()
        assert got.digest == adapter_digest(adapter) != want.digest
        for name, module in want.modules.items():
            assert torch.equal(got.modules[name].a, module.a)
            assert torch.equal(got.modules[name].b, module.b)
            assert got.modules[name][2:] == module[2:]

    rename(".weight", ".default.weight")
    check_same()
    rename("base_model.model.model.", "base_model.model.")
    check_same()

    def to_pickle(tensors: dict[str, torch.Tensor]) -> None:
        torch.save(dict(tensors), adapter / "adapter_model.bin")

    edit_tensors(adapter, to_pickle)
    (adapter / "adapter_model.safetensors").unlink()
    check_same()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_are_converted_to_the_dtype_of_the_model(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    variant = small("llama3")
    adapter = save_adapter(variant, tmp_path / "adapter", target_modules=["o_proj"])
    model = load_base(save_base(variant, tmp_path / "base"))
    exact = read_adapter(adapter, model, MAX_RANK).modules["layers.2.self_attn.o_proj"]

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    edit_tensors(adapter, convert)
    module = read_adapter(adapter, model, MAX_RANK).modules["layers.2.self_attn.o_proj"]
    assert module.a.dtype == module.b.dtype == torch.float32
    assert torch.equal(module.a, exact.a.to(dtype).float())
    assert torch.equal(module.b, exact.b.to(dtype).float())


def test_the_result_does_not_share_memory_with_the_file(tmp_path: Path) -> None:
    variant = small("llama3")
    adapter = save_adapter(variant, tmp_path / "adapter", target_modules=["o_proj"])
    model = load_base(save_base(variant, tmp_path / "base"))
    module = read_adapter(adapter, model, MAX_RANK).modules["layers.0.self_attn.o_proj"]
    before = module.a.clone(), module.b.clone()
    file = adapter / "adapter_model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
        opened.truncate(8)
    assert torch.equal(module.a, before[0])
    assert torch.equal(module.b, before[1])


def test_the_digest_depends_on_both_files(tmp_path: Path) -> None:
    adapter = save_adapter(small("llama3"), tmp_path, target_modules=["o_proj"])
    digests = {adapter_digest(adapter)}
    edit_config(adapter, lora_alpha=7)
    digests.add(adapter_digest(adapter))
    edit_tensors(adapter, lambda tensors: next(iter(tensors.values())).neg_())
    digests.add(adapter_digest(adapter))
    assert len(digests) == 3
    assert all(len(digest) == 64 for digest in digests)
    assert json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] == 7
