"""The modules of a traced model: layers that run a graph, and the modules that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F

from ostinato.models.base import DecoderLayer
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import (
    BuildOptions,
    Linear,
    LinearBase,
    RouterLinear,
)
from ostinato.models.layers.norm_layers import LayerNorm, RMSNorm
from ostinato.models.layers.vocabulary_layers import Embedding, OutputHead
from ostinato.models.step_tensors import StepInputs
from ostinato.models.traced.leaf_modules import (
    EmbeddingLeaf,
    ExpertsLeaf,
    Leaf,
    LinearLeaf,
    NormLeaf,
)
from ostinato.models.traced.model_trace import AttentionCall
from ostinato.ops.activation import activate
from ostinato.ops.attention import paged_attention

__all__ = (
    "Logits",
    "TracedAttention",
    "TracedExperts",
    "TracedGraph",
    "TracedLayer",
    "build_leaf",
    "rows_of",
)


class TracedGraph(nn.Module):
    """A graph as a module.

    A `GraphModule` cannot be used. torch makes a class for each of them, which a stored program
    cannot name.

    Args:
        graph: calls modules and reads tensors by their names.
        parts: the modules and tensors by name; a dot separates a module from its member.
    """

    def __init__(self, graph: Graph, parts: Mapping[str, nn.Module | Tensor]) -> None:
        super().__init__()
        for target, part in parts.items():
            *path, name = target.split(".")
            owner: nn.Module = self
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                owner.register_buffer(name, part, persistent=False)
            else:
                setattr(owner, name, part)
        written = graph.python_code("self")
        self.code = written.src
        names = dict(written.globals)
        exec(compile(self.code, "<traced graph>", "exec"), names)
        self._run: Callable[..., Tensor] = names["forward"]

    def forward(self, *inputs: Any) -> Tensor:
        """The graph's result."""
        return self._run(self, *inputs)


class TracedLayer(DecoderLayer):
    """A layer that runs a graph.

    Args:
        graph: takes hidden states, the step, the caches, the wanted rows, then the tables.
        tables: keys of `StepInputs.rope`, each with the number of its field.
        static_key: everything that the graph depends on besides tensors.
    """

    def __init__(
        self, graph: TracedGraph, tables: tuple[tuple[str, int], ...], static_key: tuple[Any, ...]
    ) -> None:
        super().__init__()
        self.traced_layer = graph
        self._tables = tables
        self._static_key = static_key

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        tables = [step.rope[kind][index] for kind, index in self._tables]
        return self.traced_layer(hidden, step, k_cache, v_cache, rows, *tables)

    def static_key(self) -> tuple[Any, ...]:
        matrices = (
            module.static_key for module in self.modules() if isinstance(module, LinearBase)
        )
        return (*self._static_key, *matrices)


class TracedAttention(nn.Module):
    """An attention call, over the paged KV cache."""

    def __init__(self, call: AttentionCall, backend: str) -> None:
        super().__init__()
        self.scale = call.scale
        self.sliding_window = call.sliding_window
        self.soft_cap = call.soft_cap
        self.backend = backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """q [T, Hq, d], k [T, Hkv, d], v [T, Hkv, e] -> [T, Hq, e]."""
        return paged_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            step.attention(self.sliding_window),
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=sinks,
            backend=self.backend,
        )


class TracedExperts(nn.Module):
    """The experts of a layer; the model's own code chooses them."""

    def __init__(self, leaf: ExpertsLeaf, options: BuildOptions) -> None:
        super().__init__()
        self.activation = leaf.activation
        size, inner = leaf.hidden_size, leaf.intermediate_size
        self.gate_up_proj = ExpertLinear(leaf.num_experts, size, (inner, inner), options)
        self.down_proj = ExpertLinear(leaf.num_experts, inner, (size,), options)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, D], ids [T, k], weights [T, k] -> [T, D]."""
        ids = ids.int()
        inner = activate(self.gate_up_proj(x, ids), self.activation, gated=True)
        return self.down_proj(inner, ids, weights.float())


class Logits(nn.Module):
    """The output head."""

    def __init__(self, matrix: OutputHead | Embedding) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, vocab_size] float32."""
        return self.matrix.logits(hidden)


def rows_of(hidden: Tensor, rows: Tensor | None) -> Tensor:
    """The `rows` of [T, D]: [R, D]. Without `rows`, all of it."""
    return hidden if rows is None else F.embedding(rows, hidden)


def build_leaf(leaf: Leaf, options: BuildOptions, *, num_experts: int = 0) -> nn.Module:
    """The module of this package that replaces a module of the transformers model.

    Args:
        leaf: what the module computes.
        options: dtype and device.
        num_experts: experts of the layer; a linear layer with this number of outputs is the router.
    """
    match leaf:
        case LinearLeaf(in_features, out_features, has_bias, dtype):
            kind = RouterLinear if out_features == num_experts else Linear
            own = replace(options, dtype=dtype)
            return kind(in_features, out_features, own, bias=has_bias)
        case EmbeddingLeaf(num_rows, size):
            return Embedding(num_rows, size, options)
        case NormLeaf("layer", size, eps, dtype, has_bias):
            return LayerNorm(size, eps, replace(options, dtype=dtype), has_bias=has_bias)
        case NormLeaf(kind, size, eps, dtype):
            own = replace(options, dtype=dtype)
            return RMSNorm(size, eps, own, plus_one=kind == "rms_plus_one")
        case ExpertsLeaf():
            return TracedExperts(leaf, options)
