"""Checkpoints of GPTQ (arXiv:2210.17323), as AutoGPTQ, GPTQModel and AutoRound write them.

    qweight  int32 [in * bits / 32, out]: a word has successive inputs
    qzeros   int32 [groups, out * bits / 32]: a word has successive outputs
    scales   [groups, out]
    g_idx    int32 [in]: the group of each input; AutoRound leaves it out

A weight is `(q - z) * scale`. Version 1 stores `z - 1` in `qzeros`, version 2 stores z. The label
`checkpoint_format` is wrong in some files (GPTQModel 5 writes version 2 under `gptq`). The zero
point of symmetric weights is known. So for them both versions are accepted under either label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ostinato.models.quantized_checkpoints.keys import (
    MADE_BY_GPTQ,
    ConfigKeys,
    skip_auto_round,
)
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy, Headers
from ostinato.models.quantized_checkpoints.stored_groups import (
    G_IDX,
    StoredGroups,
    stored_dtype,
)
from ostinato.models.weight_methods.weight_method import (
    FLOATS,
    OUT,
    Axis,
    DummyTensor,
    Part,
    StoredTensor,
    WeightMethod,
)
from ostinato.ops.checkpoint_values.stored_values import Packing, unpack_words

__all__ = ("GPTQ_GROUPS", "Gptq", "from_checkpoint", "gptq_method")

_WORDS = (torch.int32,)
GPTQ_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)
"""The supported values of `group_size`; -1 = a row is one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(StoredGroups):
    """`qweight`, `qzeros`, `scales` and, in some checkpoints, `g_idx`."""

    version: int = 1
    has_g_idx: bool = True

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        per_word = 32 // self.bits
        groups = self.groups_axis()
        tensors = {
            "qweight": StoredTensor((Axis("in", per_word), OUT), _WORDS, converted=False),
            "qzeros": StoredTensor((groups, Axis("out", per_word)), _WORDS, converted=False),
            "scales": StoredTensor((groups, OUT), FLOATS, converted=False),
        }
        return tensors | ({"g_idx": G_IDX} if self.has_g_idx else {})

    @property
    def packing(self) -> Packing:
        return Packing.columns

    def checked(self, name: str, value: Tensor, part: Part) -> tuple[str, Tensor]:
        if name == "qweight":
            return "values", value
        if name == "scales":
            if str(value.dtype) != f"torch.{self.scale_dtype}":
                raise ValueError(
                    f"scales are {value.dtype}; they must be {self.scale_dtype}, like the "
                    "checkpoint's first scales"
                )
            return "scales", value.T
        if name == "g_idx":
            return "g_idx", value
        zeros = unpack_words(value, self.bits, Packing.rows)[:, : part.stored[0]]
        if not self.symmetric:
            return "zeros", zeros.T.int() + (self.version == 1)
        middle, first = 1 << (self.bits - 1), int(zeros[0, 0])
        if first not in (middle - 1, middle) or not bool((zeros == first).all()):
            raise ValueError(
                f"the zero points are not all {middle - 1} or all {middle}, but "
                "quantization_config.sym is true; set model.config.quantization_config.sym=false"
            )
        return "", zeros

    def dummy(self, tensor: DummyTensor) -> Tensor | None:
        if tensor.name == "qzeros":
            word = sum(((1 << (self.bits - 1)) - 1) << shift for shift in range(0, 32, self.bits))
            return torch.full(tensor.size, word, dtype=torch.int32)
        if tensor.name == "g_idx":
            group = tensor.size[0] if self.group_size == -1 else self.group_size
            return torch.arange(tensor.size[0], dtype=torch.int32) // group
        if tensor.name == "scales":
            return torch.full(
                tensor.size, 0.02 / (1 << (self.bits - 2)), dtype=_dtype(self.scale_dtype)
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _GptqPolicy(CheckpointPolicy):
    marker: ClassVar[str] = "qweight"

    method: Gptq
    only: tuple[str, ...]  # endings of the names of quantised modules; () = all modules
    head: bool  # the output head is quantised
    # (pattern of module names, their method; None = floats)
    overrides: tuple[tuple[str, Gptq | None], ...] = field(default=())

    @property
    def quantization(self) -> str:
        return f"GPTQ {self.method.name}"

    def rule_for(self, name: str) -> WeightMethod | str | None:
        for pattern, method in self.overrides:
            if re.match(pattern, name):
                return "quantization_config.dynamic" if method is None else method
        if name.endswith("lm_head"):
            return self.method if self.head else "quantization_config.lm_head"
        if self.only and not name.endswith(self.only):
            return "quantization_config.modules_in_block_to_quantize"
        return self.method


def gptq_method(keys: ConfigKeys, headers: Headers, *, version: int) -> Gptq:
    """The method of most modules, by `bits`, `group_size`, `sym` and `desc_act`.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    bits = keys.value("bits")
    if type(bits) is int and bits in (2, 3):
        raise keys.error(
            "bits",
            f"is {bits}: there is no kernel for integers of {bits} bits; use a checkpoint of 4 or "
            "8 bits, or the unquantized checkpoint with model.quantization=int4",
        )
    if type(bits) is not int or bits not in (4, 8):
        raise keys.error("bits", f"is {bits!r}; supported: 4, 8")
    return Gptq(
        bits=bits,
        group_size=keys.integer("group_size", one_of=GPTQ_GROUPS),
        symmetric=keys.boolean("sym", default=True),
        scale_dtype=stored_dtype(headers, ".scales", "float16"),
        has_order=keys.boolean("desc_act", default=False),
        version=version,
        has_g_idx=not headers or any(name.endswith(".g_idx") for name in headers),
    )


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> CheckpointPolicy:
    """The methods of a GPTQ checkpoint.

    Raises:
        ValueError: a key is not supported; the text names it.
    """
    keys = ConfigKeys(stated)
    keys.text("quant_method", one_of=("gptq",), default="gptq")
    label = keys.text("checkpoint_format", "format", one_of=("gptq", "gptq_v2"), default="gptq")
    method = gptq_method(keys, headers, version=2 if label == "gptq_v2" else 1)
    head = keys.boolean("lm_head", default=False)
    if head and headers and "lm_head.qweight" not in headers:
        raise keys.error("lm_head", "is true, but the checkpoint has no lm_head.qweight")
    keys.must_be("is_marlin_format", False)
    keys.must_be("pack_dtype", "int32")
    keys.must_be("hyb_act", False)
    policy = _GptqPolicy(
        unquantized=unquantized,
        headers=headers,
        method=method,
        only=_endings(keys),
        head=head,
        overrides=_overrides(keys, method),
    )
    keys.without_effect(*MADE_BY_GPTQ)
    skip_auto_round(keys)
    keys.finish()
    return policy


def _endings(keys: ConfigKeys) -> tuple[str, ...]:
    """`modules_in_block_to_quantize`: lists of names, one list for each step of calibration."""
    stated = keys.value("modules_in_block_to_quantize", default=[])
    lists = [each if isinstance(each, list) else [each] for each in stated]
    return tuple(f".{name}" for each in lists for name in each)


def _overrides(keys: ConfigKeys, method: Gptq) -> tuple[tuple[str, Gptq | None], ...]:
    """`dynamic`: `-:pattern` for modules that are floats, `+:pattern` for other settings."""
    found: list[tuple[str, Gptq | None]] = []
    for pattern, settings in keys.entries("dynamic", {}):
        if pattern.startswith("-:"):
            found.append((pattern[2:], None))
            continue
        own = ConfigKeys(settings, f"quantization_config.dynamic[{pattern!r}]")
        found.append(
            (
                pattern.removeprefix("+:"),
                replace(
                    method,
                    bits=own.integer("bits", one_of=(4, 8), default=method.bits),
                    group_size=own.integer(
                        "group_size", one_of=GPTQ_GROUPS, default=method.group_size
                    ),
                    symmetric=own.boolean("sym", default=method.symmetric),
                    has_order=own.boolean("desc_act", default=method.has_order),
                ),
            )
        )
        own.finish()
    return tuple(found)


def _dtype(name: str) -> torch.dtype:
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(name, torch.float32)
