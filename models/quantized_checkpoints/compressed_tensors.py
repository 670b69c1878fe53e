"""Checkpoints of the library compressed-tensors, which LLM Compressor writes.

`config_groups` states for each group of modules how weights and activations are quantised.
`targets` names the modules of a group. The formats of integers are in packed_integers.py, those of
floats in stored_floats.py.

On a CPU `input_activations` has no effect, and stored scales of activations are not used. If the
weights are 8-bit floats, the CPU kernels do not round activations. For other weights they round
them in groups of a row (ops/quantized.py), which is finer than one scale for each token. On CUDA
`input_activations` says whether activations are rounded to 8 bits, and how (rounded_inputs.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostinato.models.quantized_checkpoints.keys import ConfigKeys
from ostinato.models.quantized_checkpoints.packed_integers import PackedIntegers
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy, Headers
from ostinato.models.quantized_checkpoints.stored_floats import Float4, Float8
from ostinato.models.quantized_checkpoints.stored_groups import (
    InputsStated,
    StoredGroups,
    static_inputs,
    stored_dtype,
)
from ostinato.models.weight_methods.weight_method import WeightMethod
from ostinato.ops.w8a8.round_rows import InputScales

__all__ = ("from_checkpoint",)

# Formats of integers -> whether a word holds several of them.
_INTEGERS = {"pack-quantized": True, "int-quantized": False}
_FORMATS = (*_INTEGERS, "float-quantized", "nvfp4-pack-quantized")
_GROUPS = (16, 32, 64, 128, 256, 512, 1024)
# Keys about the calibration that found the scales.
_OBSERVED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_MADE_WITH = ("global_compression_ratio", "quantization_status", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy(CheckpointPolicy):
    groups: tuple[tuple[tuple[str, ...], WeightMethod], ...]  # targets and method
    floats: tuple[str, ...]

    @property
    def quantization(self) -> str:
        names = dict.fromkeys(method.name for _, method in self.groups)
        return f"compressed-tensors {', '.join(names)}"

    def marker_of(self, name: str) -> str:
        return f"{name}.weight_scale"

    def rule_for(self, name: str) -> WeightMethod | str | None:
        if any(_matches(name, pattern) for pattern in self.floats):
            return "quantization_config.ignore"
        # The library's order: the module's name, patterns in alphabetical order, the class.
        methods = {target: method for targets, method in self.groups for target in targets}
        for target in sorted(methods, key=lambda one: (one.startswith("re:"), one)):
            if _matches(name, target):
                return methods[target]
        return methods.get("Linear", "quantization_config.config_groups")


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> CheckpointPolicy:
    """The methods of a checkpoint of compressed-tensors.

    Raises:
        ValueError: a key is not supported; the text names it.
    """
    keys = ConfigKeys(stated)
    keys.text("quant_method", one_of=("compressed-tensors",), default="compressed-tensors")
    form = keys.value("format", default=None)
    groups = []
    for name, settings in keys.entries("config_groups"):
        group = ConfigKeys(settings, f"quantization_config.config_groups[{name!r}]")
        groups.append((group.names("targets"), _method(group, form, headers)))
        group.finish()
    if not groups:
        raise keys.error("config_groups", "is empty")
    policy = _Policy(
        unquantized=unquantized,
        headers=headers,
        groups=tuple(groups),
        floats=keys.names("ignore"),
    )
    sparsity = keys.value("sparsity_config", default=None)
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise keys.error("sparsity_config", "is not supported; use a checkpoint without it")
    if keys.value("transform_config", default=None):
        raise keys.error("transform_config", "is not supported; use a checkpoint without it")
    # The settings of a KV cache of 8 bits. Its scales are stored tensors, which an FP8 cache reads
    # (models/checkpoints/cache_scales.py). An int8 cache computes its own scales.
    keys.without_effect("kv_cache_scheme")
    keys.without_effect(*_MADE_WITH)
    keys.finish()
    return policy


def _method(group: ConfigKeys, form: Any, headers: Headers) -> WeightMethod:
    form = group.value("format", default=form)
    if form not in _FORMATS:
        raise group.error("format", f"is {form!r}; supported: {', '.join(_FORMATS)}")
    weights = ConfigKeys(group.value("weights"), "quantization_config.config_groups weights")
    weights.must_be("dynamic", False)
    weights.without_effect(*_OBSERVED)
    shapes = [header.shape for name, header in headers.items() if name.endswith(".weight_scale")]
    one_dims = min((len(shape) for shape in shapes), default=1)
    if form in _INTEGERS:
        method: StoredGroups = _integers(weights, _INTEGERS[form], headers, one_dims)
    elif form == "float-quantized":
        method = _floats(weights, one_dims)
    else:
        weights.text("type", one_of=("float",))
        weights.integer("num_bits", one_of=(4,))
        weights.text("strategy", one_of=("tensor_group",))
        weights.must_be("symmetric", True)
        weights.must_be("actorder", False)
        size = weights.integer("group_size", one_of=(16,))
        method = Float4(group_size=size, scale_dtype="float32", library="compressed-tensors")
    weights.finish()
    return replace(method, inputs=_inputs(group, method, headers))


def _integers(
    weights: ConfigKeys, is_packed: bool, headers: Headers, one_dims: int
) -> PackedIntegers:
    weights.text("type", one_of=("int",), default="int")
    strategy = weights.text("strategy", one_of=("tensor", "channel", "group"))
    size = -1
    if strategy == "group":
        size = weights.integer("group_size", one_of=_GROUPS)
    else:
        weights.must_be("group_size", -1)
    order = weights.value("actorder", default=None)
    if order not in (None, False, True, "group", "weight", "static"):
        raise weights.error("actorder", f"is {order!r}; supported: group, weight and static")
    return PackedIntegers(
        bits=weights.integer("num_bits", one_of=(4, 8)),
        group_size=size,
        symmetric=weights.boolean("symmetric", default=True),
        scale_dtype=stored_dtype(headers, ".weight_scale", "bfloat16"),
        has_order=order in (True, "group"),
        is_packed=is_packed,
        has_one_scale=strategy == "tensor",
        scale_dims=one_dims,
    )


def _floats(weights: ConfigKeys, one_dims: int) -> Float8:
    weights.text("type", one_of=("float",))
    weights.integer("num_bits", one_of=(8,))
    weights.must_be("symmetric", True)
    weights.must_be("actorder", False)
    strategy = weights.text("strategy", one_of=("tensor", "channel", "block"))
    block = weights.value("block_structure", default=None)
    if strategy != "block":
        weights.must_be("group_size", -1)
        return Float8(strategy=strategy, scale_dims=one_dims)
    size = block.split("x") if isinstance(block, str) else block
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or any(str(each) not in ("32", "64", "128", "256") for each in size):
        raise weights.error(
            "block_structure", f"is {block!r}; it must be two of 32, 64, 128 and 256"
        )
    return Float8(strategy=strategy, block_rows=int(size[0]), group_size=int(size[1]))


def _inputs(group: ConfigKeys, method: StoredGroups, headers: Headers) -> InputsStated | None:
    """What the settings state about activations.

    Returns None unless activations and weights are both integers of 8 bits, or both floats of 8
    bits. For activations with a zero point it returns None too, because no kernel adds zero points.
    """
    if group.value("output_activations", default=None):
        raise group.error("output_activations", "is not supported; use a checkpoint without it")
    stated = group.value("input_activations", default=None)
    if stated is None:
        return None
    inputs = ConfigKeys(stated, "quantization_config.config_groups input_activations")
    bits = inputs.integer("num_bits", one_of=(4, 8))
    number = inputs.text("type", one_of=("int", "float"), default="int")
    is_dynamic = inputs.value("dynamic", default=False) is not False
    strategy = inputs.value("strategy", default="tensor")
    is_symmetric = inputs.value("symmetric", default=True)
    inputs.without_effect("actorder", "block_structure", "group_size", *_OBSERVED)
    inputs.finish()
    same_number = number == ("float" if method.kind == "e4m3" else "int")
    if bits != 8 or method.bits != 8 or not same_number or not is_symmetric:
        return None
    if not is_dynamic and strategy == "tensor":
        return static_inputs(headers)
    is_block = isinstance(method, Float8) and method.strategy == "block"
    return InputsStated(InputScales.group if is_block else InputScales.row)
