"""Reads a low-rank adapter in PEFT's format (LoRA, arXiv:2106.09685) for a model.

A file has two matrices for each adapted matrix W [N, K] of transformers: A [r, K] and B [N, r]. The
adapted module computes `x W^T + scale * (x A^T) B^T`. A module of this project can stack several of
these matrices, can have their rows in another order, and can hold a part of them
(`matrix_parts`, models/checkpoints/slots.py). The rows of B are cut and ordered like those of W,
and the columns of A like those of W.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.models.adapters.adapter_config import AdapterConfig, read_adapter_config
from ostinato.models.adapters.adapter_files import (
    AdapterError,
    digest_of_parts,
    find_adapter_files,
)
from ostinato.models.adapters.adapter_tensors import parse_tensors, read_bytes, sha256_of
from ostinato.models.adapters.targets import Target, Targets
from ostinato.models.base import LanguageModel
from ostinato.models.layers.adapter_slots import ModuleAdapter
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.weight_methods.weight_method import IN, OUT, Axis, StoredTensor

__all__ = ("Adapter", "read_adapter")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_CONFIG_BYTES = 1 << 24  # names of thousands of modules have a tenth of this
_PREFIX = "base_model.model."
# With or without the name that the adapter had in the program that trained it.
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
# Parts of the names of tensors that are not supported -> what they are.
_OTHER_TENSORS = (
    ("lora_embedding_", "is part of an adapter of an embedding, which is not supported"),
    ("lora_magnitude_vector", "is part of DoRA, which is not supported"),
    (".bias", "is a bias, which is not supported"),
    (".lora_", "is part of a variant of LoRA that is not supported"),
)


class Adapter(NamedTuple):
    """An adapter, as far as it belongs to the modules of this rank."""

    modules: dict[str, ModuleAdapter]  # by the module's name in `model.named_modules()`
    digest: str  # of what was read, as `adapter_digest` gives it


@dataclass(slots=True)
class _Pair:
    """The two matrices of one stored module."""

    module: str  # the module's name in transformers
    names: dict[str, str] = field(default_factory=dict)  # "A" and "B" -> name of the tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def read_adapter(directory: Path, model: LanguageModel, max_rank: int) -> Adapter:
    """Read the adapter in a directory.

    In a pipeline, the modules of other stages are skipped.

    Args:
        directory: has adapter_config.json, and adapter_model.safetensors or adapter_model.bin.
        model: the model of this rank, with any weights.
        max_rank: the largest rank that is accepted.

    Returns:
        Tensors on the CPU that do not share memory with files.

    Raises:
        AdapterError: a file is missing or broken, or the adapter does not fit the model.
    """
    files = find_adapter_files(directory)
    stated, content = read_bytes(files.config, _MOST_CONFIG_BYTES), read_bytes(files.weights)
    digest = digest_of_parts(sha256_of(stated), sha256_of(content))
    config = read_adapter_config(stated.numpy().tobytes(), files.config)
    targets = Targets(model)
    pairs = _pairs(parse_tensors(content, files.weights), targets, files.weights)
    found: defaultdict[str, dict[int, _Pair]] = defaultdict(dict)
    for bare, pair in pairs.items():
        _check_names(pair, config, files.weights)
        _check_rank(pair, config, max_rank)
        target = targets.found.get(bare)
        if target is not None:
            _check_tensors(pair, target, config, files.weights)
            found[target.name][target.part.index] = pair
        elif not targets.is_elsewhere(bare):
            why = targets.why_missing(bare)
            raise AdapterError(f"{files.weights}: module {pair.module} {why}")
    parts: defaultdict[str, list[Target]] = defaultdict(list)
    for target in targets.found.values():
        parts[target.name].append(target)
    modules = {name: _assemble(parts[name], of_module, config) for name, of_module in found.items()}
    return Adapter(modules, digest)


def _pairs(tensors: Iterable[tuple[str, Tensor]], targets: Targets, file: Path) -> dict[str, _Pair]:
    """The stored modules that have tensors, by their names without prefix."""
    pairs: dict[str, _Pair] = {}
    for name, tensor in tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"{file}: tensor {name} {_why_unknown(name)}")
        module, side = match.groups()
        pair = pairs.setdefault(targets.bare_name(module), _Pair(module))
        if side in pair.names:
            raise AdapterError(
                f"{file}: tensor {name} is stored twice, also as {pair.names[side]}; remove one"
            )
        pair.names[side], pair.tensors[side] = name, tensor
    if not pairs:
        raise AdapterError(f"{file} has no tensors; copy the file again")
    return pairs


def _why_unknown(name: str) -> str:
    if not name.startswith(_PREFIX):
        return f"must begin with {_PREFIX}, as PEFT's save_pretrained names it; rename it"
    for part, what in _OTHER_TENSORS:
        if part in name:
            return f"{what}; merge the adapter into the model with PEFT's merge_and_unload"
    return (
        "is neither lora_A.weight nor lora_B.weight of a module; merge the adapter into the model "
        "with PEFT's merge_and_unload, or remove the tensor"
    )


def _check_names(pair: _Pair, config: AdapterConfig, file: Path) -> None:
    for side, other in ("AB", "BA"):
        if side not in pair.names:
            raise AdapterError(
                f"{file}: module {pair.module} has {pair.names[other]} but no lora_{side}.weight; "
                "copy the file again"
            )
    if not config.has_target(pair.module):
        raise AdapterError(
            f"{file} has tensors of {pair.module}, a module that target_modules, exclude_modules "
            f"and layers_to_transform of {config.file.name} do not choose; correct these keys or "
            "remove the tensors"
        )


def _check_rank(pair: _Pair, config: AdapterConfig, max_rank: int) -> None:
    rank = config.rank_of(pair.module)
    if rank <= max_rank:
        return
    allowed: tuple[int, ...] = LoraConfig.settings()["max_rank"][1]["one_of"]
    larger = [each for each in allowed if each >= rank]
    remedy = (
        f"set lora.max_rank={min(larger)}"
        if larger
        else f"the largest lora.max_rank is {max(allowed)}, so merge the adapter into the model "
        "with PEFT's merge_and_unload"
    )
    raise AdapterError(
        f"{config.file}: the rank of {pair.module} must be at most lora.max_rank={max_rank}, got "
        f"{rank}; {remedy}"
    )


def _check_tensors(pair: _Pair, target: Target, config: AdapterConfig, file: Path) -> None:
    """Check dtypes, shapes and values.

    The whole matrices are checked, so all ranks of a tensor-parallel group find the same errors.
    """
    rows, columns = target.part.stored
    rank = config.rank_of(pair.module)
    for side, shape in (("A", [rank, columns]), ("B", [rows, rank])):
        name, tensor = pair.names[side], pair.tensors[side]
        if tensor.dtype not in _DTYPES:
            allowed = " or ".join(str(dtype) for dtype in _DTYPES)
            raise AdapterError(
                f"{file}: tensor {name} must have dtype {allowed}, got {tensor.dtype}; convert it"
            )
        if list(tensor.shape) != shape:
            raise AdapterError(
                f"{file}: tensor {name} must have shape {shape}, by the rank in {config.file.name} "
                f"and the model's matrix, got {list(tensor.shape)}; take an adapter that was "
                "trained on this model"
            )
        dtype = target.module.spec.dtype
        if not torch.isfinite(tensor.to(dtype)).all():
            raise AdapterError(
                f"{file}: tensor {name} must have values that are finite in {dtype}, got infinite "
                "values or NaN; train the adapter again, or set model.dtype"
            )


def _assemble(
    parts: list[Target], pairs: Mapping[int, _Pair], config: AdapterConfig
) -> ModuleAdapter:
    """The adapter of one module.

    Args:
        parts: the stored matrices of the module.
        pairs: their adapters, by `Part.index`; those without adapter are missing.
        config: has the ranks and scales.
    """
    module: LinearBase = parts[0].module
    spec = module.spec
    by_index = {target.part.index: target.part for target in parts}
    # If one stored matrix gives all outputs, they share its A.
    indices = [number if len(parts) > 1 else 0 for number in module.stacking]
    ranks = {index: config.rank_of(pair.module) for index, pair in pairs.items()}
    scales = {index: config.scale_of(pair.module) for index, pair in pairs.items()}
    rank = max(ranks.values())
    a = torch.zeros(len(indices), rank, spec.in_features, dtype=spec.dtype)
    b = torch.zeros(rank, spec.out_features, dtype=spec.dtype)
    for position, index in enumerate(indices):
        if index in pairs:
            stored = StoredTensor((Axis("", size=ranks[index]), IN))
            a[position, : ranks[index]] = by_index[index].cut(pairs[index].tensors["A"], stored)
    for index, pair in pairs.items():
        part = by_index[index]
        stored = StoredTensor((OUT, Axis("", size=ranks[index])))
        rows = slice(part.first_row, part.first_row + part.num_rows)
        b[: ranks[index], rows] = part.cut(pair.tensors["B"], stored).T
    return ModuleAdapter(
        a,
        b,
        tuple(ranks.get(index, 0) for index in indices),
        tuple(scales.get(index, 0.0) for index in indices),
    )
