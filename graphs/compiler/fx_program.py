"""Lowers the FX graph of a layer that calls this package's ops to Python source.

On a CPU a layer of Llama is nine calls of ops with C++ kernels, and some views. A compiler could
fuse nothing between them. So such a graph becomes a flat Python function without modules
or branches. It is stored as text, because a warm start that imports Dynamo and Inductor
takes two seconds longer.

Torch ops between our ops are compiled: each sequence of them becomes a library (compiled_piece.py)
that the function calls.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from ostinato.graphs.compiler.compiled_piece import CompiledPiece, PieceCompiler

__all__ = ("METHODS", "FxFunction", "FxProgram", "Lowered", "lower_fx", "resolve")

_FUNCTIONS = {F.embedding, F.linear, operator.getitem}
METHODS = frozenset({"reshape", "size", "split_with_sizes", "view"})
"""The methods of tensors that a program can call."""

_OP = re.compile(r"torch\.ops\.ostinato\.(\w+)\.default")
_PIECE = "piece"


class FxProgram(msgspec.Struct, frozen=True):
    """A graph as text. `source` defines `program`, which has the traced function's arguments."""

    source: str
    names: dict[str, str]  # global name in the source -> "module", "module:attribute", "piece:0"
    pieces: list[bytes] = []  # library files
    obstacle: str | None = None  # why a CPU graph cannot hold it; None = no node forbids it


class FxFunction:
    """A program as a function, with its libraries loaded."""

    def __init__(self, program: FxProgram) -> None:
        self.program = program
        self.pieces = [
            CompiledPiece(data, f"inductor::{_PIECE}_{index}")
            for index, data in enumerate(program.pieces)
        ]
        self._function = self.bind(resolve, lambda piece: piece)

    def bind(
        self, find: Callable[[str], Any], call_piece: Callable[[CompiledPiece], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """The program's function, with other values for the global names.

        Args:
            find: gives the value of a path in `names`.
            call_piece: gives the function that stands for a library.
        """
        names: dict[str, Any] = {
            name: call_piece(self.pieces[int(path.removeprefix(f"{_PIECE}:"))])
            if path.startswith(f"{_PIECE}:")
            else find(path)
            for name, path in self.program.names.items()
        }
        exec(compile(self.program.source, "<FX program>", "exec"), names)
        return names["program"]

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class Lowered(NamedTuple):
    """The result of a trace and of `lower_fx`."""

    program: FxProgram | None
    # Why there is no program. If `trace_calls` gives none, Dynamo traces the function. If
    # `trace_fx` gives none, Inductor compiles the whole graph.
    reason: str | None


def resolve(path: str) -> Any:
    """The object that "module" or "module:attribute" names."""
    module, _, attribute = path.partition(":")
    value: Any = import_module(module)
    return operator.attrgetter(attribute)(value) if attribute else value


def lower_fx(
    traced: Graph,
    function: Callable[..., Any],
    sources: Mapping[Node, str | None],
    compiler: PieceCompiler,
) -> Lowered:
    """The program of a traced graph.

    A graph that has no torch ops besides views, look-ups and matrix products becomes a program. So
    does a graph with other torch ops, if it also calls ops of this package, and a CPU graph can
    hold the rest of it. There is no program if an input does not follow from the arguments, or if
    the other torch ops cannot be compiled apart.

    Args:
        traced: from `function`; unchanged.
        function: takes positional arguments and returns one tensor.
        sources: for each input of the graph, how it follows from the arguments, such as
            `step.tensors.seq_lens` or `parameters[3]`; None = it does not.
        compiler: compiles the torch ops between our ops.
    """
    obstacles = [reason for node in traced.nodes if (reason := _obstacle(node)) is not None]
    obstacle = obstacles[0] if obstacles else None
    runs = _foreign_runs(list(traced.nodes))
    if runs and not any(_is_own_op(node) for node in traced.nodes):
        return Lowered(None, "it has no op of this package")
    if runs and obstacle is not None:
        return Lowered(None, f"{obstacle}, and it has torch ops")
    for run in runs:
        if (reason := run.why_not_compiled()) is not None:
            return Lowered(None, reason)
    pieces = [compiler.compile(run.nodes, run.inputs, run.outputs) for run in runs]
    graph, copies = _copy(traced, runs)
    values = []
    for node in traced.find_nodes(op="placeholder"):
        if not copies[node].users:  # no op reads the input
            graph.erase_node(copies[node])
            continue
        value = sources[node]
        if value is None:
            return Lowered(None, f"its input {node} does not follow from the arguments")
        values.append(value)
    return Lowered(_as_text(graph, function, values, pieces, obstacle), None)


def _as_text(
    graph: Graph,
    function: Callable[..., Any],
    values: Sequence[str],
    pieces: list[bytes],
    obstacle: str | None,
) -> FxProgram:
    code = graph.python_code("graph")
    body = _OP.sub(r"op_\1", code.src.strip())
    names = _used(body, code.globals)
    names |= {f"op_{op}": f"torch:ops.ostinato.{op}.default" for op in _OP.findall(code.src)}
    arguments = ", ".join(inspect.signature(function).parameters)
    source = (
        f"{body}\n\n\ndef program({arguments}):\n    return forward(None, {', '.join(values)})[0]\n"
    )
    return FxProgram(source, names, pieces, obstacle)


class _Run:
    """Torch ops that follow one another, with the views and look-ups between them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    @property
    def inputs(self) -> list[Node]:
        """Tensors that the ops read from outside, in order, each once."""
        read = (source for node in self.nodes for source in node.all_input_nodes)
        return list(dict.fromkeys(source for source in read if source not in self.nodes))

    @property
    def outputs(self) -> list[Node]:
        """Nodes whose results are read outside."""
        return [node for node in self.nodes if any(user not in self.nodes for user in node.users)]

    @property
    def last_op(self) -> Node:
        return [node for node in self.nodes if not _is_plain(node)][-1]

    def why_not_compiled(self) -> str | None:
        """Why the run cannot be a library, or None."""
        for node in self.nodes:
            if node.op not in ("call_function", "call_method"):
                return f"it has a {node.op} node, {node.target}"
        for node in (*self.inputs, *self.outputs):
            if not isinstance(node.meta.get("example_value"), Tensor):
                return (
                    f"the torch ops at {self.nodes[0]} read or give {node}, which is not a tensor"
                )
        return None


def _foreign_runs(nodes: Sequence[Node]) -> list[_Run]:
    """The longest runs of torch ops without an op of ours between them."""
    runs: list[_Run] = []
    run_of: dict[Node, _Run] = {}
    current: _Run | None = None
    views: list[Node] = []  # since the last op of the current run
    for node in nodes:
        source = node.args[0] if node.args else None
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and isinstance(source, Node) and source in run_of:
            run_of[source].nodes.append(node)
            run_of[node] = run_of[source]
        elif _is_own_op(node):
            current, views = None, []
        elif _is_plain(node):
            views.append(node)
        else:
            if current is None:
                current, views = _Run(), []
                runs.append(current)
            for member in (*views, node):
                current.nodes.append(member)
                run_of[member] = current
            views = []
    return runs


def _copy(traced: Graph, runs: Sequence[_Run]) -> tuple[Graph, dict[Node, Node]]:
    """The graph with each run replaced by one call, at the place of the run's last op."""
    graph, copies = Graph(), {}
    run_of = {node: (index, run) for index, run in enumerate(runs) for node in run.nodes}
    for node in traced.nodes:
        if node not in run_of:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
            continue
        index, run = run_of[node]
        if node is not run.last_op:
            continue
        call = graph.call_function(_piece(index), tuple(copies[source] for source in run.inputs))
        for number, output in enumerate(run.outputs):
            copies[output] = graph.call_function(operator.getitem, (call, number))
    return graph, copies


def _piece(index: int) -> Callable[..., Any]:
    """Stands for a library in a graph; FX names it by its module and its name."""

    def call(*inputs: Tensor) -> list[Tensor]:
        raise AssertionError("only its name is used")

    call.__module__, call.__name__, call.__qualname__ = _PIECE, f"{_PIECE}_{index}", str(index)
    return call


def _is_own_op(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "ostinato"


def _is_plain(node: Node) -> bool:
    """Whether the node needs no compiler: our ops, matrix products, look-ups and views."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_method":
        return node.target in METHODS
    return node.op == "call_function" and (_is_own_op(node) or node.target in _FUNCTIONS)


def _obstacle(node: Node) -> str | None:
    """Why a CPU graph cannot hold this node, or None. Other torch ops are compiled apart."""
    match node.target:
        case "size":
            return "it reads a size that differs between steps"
        case "view" | "reshape" if not all(isinstance(size, int) for size in node.args[1:]):
            return f"{node.target} needs a size that differs between steps"
        case "split_with_sizes" if _argument(node, 2, "dim") != 1:
            return "split_with_sizes splits a dimension other than 1"
        case F.linear:
            return "torch.nn.functional.linear has no C++ kernel here"
        # By name, because the op is not registered in a process whose model does not use it.
        case op if str(op) == "ostinato.rotary_attention.default":
            return f"attention runs on the backend {node.args[-1]}"
        case torch.ops.ostinato.paged_attention.default if node.args[-1] != "cpu":
            return f"attention runs on the backend {node.args[-1]}"
        case op if str(op) == "ostinato.cross_attention.default" and node.args[-1] != "cpu":
            return f"attention runs on the backend {node.args[-1]}"
        case _:
            return None


def _argument(node: Node, index: int, name: str) -> object:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _used(source: str, namespace: dict[str, Any]) -> dict[str, str]:
    """The globals that the source reads, with their paths, as in `FxProgram.names`."""
    used: dict[str, str] = {}
    for name, value in namespace.items():
        if not re.search(rf"\b{re.escape(name)}\b", source) or name in vars(builtins):
            continue
        if inspect.ismodule(value):
            used[name] = value.__name__
        elif isinstance(value, float):  # FX names inf and nan, which are no literals
            used[name] = f"math:{name}"
        else:
            used[name] = f"{value.__module__}:{value.__qualname__}"
    return used
