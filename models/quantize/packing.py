"""Packs rounded matrices as GPTQ, AWQ and compressed-tensors store them, with their settings.

The modules of models/quantized_checkpoints/ describe these formats and read them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.models.quantize.rounding import Rounded
from ostinato.ops.checkpoint_values.stored_values import AWQ_ORDER

__all__ = ("FORMATS", "pack", "settings_of")

FORMATS = ("gptq", "awq", "compressed-tensors")


def pack(name: str, rounded: Rounded, form: str, *, symmetric: bool) -> dict[str, Tensor]:
    """The stored tensors of a matrix.

    Args:
        name: the name of the module in the checkpoint.
        rounded: the matrix; its sizes are multiples of 8.
        form: one of FORMATS.
        symmetric: the matrix has no zero points.
    """
    bits = rounded.grid.bits
    values, zeros = rounded.values.int(), rounded.grid.zeros.int()
    scales = rounded.grid.scales
    if form == "gptq":
        groups = torch.arange(values.shape[1], dtype=torch.int32) // rounded.grid.group_size
        return {
            f"{name}.qweight": _words(values, bits).T.contiguous(),
            f"{name}.qzeros": _words((zeros - 1).T.contiguous(), bits),
            f"{name}.scales": scales.T.contiguous().half(),
            f"{name}.g_idx": groups,
        }
    if form == "awq":
        return {
            f"{name}.qweight": _words(values.T.contiguous(), bits, AWQ_ORDER),
            f"{name}.qzeros": _words(zeros.T.contiguous(), bits, AWQ_ORDER),
            f"{name}.scales": scales.T.contiguous().half(),
        }
    tensors = {
        f"{name}.weight_packed": _words(values, bits),
        f"{name}.weight_scale": scales.half(),
        f"{name}.weight_shape": torch.tensor(values.shape),
    }
    if not symmetric:
        packed = _words(zeros.T.contiguous(), bits)
        tensors[f"{name}.weight_zero_point"] = packed.T.contiguous()
    return tensors


def settings_of(
    form: str,
    bits: int,
    group_size: int,
    floats: Sequence[str],
    *,
    symmetric: bool,
    head_bits: int = 0,
) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint.

    Args:
        form: one of FORMATS.
        bits: the number of bits of an integer.
        group_size: columns that share a scale.
        floats: names of the layers' linear modules that stay floats, such as routers of experts.
        symmetric: there are no zero points.
        head_bits: the number of bits of `lm_head`, with "gptq" only; 0 = it is not quantised.
    """
    if form == "gptq":
        dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in floats}
        if head_bits not in (0, bits):
            dynamic["+:^lm_head$"] = {"bits": head_bits}
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "sym": symmetric,
            "desc_act": False,
            "lm_head": head_bits > 0,
            "checkpoint_format": "gptq",
            **({"dynamic": dynamic} if dynamic else {}),
        }
    if form == "awq":
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head", *floats],
        }
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *floats],
    }


def _words(values: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """[rows, columns] -> int32 [rows, columns * bits / 32], the first column in the lowest bits.

    With `order`, column order[0] of each word is in the lowest bits, then order[1], and so on.
    """
    per_word = 32 // bits
    parts = values.to(torch.int64).view(values.shape[0], -1, per_word)
    if order:
        parts = parts[:, :, list(order)]
    words = (parts << (torch.arange(per_word) * bits)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
