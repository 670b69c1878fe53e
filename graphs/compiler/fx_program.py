"""FX graphs of our own ops as Python source, without a compiler.

On a CPU a decoder layer is nine ops with C++ kernels and some views. There is nothing between them
that a compiler could fuse. Such a graph is lowered to a flat Python function without modules,
attributes or branches. The function is stored as text: a warm start loads it without Dynamo and
Inductor, whose imports take two seconds.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

__all__ = ("FxProgram", "lower_fx", "resolve")

_FUNCTIONS = {F.embedding, F.linear, operator.getitem}
_METHODS = {"reshape", "size", "split_with_sizes", "view"}

# Dynamo's name of a graph input: an argument, then its fields, items and sizes.
_SOURCE = re.compile(r"L\['(\w+)'\]((?:\.\w+|\[\d+\]|\['\w+'\]|\.size\(\)\[\d+\])*)")


_OP = re.compile(r"torch\.ops\.ostinato\.(\w+)\.default")


class FxProgram(msgspec.Struct, frozen=True):
    """A graph as text. `source` defines `program`, which has the traced function's arguments."""

    source: str
    names: dict[str, str]  # global name in the source -> "module" or "module:attribute"

    def load(self, resolve_name: Callable[[str], Any] | None = None) -> Callable[..., Any]:
        """The function.

        Args:
            resolve_name: gives the object for a path in `names`; None = `resolve`.
        """
        find = resolve if resolve_name is None else resolve_name
        names: dict[str, Any] = {name: find(path) for name, path in self.names.items()}
        exec(compile(self.source, "<straight-line program>", "exec"), names)
        return names["program"]


def resolve(path: str) -> Any:
    """The object that "module" or "module:attribute" names."""
    module, _, attribute = path.partition(":")
    value: Any = import_module(module)
    return operator.attrgetter(attribute)(value) if attribute else value


def lower_fx(graph_module: GraphModule, function: Callable[..., Any]) -> FxProgram | None:
    """The program of a graph that Dynamo traced.

    Args:
        graph_module: traced from `function`; unchanged.
        function: takes positional arguments and returns one tensor.

    Returns:
        None when the graph has operations other than our ops, matrix products, lookups and views:
        then a compiler could fuse some of them.
    """
    traced = graph_module.graph
    if not all(_is_plain(node) for node in traced.nodes):
        return None
    graph, copies = torch.fx.Graph(), {}
    graph.output(graph.graph_copy(traced, copies))
    values = []
    for node in traced.find_nodes(op="placeholder"):
        if not node.users:  # a size that the graph does not use
            graph.erase_node(copies[node])
            continue
        value = _expression(node)
        if value is None:
            return None
        values.append(value)
    code = graph.python_code("graph")
    body = _OP.sub(r"op_\1", code.src.strip())
    names = _used(body, code.globals)
    names |= {f"op_{op}": f"torch:ops.ostinato.{op}.default" for op in _OP.findall(code.src)}
    arguments = ", ".join(inspect.signature(function).parameters)
    source = (
        f"{body}\n\n\ndef program({arguments}):\n    return forward(None, {', '.join(values)})[0]\n"
    )
    program = FxProgram(source, names)
    program.load()  # raises if a name in it is missing
    return program


def _is_plain(node: Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "ostinato"
    return target in _FUNCTIONS


def _expression(node: Node) -> str | None:
    """An input as an expression of the arguments: `step.tensors.seq_lens`, `parameters[3]`."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    name: Any = source.name  # a method before torch 2.12
    match = _SOURCE.fullmatch(str(name() if callable(name) else name))
    return match[1] + match[2] if match else None


def _used(source: str, namespace: dict[str, Any]) -> dict[str, str]:
    """The globals that the source reads: name -> "module" or "module:attribute"."""
    used: dict[str, str] = {}
    for name, value in namespace.items():
        if not re.search(rf"\b{re.escape(name)}\b", source) or name in vars(builtins):
            continue
        if inspect.ismodule(value):
            used[name] = value.__name__
        else:
            used[name] = f"{value.__module__}:{value.__qualname__}"
    return used
