"""Scales the inputs of matrices before the matrices are rounded, as AWQ does (arXiv:2306.00978).

An input whose values are large on the calibration text is divided by a factor, and its column of
the matrix is multiplied by the same factor. So the column is rounded with a smaller relative error.
The division costs nothing: it is folded into the weight of the RMS norm before the matrix, or into
the rows of the matrix before it. A norm's new weight is rounded as the checkpoint stores it. The
columns are therefore multiplied by the norm's old weight divided by its rounded new weight. So the
layer's result stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.models.base import DecoderLayer
from ostinato.models.config.block_spec import Residual
from ostinato.models.decoder import DecoderBlock
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.layers.mlp import GatedMLP, PlainMLP
from ostinato.models.layers.norm_layers import RMSNorm
from ostinato.models.quantize.rounding import choose_grid, damped, round_to_nearest

__all__ = ("Fold", "apply_factors", "best_factors", "find_folds")

_STEPS = 10  # the powers 0 / 10, 1 / 10, ... 10 / 10 of the activations' sizes are tried
_GATED = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class Fold:
    """Matrices that read one vector, and the module that can divide its elements."""

    source: str  # name of that module: an RMS norm, or a matrix that stacks gate and up
    readers: tuple[str, ...]  # names of the matrices


def find_folds(layer: DecoderLayer) -> list[Fold]:
    """A `Fold` for each vector of a decoder block that can be scaled, in the order of computation.

    A layer that is not a `DecoderBlock` has none.
    """
    if not isinstance(layer, DecoderBlock):
        return []
    mlp = layer.mlp
    first = {GatedMLP: "mlp.gate_up_proj", PlainMLP: "mlp.up_proj"}.get(type(mlp))
    folds: list[Fold] = []
    if layer.residual is not Residual.post_norm:
        one_norm = layer.residual is Residual.parallel_one_norm
        if isinstance(layer.self_attn, Attention) and not (one_norm and first is None):
            both = ("self_attn.qkv_proj", first) if one_norm and first else ("self_attn.qkv_proj",)
            folds.append(Fold("attention_norm", both))
        if not one_norm and first is not None:
            folds.append(Fold("mlp_norm", (first,)))
    folds = [fold for fold in folds if isinstance(layer.get_submodule(fold.source), RMSNorm)]
    if isinstance(mlp, GatedMLP) and mlp.activation in _GATED and not mlp.gate_up_proj.has_bias:
        folds.append(Fold("mlp.gate_up_proj", ("mlp.down_proj",)))
    return folds


def best_factors(
    weights: Sequence[Tensor],
    hessian: Tensor,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    *,
    symmetric: bool,
) -> Tensor:
    """Try several factors of the columns, and return those with the least error of rounding: [K].

    Factors of 1, which change nothing, are tried too.

    Args:
        weights: [N, K] float32 each, the matrices that read the vector.
        hessian: [K, K] float32, the mean of x x^T.
        bits, group_size, dtype, symmetric: as in `choose_grid`.
    """
    hessian = damped(hessian)
    sizes = hessian.diagonal().sqrt()
    best, least = torch.ones_like(sizes), float("inf")
    for step in range(_STEPS + 1):
        factors = sizes.clamp(min=1e-4 * float(sizes.amax())) ** (step / _STEPS)
        factors = factors / (factors.amax() * factors.amin()).sqrt()
        importance = hessian.diagonal() / factors.square()
        error = 0.0
        for weight in weights:
            scaled = weight * factors
            grid = choose_grid(
                scaled, bits, group_size, dtype, symmetric=symmetric, importance=importance
            )
            lost = round_to_nearest(scaled, grid).restored() / factors - weight
            error += float(((lost @ hessian) * lost).sum())
        if error < least:
            best, least = factors, error
    return best


def apply_factors(layer: DecoderLayer, fold: Fold, factors: Tensor, stored: torch.dtype) -> None:
    """Multiply the readers' columns by the factors, and divide their source's result by them.

    Args:
        layer: the layer, in float32.
        fold: the matrices of this layer whose input is scaled.
        factors: [K] float32, larger than 0.
        stored: the dtype of a norm in the checkpoint.
    """
    source = layer.get_submodule(fold.source)
    if isinstance(source, RMSNorm):
        offset, before = source.stored_offset, source.weight
        after = ((before / factors) - offset).to(stored).float() + offset
        factors = torch.where(after * before > 0, before / after, 1.0)
        source.weight.copy_(torch.where(after * before > 0, after, before))
    else:
        assert isinstance(source, LinearBase), "a fold's source is a norm or a matrix"
        weight = source.get_parameter("weight")
        weight[len(weight) // 2 :] /= factors[:, None]
    for name in fold.readers:
        layer.get_submodule(name).get_parameter("weight").mul_(factors)
