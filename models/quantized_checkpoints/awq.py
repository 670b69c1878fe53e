"""Checkpoints of AWQ (arXiv:2306.00978) in the order of its `gemm` kernel.

    qweight  int32 [in, out / 8]: a word has eight outputs, in the order of `AWQ_ORDER`
    qzeros   int32 [groups, out / 8], likewise
    scales   [groups, out]

A weight is `(q - z) * scale`. With `zero_point: false` some checkpoints have no `qzeros`; z is then
8. Checkpoints of AutoRound and GPTQModel have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ostinato.models.quantized_checkpoints.keys import (
    MADE_BY_GPTQ,
    ConfigKeys,
    skip_auto_round,
)
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy, Headers, names_module
from ostinato.models.quantized_checkpoints.stored_groups import (
    StoredGroups,
    stored_dtype,
)
from ostinato.models.weight_methods.weight_method import (
    FLOATS,
    IN,
    OUT,
    Axis,
    DummyTensor,
    Part,
    StoredTensor,
    WeightMethod,
)
from ostinato.ops.checkpoint_values.stored_values import Packing, unpack_words

__all__ = ("Awq", "from_checkpoint", "stores_zeros")

_WORDS = (torch.int32,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(StoredGroups):
    """`qweight`, `qzeros` and `scales`; 4 bits."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        words = Axis("out", 8)
        groups = self.groups_axis()
        tensors = {
            "qweight": StoredTensor((IN, words), _WORDS, converted=False),
            "scales": StoredTensor((groups, OUT), FLOATS, converted=False),
        }
        if not self.symmetric:
            tensors["qzeros"] = StoredTensor((groups, words), _WORDS, converted=False)
        return tensors

    @property
    def packing(self) -> Packing:
        return Packing.awq

    def checked(self, name: str, value: Tensor, part: Part) -> tuple[str, Tensor]:
        if name == "scales":
            return "scales", value.T
        if name == "qweight":
            return "values", value
        return "zeros", unpack_words(value, self.bits, Packing.awq)[: part.stored[0]].int()

    def dummy(self, tensor: DummyTensor) -> Tensor | None:
        return (
            torch.full(tensor.size, 0.005, dtype=torch.float16) if tensor.name == "scales" else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _AwqPolicy(CheckpointPolicy):
    marker: ClassVar[str] = "qweight"

    method: Awq
    floats: tuple[str, ...]

    @property
    def quantization(self) -> str:
        return f"AWQ {self.method.name}"

    def rule_for(self, name: str) -> WeightMethod | str | None:
        if any(names_module(pattern, name) for pattern in self.floats):
            return "quantization_config.modules_to_not_convert"
        return "the format AWQ" if name.endswith("lm_head") else self.method


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> CheckpointPolicy:
    """The methods of an AWQ checkpoint.

    Raises:
        ValueError: a key is not supported; the text names it.
    """
    keys = ConfigKeys(stated)
    keys.text("quant_method", one_of=("awq",), default="awq")
    for name in ("version", "format", "checkpoint_format"):
        keys.text(name, one_of=("gemm",), default="gemm")
    keys.integer("bits", "w_bit", one_of=(4,))
    has_zeros = keys.boolean("zero_point", default=True)
    method = Awq(
        bits=4,
        group_size=keys.integer(
            "group_size", "q_group_size", one_of=(-1, 16, 32, 64, 128, 256), default=128
        ),
        symmetric=not has_zeros and not stores_zeros(headers),
        scale_dtype=stored_dtype(headers, ".scales", "float16"),
    )
    policy = _AwqPolicy(
        unquantized=unquantized,
        headers=headers,
        method=method,
        floats=keys.names("modules_to_not_convert"),
    )
    for name in ("desc_act", "do_fuse", "lm_head"):
        keys.must_be(name, False)
    keys.must_be("pack_dtype", "int32")
    # transformers writes `sym: true` beside `zero_point: true`
    keys.without_effect("fuse_max_seq_len", "modules_to_fuse", "sym", *MADE_BY_GPTQ)
    skip_auto_round(keys)
    keys.finish()
    return policy


def stores_zeros(headers: Headers) -> bool:
    """Whether zero points are among the checkpoint's known tensors."""
    return any(name.endswith(".qzeros") for name in headers)
