"""Traces a function that calls only this package's ops: runs it and records its torch calls.

Dynamo can trace any function, but its import and a trace take three to four seconds of CPU time.
Most layers on a CPU call only ops of this package, views, look-ups and matrix products. For
such a layer it is enough to call it with example tensors and to record these calls. Nothing is
computed: an op's fake function returns tensors of the right shapes.

A recorded call has the sizes of the example as numbers. So the function is recorded with two
examples. All sizes that differ between steps differ between the examples too, and those of the
second are much larger (`example_batch`). If the two programs differ, a number or a branch in them
depends on the step, and Dynamo must trace the function. A number or a branch that depends on a size
and is the same in both examples is not noticed.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ostinato.graphs.compiler.compiled_piece import PieceCompiler
from ostinato.graphs.compiler.dynamo_trace import Example
from ostinato.graphs.compiler.fx_program import METHODS, Lowered, lower_fx
from ostinato.ops.register import fake_of

__all__ = ("trace_calls",)

_METHODS = {getattr(Tensor, name): name for name in METHODS - {"size"}}  # they make views
_QUERIES = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__}


class _NotRecorded(Exception):
    """The function cannot be recorded; the text says why."""


def trace_calls(
    function: Callable[..., Any], examples: Sequence[Example], pieces: PieceCompiler
) -> Lowered:
    """`function` as an FX program, or why Dynamo must trace it.

    Args:
        function: takes positional arguments and returns one tensor.
        examples: two, in which all sizes that differ between steps differ.
        pieces: passed to `lower_fx`, which compiles nothing with it: functions with torch ops that
            need a compiler are not recorded.
    """
    try:
        first, second = (_record(function, each.arguments, pieces) for each in examples)
    # The code of a model can raise anything for tensors without values. Dynamo runs it again, and
    # reports what is wrong with the model.
    except Exception as error:
        return Lowered(None, _reason(error))
    if first.program != second.program:
        return Lowered(None, "a number or a branch in it depends on the sizes of the step")
    return first


def _record(
    function: Callable[..., Any], arguments: tuple[Any, ...], pieces: PieceCompiler
) -> Lowered:
    recorder = _Recorder()
    named = zip(inspect.signature(function).parameters, arguments, strict=True)
    # A tensor can be an argument and also a step tensor. Arguments that are tensors are added
    # first, so the program reads the argument.
    for name, argument in sorted(named, key=lambda pair: not isinstance(pair[1], Tensor)):
        recorder.add_inputs(name, argument)
    with recorder:
        result = function(*arguments)
    graph = recorder.finish(result)
    return lower_fx(graph, function, recorder.sources, pieces)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _NotRecorded) else f"{type(error).__name__}: {error}"


class _Recorder(TorchFunctionMode):
    """Records the torch calls that are made while it is entered.

    Attributes:
        sources: how each input of the graph follows from the function's arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[Node, str] = {}
        self._graph = Graph()
        self._nodes: dict[int, Node] = {}  # by `id` of a tensor in `_kept`
        self._kept: list[Tensor] = []
        self._refusal: str | None = None  # why the first call that failed is not recorded

    def add_inputs(self, source: str, value: Any) -> None:
        """Add the tensors in an argument: in lists, mappings, named tuples and dataclasses."""
        if isinstance(value, Tensor):
            if id(value) not in self._nodes:
                node = self._graph.placeholder(re.sub(r"\W+", "_", source))
                self.sources[node] = source
                self._keep(value, node)
            return
        for part, element in _parts(value):
            self.add_inputs(source + part, element)

    def finish(self, result: object) -> Graph:
        """The graph of a function that returned `result`.

        Raises:
            _NotRecorded: a call was not recorded, or the result is no tensor of a recorded call.
        """
        # The function may have caught the error of the call.
        if self._refusal is not None:
            raise _NotRecorded(self._refusal)
        if not isinstance(result, Tensor):
            raise _NotRecorded(f"its result is a {type(result).__name__}, not a tensor")
        self._graph.output((self._node(result),))
        for node in reversed(self._graph.find_nodes(op="call_function", target=operator.getitem)):
            if not node.users:
                self._graph.erase_node(node)
        return self._graph

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle one call. Computed results have undefined values."""
        try:
            return self._record(func, args, dict(kwargs or {}))
        except Exception as error:  # also a TypeError for a keyword that `_embedding` lacks
            self._refusal = self._refusal or _reason(error)
            raise

    def _record(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in _QUERIES or getattr(func, "__name__", "") == "__get__":  # x.size(0), x.dtype
            return func(*args, **kwargs)
        if (name := _METHODS.get(func)) is not None:
            result = func(*args, **kwargs)
            node = self._graph.call_method(name, *self._as_nodes(args, kwargs))
        elif (shape := _shape_of(func)) is not None:
            kwargs = _without_defaults(func, kwargs)
            result = shape(*args, **kwargs)
            node = self._graph.call_function(func, *self._as_nodes(args, kwargs))
        else:
            raise _NotRecorded(f"it calls {getattr(func, '__name__', func)}")
        self._keep_results(result, node)
        return result

    def _as_nodes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def node_of(value: Any) -> Any:
            return self._node(value) if isinstance(value, Tensor) else value

        return map_aggregate(args, node_of), map_aggregate(kwargs, node_of)

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._nodes:  # a constant of the function
            shape = tuple(tensor.shape)
            raise _NotRecorded(f"it reads a tensor of shape {shape} that is not an argument")
        return self._nodes[id(tensor)]

    def _keep_results(self, result: Any, node: Node) -> None:
        if isinstance(result, Tensor):
            self._keep(result, node)
        elif isinstance(result, tuple | list):
            for index, element in enumerate(result):
                item = self._graph.call_function(operator.getitem, (node, index))
                self._keep_results(element, item)

    def _keep(self, tensor: Tensor, node: Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The elements of an argument, and how an expression selects each of them."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", element) for key, element in value.items()]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(value, "_fields"):  # a named tuple
        names = value._fields
    elif isinstance(value, Sequence) and not isinstance(value, str):
        return [(f"[{index}]", element) for index, element in enumerate(value)]
    else:
        return []
    return [(f".{name}", getattr(value, name)) for name in names]


def _shape_of(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function that gives results like those of `func` without their values, or None."""
    if func is F.linear:
        return _linear
    if func is F.embedding:
        return _embedding
    return fake_of(func)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _embedding(rows: Tensor, matrix: Tensor) -> Tensor:
    return matrix.new_empty((*rows.shape, *matrix.shape[1:]))


def _without_defaults(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords whose values are not the defaults.

    Python functions of torch also pass on keywords that the caller left out.
    """
    if func is not F.embedding:
        return kwargs
    defaults = inspect.signature(func).parameters
    return {name: value for name, value in kwargs.items() if value != defaults[name].default}
