"""Capture on a CPU: the FX programs of consecutive layers as one CPU graph, which C++ replays.

A small decode step spends as much time between its ops as in them: Python and dispatch take about
45 microseconds a layer. The layers' programs are run once with stand-ins for tensors, which record
the calls. Later steps replay these calls in C++ (ops/native/core/cpu_graph.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.graphs.compiler.compiled_piece import CompiledPiece
from ostinato.graphs.compiler.fx_program import FxFunction, resolve
from ostinato.models.step_tensors import (
    ForwardBatch,
    Size,
    StepInputs,
    TensorSpec,
    given_tensors,
)
from ostinato.ops.native.abi import SymbolicSize
from ostinato.ops.native.cpu_graph import CpuGraph, Slot, why_not_callable, why_not_constant

__all__ = ("CpuReplay", "LayerCall", "capture_layers", "why_not_captured")

_OP_PREFIX = "torch:ops.ostinato."
_SYMBOLIC_SIZES = {
    Size.tokens: SymbolicSize.tokens,
    Size.seqs: SymbolicSize.seqs,
    Size.seqs_plus_one: SymbolicSize.seqs_and_one,
    Size.rows: SymbolicSize.rows,
}


class LayerCall(NamedTuple):
    """A layer's program and the tensors of that layer."""

    function: FxFunction
    parameters: list[Tensor]


class CpuReplay:
    """A captured CPU graph of consecutive layers of a model, over their KV caches."""

    def __init__(
        self, graph: CpuGraph, hidden_size: int, step_tensors: Collection[str], *, gives_rows: bool
    ) -> None:
        """
        Args:
            graph: the calls of the layers.
            hidden_size: D.
            step_tensors: the names of the step tensors that are inputs of the graph, in order.
            gives_rows: the result has the wanted tokens only, as the model's last layer gives them.
        """
        self._graph = graph
        self._hidden_size = hidden_size
        self._gives_rows = gives_rows
        self._get_tensors = attrgetter(*step_tensors)
        self._bound: ForwardBatch | None = None  # `_addresses` are the addresses of its tensors
        self._sizes = (0, 0)  # S and R of `_bound`
        self._addresses = (ctypes.c_void_p * 0)()

    def __call__(self, hidden: Tensor, step: StepInputs) -> Tensor:
        """The result of the layers' programs: hidden [T, D], contiguous -> [T, D], or [R, D] of
        `logits_indices`.
        """
        computed = (hidden, *chain.from_iterable(step.rope.values()))
        if step.tensors is not self._bound:
            self._bind(step.tensors, len(computed))
        for index, tensor in enumerate(computed):
            self._addresses[index] = tensor.data_ptr()
        num_tokens, (num_seqs, num_rows) = hidden.shape[0], self._sizes
        size = num_rows if self._gives_rows else num_tokens
        out = hidden.new_empty((size, self._hidden_size))
        self._graph.replay(num_tokens, num_seqs, num_rows, self._addresses, out)
        return out

    def _bind(self, tensors: ForwardBatch, num_computed: int) -> None:
        """Keep the addresses of step tensors. All steps of one bucket pass the same tensors."""
        addresses = [tensor.data_ptr() for tensor in self._get_tensors(tensors)]
        self._addresses = (ctypes.c_void_p * (num_computed + len(addresses)))()
        self._addresses[num_computed:] = addresses
        self._sizes = len(tensors.seq_lens), len(tensors.logits_indices)
        self._bound = tensors


def why_not_captured(layer: LayerCall) -> str | None:
    """Why a CPU graph cannot hold this layer, or None when it can."""
    program = layer.function.program
    if program.obstacle is not None:
        return program.obstacle
    for path in program.names.values():
        if path.startswith(_OP_PREFIX) and (reason := why_not_callable(resolve(path))) is not None:
            return reason
    for tensor in layer.parameters:
        if (reason := why_not_constant(tensor)) is not None:
            return reason
    return None


def capture_layers(
    layers: Sequence[LayerCall],
    kv_cache: Sequence[tuple[Tensor, Tensor]],
    hidden: Tensor,
    step: StepInputs,
    *,
    has_last: bool,
) -> CpuReplay:
    """Record consecutive layers of a model. Nothing is computed.

    Args:
        layers: in order; `why_not_captured` is None for each.
        kv_cache: the cache of these layers.
        hidden: [T, D] of any step; its type and its constant size are read.
        step: the inputs of the same step.
        has_last: whether the last of `layers` is the model's last. That layer's program also takes
            the wanted rows.
    """
    graph = CpuGraph()
    recorder = _Recorder(graph)
    value = recorder.input(hidden.dtype, (SymbolicSize.tokens, hidden.shape[1]))
    rope = {
        kind: type(rows)(
            *(recorder.input(side.dtype, (SymbolicSize.tokens, side.shape[1])) for side in rows)
        )
        for kind, rows in step.rope.items()
    }
    table = type(step.tensors)
    tensors: dict[str, Any] = {
        name: recorder.step_tensor(spec, tensor)
        for name, (spec, tensor) in given_tensors(step.tensors).items()
    }
    inputs = StepInputs(rope, table(**tensors))
    for index, (layer, caches) in enumerate(zip(layers, kv_cache, strict=True)):
        graph.begin_layer()
        program = layer.function.bind(recorder.resolve, recorder.call_piece)
        more = (tensors["logits_indices"],) if has_last and index == len(layers) - 1 else ()
        value = program(layer.parameters, value, inputs, *caches, *more)
    graph.set_result(value.slot)
    return CpuReplay(graph, hidden.shape[1], list(tensors), gives_rows=has_last)


class _Value:
    """Stands for a tensor while a program is recorded; has the methods that programs call."""

    def __init__(self, graph: CpuGraph, slot: Slot) -> None:
        self._graph = graph
        self.slot = slot

    def view(self, *sizes: int) -> Any:
        return _Value(self._graph, self._graph.view(self.slot, sizes))

    reshape = view

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> Any:
        assert dim == 1, "lower_fx lets no other dimension through"
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            _Value(self._graph, self._graph.slice(self.slot, start, size))
            for start, size in zip(starts, sizes, strict=True)
        ]


class _Recorder:
    """Values for the global names of a program while it is recorded."""

    def __init__(self, graph: CpuGraph) -> None:
        self._graph = graph

    def input(self, dtype: torch.dtype, sizes: Sequence[int]) -> Any:
        return _Value(self._graph, self._graph.input(dtype, sizes))

    def step_tensor(self, spec: TensorSpec, example: Tensor) -> Any:
        """The input for a step tensor. Constant sizes are taken from `example`."""
        sizes = list(example.shape)
        if spec.dynamic_size is not None:
            sizes[0] = _SYMBOLIC_SIZES[spec.dynamic_size]
        return self.input(spec.dtype, sizes)

    def resolve(self, path: str) -> Any:
        """The value of a global name: an op of ours, a stand-in for the module torch, or inf."""
        if path == "torch":
            functional = SimpleNamespace(embedding=self._index_select)
            return SimpleNamespace(Tensor=Tensor, nn=SimpleNamespace(functional=functional))
        if path.startswith("math:"):
            return resolve(path)
        assert path.startswith(_OP_PREFIX), f"lower_fx lets {path} through, which is not recorded"
        op = resolve(path)

        def call(*arguments: Any) -> Any:
            slots = [self._slot(argument) for argument in arguments]
            results = [_Value(self._graph, slot) for slot in self._graph.call(op, slots)]
            return results[0] if len(results) == 1 else results

        return call

    def call_piece(self, piece: CompiledPiece) -> Callable[..., Any]:
        """The value of a name that stands for a compiled library."""

        def call(*arguments: Any) -> Any:
            slots = [self._slot(argument) for argument in arguments]
            results = self._graph.call_compiled(piece, slots)
            return [_Value(self._graph, slot) for slot in results]

        return call

    def _index_select(self, rows: _Value, matrix: _Value) -> _Value:
        return _Value(self._graph, self._graph.index_select(matrix.slot, rows.slot))

    def _slot(self, value: Any) -> Any:
        if isinstance(value, _Value):
            return value.slot
        return self._graph.constant(value) if isinstance(value, Tensor) else value
