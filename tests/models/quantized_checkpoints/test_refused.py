"""Damaged quantised checkpoints, and settings that contradict the tensors or have no kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.conf.schema import ModelSection, Quantization
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ostinato.models.choose_weights import choose_weights
from ostinato.models.quantized_checkpoints.packed_integers import PackedIntegers
from ostinato.models.sharding import Span
from ostinato.models.weight_methods.weight_method import Part
from tests.models.quantized_checkpoints.loading import load
from tests.models.quantized_checkpoints.writers import Form, edit, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    return save(reference_model(VARIANTS["qwen2"]), VARIANTS["qwen2"].as_one_file(), folder)


@pytest.fixture
def written(floats: Path, tmp_path: Path) -> Callable[[Form], Path]:
    """A function that writes a checkpoint of a form and returns its directory."""

    def make(form: Form) -> Path:
        write(floats, tmp_path / form.id, form)
        return tmp_path / form.id

    return make


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of layer 1's down_proj; None removes one."""
    file = directory / "model.safetensors"
    stored = load_file(file)
    for kind, value in tensors.items():
        stored.pop(f"{DOWN}.{kind}", None)
        if value is not None:
            stored[f"{DOWN}.{kind}"] = value.contiguous()
    save_file(stored, file)


def tensor(directory: Path, kind: str) -> Tensor:
    return load_file(directory / "model.safetensors")[f"{DOWN}.{kind}"]


def test_truncated_zero_points(written: Callable[[Form], Path]) -> None:
    directory = written(Form("gptq", symmetric=False))
    change(directory, qzeros=tensor(directory, "qzeros")[:-1])
    with pytest.raises(
        CheckpointError, match=r"qzeros has shape \[2, 8\], but the configuration needs \[3, 8"
    ):
        load(directory)
    change(directory, qzeros=None)
    with pytest.raises(CheckpointError, match=f"lacks tensor {DOWN}.qzeros"):
        load(directory)


def test_shapes_and_settings_at_odds(written: Callable[[Form], Path]) -> None:
    directory = written(Form("gptq"))
    edit(directory, group_size=64)
    with pytest.raises(
        CheckpointError, match=r"qzeros has shape \[3, 8\], but the configuration needs \[2, 8"
    ):
        load(directory)
    edit(directory, group_size=32, bits=8)
    with pytest.raises(
        CheckpointError, match=r"qweight has shape \[12, .*the configuration needs \[24"
    ):
        load(directory)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (Form("gptq"), "scales"),
        (Form("awq", symmetric=False), "scales"),
        (Form("pack_quantized"), "weight_scale"),
        (Form("fp8", bits=8, group=64), "weight_scale_inv"),
        (Form("modelopt", group=16), "weight_scale_2"),
    ],
    ids=lambda value: value.id if isinstance(value, Form) else str(value),
)
def test_scales_that_are_infinite_or_zero(
    written: Callable[[Form], Path], form: Form, kind: str, bad: float
) -> None:
    directory = written(form)
    scales = tensor(directory, kind).clone()
    scales.view(-1)[0] = bad
    change(directory, **{kind: scales})
    with pytest.raises(CheckpointError, match=f"{kind}.* finite and not zero"):
        load(directory)


def test_weights_that_are_nan(written: Callable[[Form], Path]) -> None:
    directory = written(Form("fp8", bits=8, group=64))
    values = tensor(directory, "weight").view(torch.uint8).clone()
    values[0, 0] = 0xFF
    change(directory, weight=values.view(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match="weight: a weight is NaN; the file is damaged"):
        load(directory)


def test_symmetric_weights_with_other_zero_points(written: Callable[[Form], Path]) -> None:
    directory = written(Form("gptq", symmetric=False))
    edit(directory, sym=True)
    with pytest.raises(CheckpointError, match="qzeros: the zero points are not all 7 or all 8"):
        load(directory)


def test_an_order_that_the_settings_deny(written: Callable[[Form], Path]) -> None:
    directory = written(Form("gptq", act_order=True))
    edit(directory, desc_act=False)
    with pytest.raises(CheckpointError, match="desc_act is false; set model"):
        load(directory)
    edit(directory, desc_act=True)
    change(directory, g_idx=torch.zeros(96, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="must put 32 columns in each group"):
        load(directory)


def test_stacked_matrices_with_different_orders(written: Callable[[Form], Path]) -> None:
    directory = written(Form("gptq", act_order=True))
    file = directory / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    stored[name] = stored[name].flip(0).contiguous()
    save_file(stored, file)
    with pytest.raises(CheckpointError, match="g_idx orders the columns of the stacked matrices"):
        load(directory)


def test_two_quantizations_at_once(written: Callable[[Form], Path]) -> None:
    directory = written(Form("gptq"))
    change(directory, weight_packed=torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"tensors of two quantizations.*qweight.*weight_packed"):
        load(directory)
    change(directory, weight_packed=None)
    (directory / "quant_config.json").write_text(json.dumps({"w_bit": 4}))
    with pytest.raises(CheckpointError, match=r"config.json says 'gptq', quant_config.json says"):
        load(directory)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (
            Form("auto_round", settings={"packing_format": "auto_round:auto_gptq"}),
            "intel/auto-round",
        ),
        (Form("modelopt", group=16), "modelopt_fp4"),  # vLLM's name for its 4-bit floats
    ],
)
def test_another_name_of_a_method(written: Callable[[Form], Path], form: Form, name: str) -> None:
    directory = written(form)
    expected = load(directory)[0].state_dict()
    edit(directory, quant_method=name)
    if name == "modelopt_fp4":  # ModelOpt writes a file beside config.json too
        stated = json.loads((directory / "config.json").read_text())["quantization_config"]
        (directory / "hf_quant_config.json").write_text(json.dumps(stated))
    assert all(map(torch.equal, load(directory)[0].state_dict().values(), expected.values()))


def test_a_setting_of_a_file_of_its_own(written: Callable[[Form], Path]) -> None:
    directory = written(Form("gptq"))
    file = directory / "config.json"
    config = json.loads(file.read_text())
    stated = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    del stated["quant_method"]
    (directory / "quantize_config.json").write_text(json.dumps(stated))
    model, _ = load(directory)
    assert model.get_submodule("layers.1.mlp.down_proj").method.is_quantized  # type: ignore[union-attr]


def _float_blocks(block_structure: object) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": "block"}
    weights |= {"block_structure": block_structure}
    group = {"targets": ["Linear"], "format": "float-quantized", "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def stated(settings: dict[str, Any]) -> Checkpoint:
    return Checkpoint(path=None, hf_config={"quantization_config": settings}, generation_config={})


def test_quantising_again_is_refused(written: Callable[[Form], Path]) -> None:
    directory = written(Form("gptq"))
    section = ModelSection(path=str(directory), quantization=Quantization.int8)
    with pytest.raises(ValueError, match=r"model.quantization=int8, but the checkpoint is quan"):
        choose_weights(
            section, open_checkpoint(section), pack=True, device=CPU, dtype=torch.float32
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits is 3: there is no kernel .* use a checkpoint"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; use the unquantized"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; supported: "),
        ({"quant_method": "gptq", "bits": 4}, "group_size is missing"),
        ({"quant_method": "fp8", "weight_block_size": [100, 100]}, "weight_block_size is .100"),
        ({"quant_method": "quark"}, "quant_method='quark' is not supported"),
        (_float_blocks([128]), "block_structure is .128.; it must be two of 32"),
        (_float_blocks("128xwide"), "block_structure is '128xwide'; it must be two of 32"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_formats_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_weights(ModelSection(), stated(settings), pack=True, device=CPU, dtype=torch.float32)


def test_integers_of_more_than_4_bits_are_refused() -> None:
    method = PackedIntegers(bits=4, group_size=-1, symmetric=True, is_packed=False)
    part = Part(0, 1, (1, 2), slice(0, 1), Span.of(2), 0, 1)
    values = torch.tensor([[-8, 7]], dtype=torch.int8)
    assert method.checked("weight", values, part)[1] is values
    for wrong in (-128, -9, 8, 127):
        with pytest.raises(ValueError, match="does not fit into 4 bits"):
            method.checked("weight", torch.tensor([[0, wrong]], dtype=torch.int8), part)


def test_devices_without_kernels_are_refused(floats: Path, tmp_path: Path) -> None:
    write(floats, tmp_path / "x", Form("gptq"))
    with pytest.raises(ValueError, match=r"quantised .*its kernels take activations in float32 or"):
        load(tmp_path / "x", dtype=torch.float16)
