"""Writes small quantised checkpoints in the formats of other libraries, from a float checkpoint.

Each writer follows the format's own description and shares no code with the readers. It returns the
stored tensors, and the float32 weights that they stand for by the library's formula.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_SLOTS = [0, 2, 4, 6, 1, 3, 5, 7]
QUANTISED = ("_proj.weight", "dense.weight", "_h.weight", "_4h.weight", "query_key_value.weight")


@dataclass(frozen=True)
class Form:
    """A format with its parameters. docs/quantization.md has a row for each in test_formats.py."""

    method: str  # a key of WRITERS
    bits: int = 4
    group: int = 32  # columns with one scale; -1 = a whole row or matrix
    symmetric: bool = True
    act_order: bool = False
    # Further keys of quantization_config. The key `strategy` is one of its `weights` instead.
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        words = [self.method, f"{self.bits}bit", f"g{self.group}"]
        words += ["sym" if self.symmetric else "asym"] + ["act-order"] * self.act_order
        return "-".join(words)


@dataclass(frozen=True)
class Grid:
    """A matrix as integers, with their scales and zero points."""

    values: Tensor  # [N, K] int64, from 0
    scales: Tensor  # [N, groups] in the stored dtype
    zeros: Tensor  # [N, groups] int64
    groups: Tensor  # [K] the group of each column
    restored: Tensor  # [N, K] float32


def integers(weight: Tensor, form: Form, dtype: torch.dtype = torch.float16) -> Grid:
    """Round a matrix to the nearest integers of each group's grid."""
    rows, columns = weight.shape
    size = columns if form.group == -1 else form.group
    groups = torch.arange(columns) // size
    if form.act_order:
        generator = torch.Generator().manual_seed(columns)
        groups = groups[torch.randperm(columns, generator=generator)]
    most, middle = (1 << form.bits) - 1, 1 << (form.bits - 1)
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group].float()
        if form.symmetric:
            scales.append(part.abs().amax(1) / (middle - 0.5))
            zeros.append(torch.full((rows,), middle))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append((high - low) / most)
            zeros.append((-low / scales[-1]).round().clamp(1, most).long())
    scale, zero = torch.stack(scales, 1).to(dtype), torch.stack(zeros, 1)
    spread_scale, spread_zero = scale.float()[:, groups], zero[:, groups]
    values = (weight.float() / spread_scale + spread_zero).round().clamp(0, most).long()
    return Grid(values, scale, zero, groups, (values - spread_zero) * spread_scale)


def words(values: Tensor, bits: int, slots: list[int] | None = None) -> Tensor:
    """[rows, columns] -> int32 [rows, columns * bits / 32], the first column in the lowest bits.

    With `slots`, position i of a word holds column slots[i] of the word's eight columns.
    """
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    packed = torch.zeros(values.shape[0], padded.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        column = place if slots is None else slots[place]
        packed |= padded[:, column::per_word] << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def gptq(
    name: str, weight: Tensor, form: Form, version: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    grid = integers(weight, form)
    zeros = grid.zeros - (1 if version == 1 else 0)
    tensors = {
        f"{name}.qweight": words(grid.values, form.bits).T.contiguous(),
        f"{name}.qzeros": words(zeros.T.contiguous(), form.bits),
        f"{name}.scales": grid.scales.T.contiguous(),
        f"{name}.g_idx": grid.groups.to(torch.int32),
    }
    return tensors, grid.restored


def gptq_v2(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    return gptq(name, weight, form, version=2)


def auto_round(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    backend = form.settings.get("backend", "")
    packing = form.settings.get("packing_format", backend.removesuffix(":exllamav2"))
    if packing.endswith("awq"):
        return awq(name, weight, form)
    is_version_2 = packing in ("auto_round", "auto_round:gptqmodel")
    tensors, restored = gptq(name, weight, form, version=2 if is_version_2 else 1)
    if not backend:  # early files have it
        del tensors[f"{name}.g_idx"]
    return tensors, restored


def awq(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    grid = integers(weight, form)
    tensors = {
        f"{name}.qweight": words(grid.values.T.contiguous(), 4, AWQ_SLOTS),
        f"{name}.qzeros": words(grid.zeros.T.contiguous(), 4, AWQ_SLOTS),
        f"{name}.scales": grid.scales.T.contiguous(),
    }
    return tensors, grid.restored


def pack_quantized(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    grid = integers(weight, form, torch.bfloat16)
    tensors = {
        f"{name}.weight_packed": words(grid.values, form.bits),
        f"{name}.weight_scale": grid.scales,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }
    if not form.symmetric:
        tensors[f"{name}.weight_zero_point"] = words(
            grid.zeros.T.contiguous(), form.bits
        ).T.contiguous()
    if form.act_order:
        tensors[f"{name}.weight_g_idx"] = grid.groups.to(torch.int32)
    return tensors, grid.restored


def int_quantized(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    grid = integers(weight, form, torch.float32)
    middle = 1 << (form.bits - 1)
    tensors = {
        f"{name}.weight": (grid.values - middle).to(torch.int8),
        f"{name}.weight_scale": grid.scales,
    }
    if not form.symmetric:
        tensors[f"{name}.weight_zero_point"] = (grid.zeros - middle).to(torch.int8)
    return tensors, grid.restored


def _to_float8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit floats and the numbers that they represent; `scale` has the weight's shape."""
    values = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, values.float() * scale


def float8_tensor(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax() / 448
    values, restored = _to_float8(weight, scale.expand(weight.shape))
    shape = () if form.method == "modelopt" else (1,)
    stored = {f"{name}.weight": values, f"{name}.weight_scale": scale.reshape(shape)}
    return stored | {f"{name}.input_scale": torch.ones(shape)}, restored


def float8_channel(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    values, restored = _to_float8(weight, scale.expand(weight.shape))
    return {f"{name}.weight": values, f"{name}.weight_scale": scale}, restored


def float8_block(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    size = form.group
    scale = torch.zeros(-(-rows // size), -(-columns // size))
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = weight[row * size : (row + 1) * size, column * size : (column + 1) * size]
            scale[row, column] = part.abs().amax() / 448
    spread = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
    values, restored = _to_float8(weight, spread)
    suffix = "weight_scale_inv" if form.method == "fp8" else "weight_scale"
    return {f"{name}.weight": values, f"{name}.{suffix}": scale}, restored


FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def to_float4(weight: Tensor, scale: Tensor) -> Tensor:
    """The indices of the nearest numbers in `FLOAT4`."""
    return ((weight / scale)[..., None] - FLOAT4).abs().argmin(-1)


def nvfp4(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    whole = 448 * 6 / weight.abs().amax()
    groups = weight.view(rows, columns // 16, 16)
    scale = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    is_modelopt = form.method == "modelopt"
    factor = (1 / whole).float()
    used = scale.float() * factor if is_modelopt else scale.float() / whole
    spread = used.repeat_interleave(16, 1)
    indices = to_float4(weight, spread)
    packed = (indices[:, 0::2] | indices[:, 1::2] << 4).to(torch.uint8)
    stored = {f"{name}.weight_scale": scale}
    if is_modelopt:
        stored |= {f"{name}.weight": packed, f"{name}.weight_scale_2": factor}
    else:
        stored |= {
            f"{name}.weight_packed": packed,
            f"{name}.weight_global_scale": whole.reshape(1),
        }
    return stored, FLOAT4[indices] * spread


def modelopt(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    return (nvfp4 if form.bits == 4 else float8_tensor)(name, weight, form)


def float_quantized(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    if form.group > 0:
        return float8_block(name, weight, form)
    is_tensor = form.settings.get("strategy") == "tensor"
    return (float8_tensor if is_tensor else float8_channel)(name, weight, form)


def fp8(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    if form.group > 0:
        return float8_block(name, weight, form)
    tensors, restored = float8_tensor(name, weight, form)
    if form.settings.get("activation_scheme") == "static":  # names and shapes of transformers
        names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
        for before, after in names.items():
            tensors[f"{name}.{after}"] = tensors.pop(f"{name}.{before}").reshape(())
    return tensors, restored


def mxfp4(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """The experts of gpt-oss; `weight` is [experts, in, out]."""
    rows = weight.transpose(1, 2)
    groups = rows.reshape(*rows.shape[:2], -1, 32)
    exponent = (groups.abs().amax(3) / 6).log2().ceil()
    scale = torch.exp2(exponent)[..., None]
    indices = to_float4(groups, scale)
    tensors = {
        f"{name}_blocks": (indices[..., 0::2] | indices[..., 1::2] << 4).to(torch.uint8),
        f"{name}_scales": (exponent + 127).to(torch.uint8),
    }
    restored = (FLOAT4[indices] * scale).reshape(rows.shape)
    return tensors, restored.transpose(1, 2).contiguous()


def _mxfp4_config(form: Form) -> dict[str, Any]:
    return {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }


def _fp8_config(form: Form) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [form.group, form.group] if form.group > 0 else None,
        "modules_to_not_convert": ["lm_head"],
    }


def _modelopt_config(form: Form) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quantization": {
            "quant_algo": "NVFP4" if form.bits == 4 else "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
            **({"group_size": 16} if form.bits == 4 else {}),
        },
    }


def _compressed_float_config(form: Form) -> dict[str, Any]:
    strategy = "block" if form.group > 16 else form.settings.get("strategy", "channel")
    weights = {
        "num_bits": form.bits,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group" if form.bits == 4 else strategy,
        "group_size": 16 if form.bits == 4 else None,
        "block_structure": [form.group, form.group] if strategy == "block" else None,
        "dynamic": False,
    }
    inputs = {"num_bits": form.bits, "type": "float", "strategy": "token", "dynamic": True}
    form_name = "nvfp4-pack-quantized" if form.bits == 4 else "float-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _gptq_config(form: Form) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": form.bits,
        "group_size": form.group,
        "sym": form.symmetric,
        "desc_act": form.act_order,
        "checkpoint_format": form.method,
        "lm_head": False,
        "damp_percent": 0.01,
        "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:4.0.0"]},
    }


def _awq_config(form: Form) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": form.group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def _auto_round_config(form: Form) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": form.bits,
        "group_size": form.group,
        "sym": form.symmetric,
        "data_type": "int",
        "iters": 200,
        "autoround_version": "0.9.0",
    }


def _compressed_config(form: Form) -> dict[str, Any]:
    weights = {
        "num_bits": form.bits,
        "type": "int",
        "symmetric": form.symmetric,
        "strategy": "channel" if form.group == -1 else "group",
        "group_size": None if form.group == -1 else form.group,
        "actorder": "group" if form.act_order else None,
        "dynamic": False,
        "observer": "minmax",
    }
    is_packed = form.method == "pack_quantized"
    inputs = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if is_packed else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None if is_packed else inputs,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
    }


Writer = Callable[[str, Tensor, Form], tuple[dict[str, Tensor], Tensor]]
WRITERS: dict[str, tuple[Writer, Callable[[Form], dict[str, Any]]]] = {
    "gptq": (gptq, _gptq_config),
    "gptq_v2": (gptq_v2, _gptq_config),
    "awq": (awq, _awq_config),
    "auto_round": (auto_round, _auto_round_config),
    "pack_quantized": (pack_quantized, _compressed_config),
    "int_quantized": (int_quantized, _compressed_config),
    "float_quantized": (float_quantized, _compressed_float_config),
    "nvfp4_pack": (nvfp4, _compressed_float_config),
    "fp8": (fp8, _fp8_config),
    "modelopt": (modelopt, _modelopt_config),
    "mxfp4": (mxfp4, _mxfp4_config),
}


def write(
    source: Path,
    target: Path,
    form: Form,
    *,
    floats: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Write `source` to the new directory `target`, quantised.

    Args:
        floats: parts of names of modules that are not quantised, besides embeddings and the head.
        dtype: the dtype of the tensors that are not quantised.

    Returns:
        The float weights that the checkpoint stands for, by their names in `source`.
    """
    target.mkdir()
    writer, settings = WRITERS[form.method]
    stored: dict[str, Tensor] = {}
    restored: dict[str, Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        is_float = any(part in name for part in ("embed", "lm_head", *floats))
        if form.method == "mxfp4":
            is_float = value.dim() != 3
        if is_float or value.dim() == 1 or not name.endswith((*QUANTISED, "_proj")):
            stored[name] = restored[name] = value.to(dtype)
            continue
        tensors, restored[name] = writer(name.removesuffix(".weight"), value, form)
        stored.update(tensors)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {**settings(form), **_further(form)}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return restored


def _further(form: Form) -> dict[str, Any]:
    return {key: value for key, value in form.settings.items() if key != "strategy"}


def edit(directory: Path, **keys: Any) -> None:
    """Replace keys of a checkpoint's quantization_config."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= keys
    file.write_text(json.dumps(config))
