"""Ops that mark places in a recorded graph: a module of the model, and an attention call.

They are recorded and never computed. models/recorded/graph_parts.py replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.ops.register import register_op

__all__ = ("recorded_attention", "recorded_module")


def _module(inputs: Sequence[Tensor], sizes: Sequence[int], name: str) -> Tensor:
    raise AssertionError(f"the call of {name} is recorded, not computed")


def _module_fake(inputs: Sequence[Tensor], sizes: Sequence[int], name: str) -> Tensor:
    # The result of an embedding has the dtype of the model, which its ids do not have.
    return torch.empty(sizes, dtype=inputs[-1].dtype, device=inputs[-1].device)


def _attention(q: Tensor, k: Tensor, v: Tensor, call: int) -> Tensor:
    raise AssertionError("an attention call is recorded, not computed")


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, call: int) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads, v.shape[-1]))


recorded_module = register_op(
    "recorded_module", {"CompositeExplicitAutograd": _module}, fake=_module_fake
)
"""The call of a module: inputs, sizes of the result, the module's name. The last input has the
dtype of the result."""

recorded_attention = register_op(
    "recorded_attention", {"CompositeExplicitAutograd": _attention}, fake=_attention_fake
)
"""q [1, Hq, T, d], k [1, Hkv, T, d], v [1, Hkv, T, e], number of the call -> [1, T, Hq, e]."""
