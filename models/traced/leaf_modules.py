"""Finds the modules of a transformers model that this project's own modules replace.

Norms are recognised by their results on random numbers, because families have different classes for
the same few functions. Experts are recognised by their parameters. Linear layers and embeddings are
recognised while the model runs, because a function of torch then reads the weight of a module
(models/traced/model_trace.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.ops.activation import ACTIVATIONS
from ostinato.ops.norm import layer_norm, plain_rms_norm

__all__ = ("EmbeddingLeaf", "ExpertsLeaf", "Leaf", "LinearLeaf", "NormLeaf", "find_leaves")

_ROWS = 3  # rows of random numbers on which norms are compared


@dataclass(frozen=True, slots=True)
class LinearLeaf:
    """x W^T + b."""

    in_features: int
    out_features: int
    has_bias: bool
    dtype: torch.dtype  # of x, W and b; the routers of some models compute in float32


@dataclass(frozen=True, slots=True)
class EmbeddingLeaf:
    """Rows of a table."""

    num_rows: int
    size: int


@dataclass(frozen=True, slots=True)
class NormLeaf:
    """A norm of the last dimension."""

    kind: str  # "rms", "rms_plus_one" or "layer"
    size: int
    eps: float
    dtype: torch.dtype  # of the weight
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsLeaf:
    """Gated MLPs: hidden [T, D], ids [T, k], weights [T, k] -> [T, D]."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str  # a key of ops.activation.ACTIVATIONS


Leaf = LinearLeaf | EmbeddingLeaf | NormLeaf | ExpertsLeaf


def find_leaves(model: nn.Module, activation: str | None, dtype: torch.dtype) -> dict[str, Leaf]:
    """The norms and experts of `model` that are replaced, by name.

    Args:
        model: a transformers model whose parameters are on the meta device.
        activation: the value of `hidden_act` in its config.
        dtype: the dtype of activations.

    Raises:
        ValueError: it has experts that are not the usual gated MLPs.
    """
    leaves: dict[str, Leaf] = {}
    for name, module in model.named_modules():
        leaf = _leaf_of(name, module, activation, dtype)
        if leaf is not None:
            leaves[name] = leaf
    return leaves


def _leaf_of(name: str, module: Any, activation: str | None, dtype: torch.dtype) -> Leaf | None:
    if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
        if isinstance(module.gate_up_proj, nn.Parameter) and module.gate_up_proj.dim() == 3:
            return _experts_of(name, module, activation)
        return None
    if "Norm" in type(module).__name__ and not list(module.children()):
        return _norm_of(module, dtype)
    return None


def _experts_of(name: str, module: Any, activation: str | None) -> ExpertsLeaf:
    usual = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    for key, value in usual.items():
        if getattr(module, key, value) is not value:
            raise ValueError(f"the experts {name} have {key}={getattr(module, key)}, unsupported")
    for key in ("has_post_expert_norm", "_is_expert_parallel"):
        if getattr(module, key, False):
            raise ValueError(f"the experts {name} have {key}=True, unsupported")
    is_own_gate = getattr(type(module), "_apply_gate", None)
    if is_own_gate is None or is_own_gate.__name__ != "_default_apply_gate":
        raise ValueError(f"the experts {name} ({type(module).__name__}) are not plain gated MLPs")
    if activation not in ACTIVATIONS:
        raise ValueError(f"the experts {name} have the unsupported activation {activation!r}")
    count, rows, columns = module.gate_up_proj.shape
    return ExpertsLeaf(count, columns, rows // 2, activation)


@torch.no_grad()
def _norm_of(module: Any, dtype: torch.dtype) -> NormLeaf | None:
    """The norm of this project that gives the same results, or None."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or weight.dim() != 1 or parameters.keys() - {"weight", "bias"}:
        return None
    eps = next(
        (getattr(module, key) for key in ("variance_epsilon", "eps") if hasattr(module, key)), None
    )
    if not isinstance(eps, float):
        return None
    size = len(weight)
    generator = torch.Generator().manual_seed(0)
    values = {key: torch.rand(size, generator=generator) + 0.5 for key in parameters}
    x = torch.randn(_ROWS, size, generator=generator)
    try:
        theirs = torch.func.functional_call(module, values, (x,))
    except (RuntimeError, TypeError):  # the module does not take one tensor
        return None
    if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
        return None
    scale = values["weight"]
    shift = values.get("bias", torch.zeros(size))
    candidates = {
        "rms": plain_rms_norm(x, scale, eps),
        "rms_plus_one": plain_rms_norm(x, scale + 1, eps),
        "layer": layer_norm(x, scale, shift, eps),
    }
    if weight.dtype != dtype:
        del candidates["layer"]  # the weight of a `LayerNorm` has the dtype of activations
    for kind, ours in candidates.items():
        if (bias is None or kind == "layer") and torch.allclose(
            theirs.float(), ours, atol=1e-5, rtol=1e-5
        ):
            return NormLeaf(kind, size, eps, weight.dtype, has_bias=bias is not None)
    return None
