"""Checkpoints of AutoRound (arXiv:2309.05516), in the packings of GPTQ and AWQ.

auto_round:auto_gptq, auto_round:gptq   GPTQ version 1
auto_round, auto_round:gptqmodel        GPTQ version 2
auto_round:auto_awq, auto_round:awq     AWQ

Early files have `backend` in place of `packing_format`, such as auto_round:gptq:exllamav2, and have
g_idx, although the columns are in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ostinato.models.quantized_checkpoints.awq import Awq, stores_zeros
from ostinato.models.quantized_checkpoints.gptq import GPTQ_GROUPS, Gptq, gptq_method
from ostinato.models.quantized_checkpoints.keys import ConfigKeys, skip_auto_round
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy, Headers
from ostinato.models.weight_methods.weight_method import WeightMethod

__all__ = ("from_checkpoint",)

# The name of a packing -> the version of GPTQ; None = AWQ.
_PACKINGS = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round": 2,
    "auto_round:gptqmodel": 2,
    "auto_round:auto_awq": None,
    "auto_round:awq": None,
}
_IS_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")  # a key with one of these, as in AutoRound
_FLOAT_BITS = 16  # a module of `extra_config` with this many bits or more is not quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class _AutoRoundPolicy(CheckpointPolicy):
    marker: ClassVar[str] = "qweight"

    method: WeightMethod
    blocks: tuple[str, ...]  # prefixes of the names of quantised modules; () = all modules
    # Name or pattern of modules -> their method; None = floats. A name comes before patterns.
    extra: Mapping[str, WeightMethod | None]

    @property
    def quantization(self) -> str:
        return f"AutoRound {self.method.name}"

    def rule_for(self, name: str) -> WeightMethod | str | None:
        patterns = (one for one in self.extra if _IS_PATTERN.search(one) and re.search(one, name))
        entry = name if name in self.extra else next(patterns, None)
        if entry is not None:
            return self.extra[entry] or "quantization_config.extra_config"
        if name.endswith("lm_head"):
            return "the default of AutoRound"
        if self.blocks and not name.startswith(self.blocks):
            return "quantization_config.block_name_to_quantize"
        return self.method


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> CheckpointPolicy:
    """The methods of an AutoRound checkpoint.

    Raises:
        ValueError: a key is not supported; the text names it.
    """
    keys = ConfigKeys(stated)
    keys.text("quant_method", one_of=("auto-round", "auto_round"))
    packing = keys.text("packing_format", one_of=_PACKINGS, default=_early_packing(keys))
    version = _PACKINGS[packing]
    gptq = gptq_method(keys, headers, version=version or 1)
    gptq = replace(gptq, has_g_idx=bool(headers) and gptq.has_g_idx)
    method: Gptq | Awq = gptq
    if version is None:
        if gptq.bits != 4:
            raise keys.error("bits", f"is {gptq.bits}; with {packing} it must be 4")
        method = Awq(
            bits=4,
            group_size=gptq.group_size,
            symmetric=bool(headers) and not stores_zeros(headers),
            scale_dtype=gptq.scale_dtype,
        )
    blocks = keys.value("block_name_to_quantize", default=[])
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    policy = _AutoRoundPolicy(
        unquantized=unquantized,
        headers=headers,
        method=method,
        blocks=tuple(f"{block.strip()}." for block in blocks),
        extra=_extra(keys, method),
    )
    skip_auto_round(keys)
    keys.finish()
    return policy


def _early_packing(keys: ConfigKeys) -> str:
    """The packing of a file that does not state it."""
    backend = str(keys.value("backend", default=""))
    is_plain = backend.startswith("auto_round:") and "gptq" not in backend
    return "auto_round" if is_plain else "auto_round:auto_gptq"


def _extra(keys: ConfigKeys, method: Gptq | Awq) -> dict[str, WeightMethod | None]:
    found: dict[str, WeightMethod | None] = {}
    for name, settings in keys.entries("extra_config", {}):
        try:
            re.compile(name if _IS_PATTERN.search(name) else "")
        except re.error as error:
            raise keys.error("extra_config", f"has the pattern {name!r}: {error}") from error
        own = ConfigKeys(settings, f"quantization_config.extra_config[{name!r}]")
        bits = own.integer("bits", one_of=(4, 8, 16, 32), default=method.bits)
        group_size = own.integer("group_size", one_of=GPTQ_GROUPS, default=method.group_size)
        symmetric = own.boolean("sym", default=method.symmetric)
        own.text("data_type", one_of=("int", "float"), default="int")
        for each in ("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"):
            own.without_effect(each)
        own.without_effect("scale_dtype", "super_bits", "super_group_size")
        own.finish()
        if bits >= _FLOAT_BITS:
            found[name] = None
        elif isinstance(method, Awq) and bits != method.bits:
            raise own.error("bits", f"is {bits}; with this packing it must be 4")
        else:
            same = replace(method, group_size=group_size, bits=bits)
            is_gptq = isinstance(method, Gptq)
            found[name] = replace(same, symmetric=symmetric) if is_gptq else same
    return found
