"""Checkpoints of every quantised format against transformers on the weights that they stand for.

The weights are compared bit for bit with the library's formula. The logits are compared twice: with
exact activations through a float model of the loaded weights, and through the kernels, which round
activations to 8 bits.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from ostinato.conf.schema import LoadFormat, ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.quantized_checkpoints.stored_groups import StoredGroups
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from ostinato.models.weight_methods.weight_method import MatrixSpec
from ostinato.ops.quantized import pack_quantized_weight
from tests.models.driver import Driver, Sequence
from tests.models.quantized_checkpoints.format_table import PAGE, row_of, rows_in
from tests.models.quantized_checkpoints.loading import load, matrices
from tests.models.quantized_checkpoints.writers import Form, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(43)]
FORMS = [
    Form("gptq"),
    Form("gptq", symmetric=False),
    Form("gptq", act_order=True),
    Form("gptq", symmetric=False, act_order=True),
    Form("gptq", group=-1),
    Form("gptq", bits=8),
    Form("gptq", bits=8, group=-1, symmetric=False),
    Form("gptq_v2"),
    Form("gptq_v2", symmetric=False),
    Form("awq", symmetric=False),
    Form("auto_round", settings={"packing_format": "auto_round:auto_gptq"}),
    Form("auto_round", symmetric=False, settings={"packing_format": "auto_round:gptqmodel"}),
    Form("auto_round", symmetric=False, settings={"packing_format": "auto_round:auto_awq"}),
    Form("pack_quantized"),
    Form("pack_quantized", symmetric=False),
    Form("pack_quantized", act_order=True),
    Form("pack_quantized", bits=8, group=-1),
    Form("int_quantized", bits=8, group=-1),
    Form("int_quantized", bits=8, symmetric=False),
    Form("float_quantized", bits=8, group=-1),
    Form("float_quantized", bits=8, group=-1, settings={"strategy": "tensor"}),
    Form("float_quantized", bits=8, group=32),
    Form("nvfp4_pack", group=16),
    Form("fp8", bits=8, group=64),
    Form("fp8", bits=8, group=-1),
    Form("modelopt", bits=8, group=-1),
    Form("modelopt", group=16),
]
MXFP4 = Form("mxfp4")  # for the experts of gpt-oss only


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> its float checkpoint."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save(reference_model(VARIANTS[name]), VARIANTS[name].as_one_file(), folder)
        return folder

    return make


@pytest.fixture(autouse=True)
def packed_bytes_are_those_of_the_slow_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares each matrix that a test of this file loads with `slow_twin`, bit for bit."""
    finish = StoredGroups.finish

    def compared(
        method: StoredGroups, tensors: dict[str, Tensor], spec: MatrixSpec
    ) -> dict[str, Tensor]:
        found = finish(method, tensors, spec)
        assert torch.equal(found["weight"], slow_twin(method, tensors, spec, found.get("order")))
        return found

    monkeypatch.setattr(StoredGroups, "finish", compared)


def slow_twin(
    method: StoredGroups, tensors: dict[str, Tensor], spec: MatrixSpec, order: Tensor | None
) -> Tensor:
    """The packed weight, computed from a matrix of bytes and float32 factors."""
    values, *factors = method.unpacked(tensors, spec)
    form = method.form(spec)
    columns = spec.in_features
    size = columns if method.group_size == -1 else method.group_size
    group = torch.arange(0, -(-columns // 8) * 8, form.group_size) // size
    spread = [each.float()[:, group] for each in factors]
    zeros = None if method.symmetric else spread[1]
    values = values if order is None else values.index_select(1, order)
    return pack_quantized_weight(values, spread[0], zeros, form)


def logits_of(model: CausalLM, config: ModelConfig) -> Tensor:
    return Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [16, 20, 7])


def expected_logits(source: Path, restored: dict[str, Tensor], scratch: Path) -> Tensor:
    """The logits that transformers computes with the restored float weights."""
    directory = scratch / "restored"
    directory.mkdir()
    contiguous = {name: value.contiguous() for name, value in restored.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", directory / "config.json")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return reference(torch.tensor([PROMPT])).logits[0]


def float_model(model: CausalLM, directory: Path) -> tuple[CausalLM, ModelConfig]:
    """A model of floats with the weights that a quantised model has loaded."""
    plain, config = load(directory)
    for module, source in zip(matrices(plain).values(), matrices(model).values(), strict=True):
        for part in module.parts():
            module.load("weight", source.dense(), part)
    return plain, config


def measure(form: Form, scratch: Path) -> float:
    """The error of a format's logits through the kernels, relative to transformers."""
    source = scratch / "floats"
    variant = VARIANTS["gpt-oss" if form == MXFP4 else "qwen2"]
    save(reference_model(variant), variant.as_one_file(), source)
    restored = write(source, scratch / "quantised", form)
    expected = expected_logits(source, restored, scratch)
    ours = logits_of(*load(scratch / "quantised"))
    return float((ours - expected).norm() / expected.norm())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)
def test_parity(floats, tmp_path: Path, form: Form) -> None:
    restored = write(floats("qwen2"), tmp_path / "quantised", form)
    model, config = load(tmp_path / "quantised")
    for own, module in matrices(model).items():
        if own.endswith(("o_proj", "down_proj")):
            assert module.method.is_quantized
            assert torch.equal(module.dense(), restored[f"model.{own}.weight"]), own
    qkv = [restored[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(matrices(model)["layers.0.self_attn.qkv_proj"].dense(), torch.cat(qkv))
    expected = expected_logits(floats("qwen2"), restored, tmp_path)
    exact = logits_of(*float_model(model, floats("qwen2")))
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=0)
    ours = logits_of(model, config)
    assert float((ours - expected).norm() / expected.norm()) < 0.06


def test_the_page_lists_these_formats() -> None:
    assert rows_in(PAGE.read_text(encoding="utf-8")) == [row_of(form) for form in (*FORMS, MXFP4)]


def test_experts_of_their_own_tensors(floats, tmp_path: Path) -> None:
    name = "qwen3-moe"
    restored = write(floats(name), tmp_path / "quantised", Form("gptq", symmetric=False))
    model, config = load(tmp_path / "quantised")
    gates = [
        restored[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"] for expert in range(8)
    ]
    experts = matrices(model)["layers.1.mlp.experts.down_proj"]
    assert experts.method.is_quantized
    assert torch.equal(experts.dense(), torch.stack(gates))
    expected = expected_logits(floats(name), restored, tmp_path)
    ours = logits_of(model, config)
    assert float((ours - expected).norm() / expected.norm()) < 0.1


def test_stacked_experts_of_gpt_oss(floats, tmp_path: Path) -> None:
    restored = write(floats("gpt-oss"), tmp_path / "quantised", MXFP4)
    model, config = load(tmp_path / "quantised")
    name = "layers.1.mlp.experts.down_proj"
    assert "floats of 4 bits" in matrices(model)[name].method.name
    expected = restored[f"model.{name}"].transpose(1, 2)
    assert torch.equal(matrices(model)[name].dense(), expected)
    both = restored["model.layers.1.mlp.experts.gate_up_proj"].transpose(1, 2)
    ours = matrices(model)["layers.1.mlp.experts.gate_up_proj"].dense()
    assert torch.equal(ours, torch.cat((both[:, 0::2], both[:, 1::2]), 1))
    logits = expected_logits(floats("gpt-oss"), restored, tmp_path)
    assert float((logits_of(model, config) - logits).norm() / logits.norm()) < 0.1


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("cohere", Form("awq", symmetric=False)),  # rows of queries and keys are reordered
        ("phi3", Form("pack_quantized")),  # q, k and v are stored as one matrix
        ("gpt-neox", Form("gptq", act_order=True)),
    ],
)
def test_families_with_other_layouts(floats, tmp_path: Path, name: str, form: Form) -> None:
    restored = write(floats(name), tmp_path / "quantised", form)
    model, config = load(tmp_path / "quantised")
    assert sum(m.method.is_quantized for m in matrices(model).values()) == 3 * 4
    expected = expected_logits(floats(name), restored, tmp_path)
    ours = logits_of(model, config)
    assert float((ours - expected).norm() / expected.norm()) < 0.06


def test_some_modules_are_floats(floats, tmp_path: Path) -> None:
    form = Form("gptq", settings={"dynamic": {r"-:.*\.1\.mlp\.down_proj": {}}})
    restored = write(floats("qwen2"), tmp_path / "mixed", form, floats=("layers.1.mlp.down_proj",))
    model, _ = load(tmp_path / "mixed")
    found = matrices(model)
    assert not found["layers.1.mlp.down_proj"].method.is_quantized
    assert found["layers.0.mlp.down_proj"].method.is_quantized
    dense = found["layers.1.mlp.down_proj"].dense()
    assert torch.equal(dense, restored["model.layers.1.mlp.down_proj.weight"])
    write(floats("qwen2"), tmp_path / "all", form)
    with pytest.raises(ValueError, match=r"dynamic says that .*down_proj is not quantised, but"):
        load(tmp_path / "all")
    form = Form("gptq")
    write(floats("qwen2"), tmp_path / "half", form, floats=("self_attn.k_proj",))
    with pytest.raises(ValueError, match=r"q_proj and .*k_proj are stacked into one matrix"):
        load(tmp_path / "half")


def test_ranks_hold_whole_groups(floats, tmp_path: Path) -> None:
    form = Form("gptq", group=16, symmetric=False)
    write(floats("qwen2"), tmp_path / "quantised", form)
    whole, _ = load(tmp_path / "quantised")
    parts = [load(tmp_path / "quantised", shard=Shard(rank, 2))[0] for rank in range(2)]
    name = "layers.2.mlp.down_proj"
    joined = torch.cat([matrices(part)[name].dense() for part in parts], 1)
    assert torch.equal(joined, matrices(whole)[name].dense())
    write(floats("qwen2"), tmp_path / "wide", Form("gptq"))
    with pytest.raises(
        ValueError, match=r"96 columns in groups of 32 cannot .* 2 .* ranks; .*tensor to 1 or 3$"
    ):
        load(tmp_path / "wide", shard=Shard(0, 2))
    write(floats("qwen2"), tmp_path / "ordered", Form("gptq", group=16, act_order=True))
    with pytest.raises(ValueError, match=r"act-order: the columns of a group lie apart"):
        load(tmp_path / "ordered", shard=Shard(0, 2))


@pytest.mark.parametrize(
    "form",
    [
        Form("gptq", bits=8, group=-1, symmetric=False),
        Form("awq", group=16, symmetric=False),
        Form("pack_quantized", group=16, symmetric=False),
        Form("int_quantized", bits=8, group=-1),
        Form("float_quantized", bits=8, group=-1),
        Form("fp8", bits=8, group=-1),
        Form("fp8", bits=8, group=-1, settings={"activation_scheme": "static"}),
    ],
    ids=lambda form: form.id,
)
def test_ranks_hold_parts_of_every_packing(floats, tmp_path: Path, form: Form) -> None:
    write(floats("qwen2"), tmp_path / "quantised", form)
    whole, *parts = (
        matrices(load(tmp_path / "quantised", shard=shard)[0])
        for shard in (WHOLE, Shard(0, 2), Shard(1, 2))
    )
    for name, dim in (("layers.2.mlp.down_proj", 1), ("layers.1.mlp.gate_up_proj", 0)):
        joined = torch.cat([part[name].dense() for part in parts], dim)
        if dim == 0:  # each rank has rows of both matrices
            joined = torch.cat([joined.chunk(4)[index] for index in (0, 2, 1, 3)])
        assert torch.equal(joined, whole[name].dense())


def test_dummy_weights(floats, tmp_path: Path) -> None:
    for form in (Form("gptq", act_order=True), Form("awq"), Form("fp8", bits=8, group=32)):
        directory = tmp_path / form.method
        write(floats("qwen2"), directory, form)
        (directory / "model.safetensors").unlink()
        section = ModelSection(path=str(directory), load_format=LoadFormat.dummy)
        checkpoint = open_checkpoint(section)
        weights = choose_weights(
            section, checkpoint, pack=True, device=torch.device("cpu"), dtype=torch.float32
        )
        model = build_model(
            read_model_config(checkpoint),
            dtype=torch.float32,
            device=torch.device("cpu"),
            attention_backend="reference",
            weights=weights,
        )
        init_dummy_weights(model, 3)
        assert isinstance(model, CausalLM)
        assert bool(matrices(model)["layers.0.mlp.down_proj"].dense().isfinite().all())


def test_the_plan_knows_the_sizes(floats, tmp_path: Path) -> None:
    for form in (Form("gptq", act_order=True), Form("nvfp4_pack", group=16)):
        directory = tmp_path / form.method
        write(floats("qwen2"), directory, form)
        model, _ = load(directory)
        for module in matrices(model).values():
            loaded = sum(weight.nbytes for weight in module.weights.values())
            assert loaded == module.method.num_bytes(module.spec)
