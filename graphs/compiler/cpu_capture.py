"""Capture on a CPU: the straight-line programs of all layers as one CPU graph.

A small decode step costs as much between its ops as in them: about 45 microseconds of a layer are
Python and dispatch. The layers' programs are run once with stand-ins for tensors, which write down
what is called; from then on C++ walks the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.graphs.compiler.fx_program import FxProgram, resolve
from ostinato.models.kv_cache import KVCache
from ostinato.models.step_tensors import (
    ForwardBatch,
    RopeRows,
    Size,
    StepInputs,
    TensorSpec,
    tensor_specs,
)
from ostinato.ops.native.abi import SymbolicSize
from ostinato.ops.native.cpu_graph import CpuGraph, Slot, why_not_callable, why_not_constant

__all__ = ("CpuReplay", "LayerCall", "capture_layers")

_OP_PREFIX = "torch:ops.ostinato."
_SYMBOLIC_SIZES = {
    Size.tokens: SymbolicSize.tokens,
    Size.seqs: SymbolicSize.seqs,
    Size.seqs_plus_one: SymbolicSize.seqs_and_one,
    Size.rows: SymbolicSize.rows,
}


class LayerCall(NamedTuple):
    """A layer's program and the tensors of that layer."""

    program: FxProgram
    parameters: list[Tensor]


class CpuReplay:
    """All layers of a model over one KV cache."""

    def __init__(
        self, graph: CpuGraph, hidden_size: int, kv_cache: KVCache, table: type[ForwardBatch]
    ) -> None:
        self._graph = graph
        self._hidden_size = hidden_size
        self._step_tensors = attrgetter(*tensor_specs(table))
        self.kv_cache = kv_cache  # whose addresses the graph holds

    def __call__(self, hidden: Tensor, step: StepInputs) -> Tensor:
        """What the layers' programs give: hidden [T, D] -> [R, D] of `logits_indices`."""
        tensors = step.tensors
        num_rows = len(tensors.logits_indices)
        out = hidden.new_empty((num_rows, self._hidden_size))
        inputs = (hidden, *chain.from_iterable(step.rope.values()), *self._step_tensors(tensors))
        self._graph.replay(len(hidden), len(tensors.seq_lens), num_rows, inputs, out)
        return out


def capture_layers(
    layers: Sequence[LayerCall], kv_cache: KVCache, hidden: Tensor, step: StepInputs
) -> CpuReplay | None:
    """Record the layers of a model.

    Args:
        layers: the last one's program takes the wanted rows besides.
        kv_cache: of all layers.
        hidden: [T, D] of any step, which tells the sizes that do not change, and types.
        step: of the same step.

    Returns:
        None when a program does what a graph can not hold: an op without a C++ kernel, another
        attention backend.
    """
    if hidden.device.type != "cpu":
        return None
    graph = CpuGraph()
    recorder = _Recorder(graph)
    value = recorder.input(hidden.dtype, (SymbolicSize.tokens, hidden.shape[1]))
    rope = {
        kind: RopeRows(
            *(recorder.input(side.dtype, (SymbolicSize.tokens, side.shape[1])) for side in rows)
        )
        for kind, rows in step.rope.items()
    }
    table = type(step.tensors)
    tensors: dict[str, Any] = {
        name: recorder.step_tensor(spec, getattr(step.tensors, name))
        for name, spec in tensor_specs(table).items()
    }
    inputs = StepInputs(rope, table(**tensors))
    try:
        for index, (layer, caches) in enumerate(zip(layers, kv_cache, strict=True)):
            graph.begin_layer()
            program = layer.program.load(recorder.resolve)
            more = (tensors["logits_indices"],) if index == len(layers) - 1 else ()
            value = program(layer.parameters, value, inputs, *caches, *more)
        graph.set_result(value.slot)
    except (KeyError, AttributeError):  # what neither the graph nor the stand-ins have
        return None
    return CpuReplay(graph, hidden.shape[1], kv_cache, table)


class _Value:
    """Stands for a tensor while a program is recorded; has the methods that programs call."""

    def __init__(self, graph: CpuGraph, slot: Slot) -> None:
        self._graph = graph
        self.slot = slot

    def view(self, *sizes: int) -> Any:
        return _Value(self._graph, self._graph.view(self.slot, sizes))

    reshape = view  # of a kernel's result, which is contiguous

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> Any:
        if dim != 1:
            raise KeyError("parts of dimension 1 alone")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            _Value(self._graph, self._graph.slice(self.slot, start, size))
            for start, size in zip(starts, sizes, strict=True)
        ]


class _Recorder:
    """What a program's names stand for while it is recorded."""

    def __init__(self, graph: CpuGraph) -> None:
        self._graph = graph

    def input(self, dtype: torch.dtype, sizes: Sequence[int]) -> Any:
        return _Value(self._graph, self._graph.input(dtype, sizes))

    def step_tensor(self, spec: TensorSpec, example: Tensor) -> Any:
        size = spec.dynamic_size
        first = example.shape[0] if size is None else _SYMBOLIC_SIZES[size]
        return self.input(spec.dtype, (first, *example.shape[1:]))

    def resolve(self, path: str) -> Any:
        if path == "torch":
            functional = SimpleNamespace(embedding=self._gather)
            return SimpleNamespace(Tensor=Tensor, nn=SimpleNamespace(functional=functional))
        if not path.startswith(_OP_PREFIX):
            raise KeyError(path)
        op = resolve(path)

        def call(*arguments: Any) -> Any:
            if "cpu" not in arguments and op._schema.name == "ostinato::paged_attention":
                raise KeyError("another backend's kernel")
            if (reason := why_not_callable(op)) is not None:
                raise KeyError(reason)
            slots = [self._slot(argument) for argument in arguments]
            return _Value(self._graph, self._graph.call(op, slots))

        return call

    def _gather(self, rows: _Value, matrix: _Value) -> _Value:
        return _Value(self._graph, self._graph.index_select(matrix.slot, rows.slot))

    def _slot(self, value: Any) -> Any:
        if isinstance(value, _Value):
            return value.slot
        if not isinstance(value, Tensor):
            return value
        if (reason := why_not_constant(value)) is not None:
            raise KeyError(reason)
        return self._graph.constant(value)
