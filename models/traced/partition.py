"""Cuts a traced graph into the parts of a `LanguageModel`: before the layers, each layer, after.

A layer may read the hidden states of the layer before it, and values that depend on positions only.
Such values are computed once for all positions and stored as a table with a row for each position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ostinato.models.traced.graph_values import inputs_of, traced_module
from ostinato.models.traced.leaf_modules import LinearLeaf
from ostinato.models.traced.model_trace import ModelTrace

__all__ = ("LayerPart", "Partition", "compute_table", "partition")

_CHECKED_POSITIONS = 9


@dataclass(frozen=True, slots=True, eq=False)
class LayerPart:
    """The nodes of one layer."""

    nodes: tuple[Node, ...]
    hidden: Node  # the layer's input
    result: Node
    tables: tuple[Node, ...]  # values by position that the layer reads


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The parts of a traced graph. Its inputs are token ids and positions."""

    ids: Node
    positions: Node
    begin: tuple[Node, ...]  # nodes that compute the input of the first layer
    layers: tuple[LayerPart, ...]
    finish: tuple[Node, ...]  # from the last layer to the input of the output head
    head: Node  # the output head's call
    logits: tuple[Node, ...]  # after the head
    result: Node
    tables: tuple[Node, ...]  # the tables of all layers, each once


def partition(trace: ModelTrace) -> Partition:
    """Cut a traced graph.

    Raises:
        ValueError: the graph has no such parts; the text says why.
    """
    graph = trace.graph.graph
    ids, positions, padding = list(graph.find_nodes(op="placeholder"))[-3:]
    if padding.users:
        raise ValueError(f"{_kind(trace)} reads the padding mask")
    (output,) = graph.find_nodes(op="output")
    result = output.all_input_nodes[0]
    from_ids, from_positions = _descendants(ids), _descendants(positions)
    groups: list[list[Node]] = [[] for _ in range(len(trace.layers) + 2)]
    group_of: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not _is_size(node):
            group_of[node] = _group(trace, node)
            groups[group_of[node]].append(node)
    boundary, tables_of = [], []
    for index, nodes in enumerate(groups[1:], start=1):
        inputs = _outer_inputs(nodes)
        hidden = [node for node in inputs if node in from_ids]
        if len(hidden) != 1 or group_of.get(hidden[0]) != index - 1:
            where = trace.layers[index - 1] if index <= len(trace.layers) else "the head"
            names = ", ".join(node.name for node in hidden)
            raise ValueError(
                f"{_kind(trace)}: {where} must read the hidden states of the layer before it "
                f"and nothing else that depends on the tokens; it reads {names or 'none'}"
            )
        boundary.append(hidden[0])
        tables_of.append(tuple(node for node in inputs if node in from_positions - from_ids))
        groups[index] = _with_constants(nodes, from_ids | from_positions)
    head = _head(trace, groups[-1])
    before_head = _ancestors(inputs_of(head)[:1], set(groups[-1]))
    begin = _ancestors([boundary[0]], set(groups[0]))
    layers = tuple(
        LayerPart(tuple(groups[index + 1]), boundary[index], boundary[index + 1], tables)
        for index, tables in enumerate(tables_of[:-1])
    )
    if tables_of[-1]:
        raise ValueError(f"{_kind(trace)} reads positions after its layers")
    after = _ancestors([result], set(groups[-1]))
    rest = [node for node in groups[-1] if node in after - before_head and node is not head]
    return Partition(
        ids,
        positions,
        tuple(node for node in groups[0] if node in begin),
        layers,
        tuple(node for node in groups[-1] if node in before_head),
        head,
        tuple(rest),
        result,
        tuple(dict.fromkeys(node for tables in tables_of for node in tables)),
    )


@torch.no_grad()
def compute_table(trace: ModelTrace, table: Node, num_positions: int) -> Tensor:
    """The rows of a table at positions 0 to num_positions - 1: [num_positions, ...].

    Raises:
        ValueError: a row does not follow from its position alone, or is computed with weights.
    """
    whole = _run_table(trace, table, torch.arange(num_positions))
    few = torch.arange(min(_CHECKED_POSITIONS, num_positions))
    if not torch.equal(_run_table(trace, table, few), whole[: len(few)]):
        raise ValueError(
            f"{_kind(trace)} computes its positions from the length of a sequence "
            f"({table.name}); a cached key would be wrong when the sequence grows"
        )
    return whole


def _run_table(trace: ModelTrace, table: Node, positions: Tensor) -> Tensor:
    graph = trace.graph.graph
    inputs = list(graph.find_nodes(op="placeholder"))[-3:]
    values: dict[Node, Any] = {inputs[1]: positions[None]}
    # The traced graph takes sizes from the token ids. Here sizes are constants, so no token ids
    # are needed.
    needed = _ancestors([table], {node for node in graph.nodes if not _is_size(node)})
    for node in graph.nodes:
        if _is_size(node) and node.op == "call_function":
            values[node] = len(positions)
            continue
        if node not in needed or node in values:
            continue
        if node.op == "placeholder":
            values[node] = _buffer(trace, node).clone()
        elif node.op == "get_attr":
            values[node] = getattr(trace.graph, str(node.target))
        elif node.target is traced_module:
            raise ValueError(f"{_kind(trace)} computes {table.name} with weights")
        else:
            target: Any = node.target
            arguments = map_arg((node.args, node.kwargs), lambda arg: values[arg])
            positional, keywords = arguments
            values[node] = target(*positional, **keywords)
    rows = values[table]
    if rows.shape[0] != 1 or rows.dim() < 2 or rows.shape[1] != len(positions):
        raise ValueError(f"{_kind(trace)}: {table.name} has no row for each position")
    return rows[0]


def _buffer(trace: ModelTrace, node: Node) -> Tensor:
    name = trace.tensors.get(node.name)
    tensor = None if name is None else dict(trace.model.named_buffers()).get(name)
    if tensor is None or tensor.is_meta:
        raise ValueError(f"{_kind(trace)} computes positions from {name or node.name}")
    return tensor


def _kind(trace: ModelTrace) -> str:
    return type(trace.model).__name__


def _group(trace: ModelTrace, node: Node) -> int:
    """The part of a node: 0 = before the layers, i + 1 = layer i, num_layers + 1 = after them."""
    num_layers = len(trace.layers)
    section = trace.sections.get(node.name, 2 * num_layers)
    return min((section + 1) // 2, num_layers + 1) if section < 2 * num_layers else num_layers + 1


def _is_size(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), Tensor | list | tuple)


def _outer_inputs(nodes: Iterable[Node]) -> list[Node]:
    own = set(nodes)
    found = {
        source: None
        for node in nodes
        for source in node.all_input_nodes
        if source not in own and not _is_size(source)
    }
    return list(found)


def _with_constants(nodes: list[Node], variable: set[Node]) -> list[Node]:
    """The constant nodes of other parts that these nodes need, then these nodes."""
    own = set(nodes)
    constant = [
        node for node in _outer_inputs(nodes) if node not in variable and node.op == "call_function"
    ]
    needed = _ancestors(constant, set(constant[0].graph.nodes) - own) if constant else set()
    calls = [node for node in needed if node.op == "call_function" and not _is_size(node)]
    order = {node: place for place, node in enumerate(nodes[0].graph.nodes)} if calls else {}
    return sorted(calls, key=lambda node: order[node]) + nodes


def _descendants(node: Node) -> set[Node]:
    found, todo = set(), [node]
    while todo:
        current = todo.pop()
        for user in current.users:
            if user not in found and not _is_size(user):
                found.add(user)
                todo.append(user)
    return found | {node}


def _ancestors(nodes: Iterable[Node], within: set[Node]) -> set[Node]:
    found, todo = set(), [node for node in nodes if node in within]
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            todo += [source for source in current.all_input_nodes if source in within]
    return found


def _head(trace: ModelTrace, nodes: list[Node]) -> Node:
    """The call of the output head."""
    head = trace.model.get_output_embeddings()
    for node in nodes:
        if node.target is traced_module:
            name = str(node.args[2])
            is_linear = isinstance(trace.leaves[name], LinearLeaf)
            if is_linear and trace.model.get_submodule(name) is head:
                return node
    raise ValueError(f"{_kind(trace)} has no linear output head")
