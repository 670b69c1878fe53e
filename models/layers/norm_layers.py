"""The norms that models are made of, and their construction from a configuration."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ostinato.models.config.block_spec import NormKind
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.linear_layers import BuildOptions, LinearBase
from ostinato.models.sharding import Span
from ostinato.ops.norm import layer_norm, rms_norm, scale_by_squares, square_sums
from ostinato.ops.parallel.collectives import all_reduce

__all__ = (
    "LayerNorm",
    "RMSNorm",
    "build_norm",
    "build_rms_norm",
    "norm_all_heads",
)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension.

    Args:
        size: elements of the last dimension; a span if this rank holds a part of them.
        eps: added to the mean square.
        options: dtype and device.
        plus_one: checkpoints store the weight minus 1. The weight is kept in float32, because
            bfloat16 would lose bits of it.
        has_weight: False = the weight is a buffer of ones.

    Attributes:
        stored_offset: the number that loading adds to the stored weight.
        held: the elements of the weight that this rank holds.
    """

    weight: Tensor

    def __init__(
        self,
        size: int | Span,
        eps: float,
        options: BuildOptions,
        *,
        plus_one: bool = False,
        has_weight: bool = True,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.stored_offset = 1.0 if plus_one else 0.0
        self.held = {"weight": (span := Span.of(size))}
        if has_weight:
            wide = replace(options, dtype=torch.float32)
            self.weight = (wide if plus_one else options).empty(span.size)
        else:
            ones = torch.ones(span.size, dtype=options.dtype, device=options.device)
            self.register_buffer("weight", ones, persistent=False)

    @property
    def static_key(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        return ("rms norm", self.eps, self.weight.dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, D] -> [T, D], added to the residual if there is one."""
        return rms_norm(x, self.weight, self.eps, residual)


class LayerNorm(nn.Module):
    """Mean and variance normalisation of the last dimension.

    Without `has_bias` the bias is a buffer of zeros.
    """

    bias: Tensor

    def __init__(
        self, size: int, eps: float, options: BuildOptions, *, has_bias: bool = True
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = options.empty(size)
        if has_bias:
            self.bias = options.empty(size)
        else:
            zeros = torch.zeros(size, dtype=options.dtype, device=options.device)
            self.register_buffer("bias", zeros, persistent=False)

    @property
    def static_key(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        return ("layer norm", self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def build_norm(config: ModelConfig, options: BuildOptions) -> RMSNorm | LayerNorm:
    """The norm of hidden states that the model uses."""
    kind = config.block.norm
    if kind in (NormKind.rms, NormKind.rms_plus_one):
        return build_rms_norm(config, options, config.hidden_size)
    has_bias = kind is NormKind.layer
    return LayerNorm(config.hidden_size, config.norm_eps, options, has_bias=has_bias)


def build_rms_norm(config: ModelConfig, options: BuildOptions, size: int | Span) -> RMSNorm:
    """An RMS norm of `size` elements, its weight stored as in the model's other norms."""
    plus_one = config.block.norm is NormKind.rms_plus_one
    return RMSNorm(size, config.norm_eps, options, plus_one=plus_one)


def norm_all_heads(
    q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], eps: float, out: LinearBase
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of q and of k, whose mean squares are those of the rows of all ranks.

    The ranks exchange two numbers for each token, both at once. If several ranks have the same
    heads of keys, each of these heads counts equally often, so the mean is the same.

    Args:
        q: [T, Dq], last dimension contiguous: the queries of this rank.
        k: [T, Dk] in q's dtype, last dimension contiguous: the keys of this rank.
        weights: [Dq] and [Dk], this rank's part of the weights of the two norms.
        eps: added to the mean squares.
        out: the projection after the attention, which has the group of ranks.

    Returns:
        [T, Dq] and [T, Dk] in q's dtype.
    """
    q_weight, k_weight = weights
    if out.group is None:
        return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    ranks = out.inputs.total // out.inputs.size
    squares = all_reduce(square_sums(q, k), None, out.group, torch.float32, out.exchange)
    return (
        scale_by_squares(q, q_weight, squares, 0, ranks * q.shape[1], eps),
        scale_by_squares(k, k_weight, squares, 1, ranks * k.shape[1], eps),
    )
