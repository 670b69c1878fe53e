"""Fuses torch operations in the graph of a traced part into this project's ops.

| in the graph | becomes |
|---|---|
| linear layers that read one tensor | one matrix |
| activation(gate) * up, activation(x) | `activate` |
| x * cos + rotate_half(x) * sin | `rotate_heads`, one call for queries and keys |
| the same for interleaved pairs | the same call; the rows of two matrices get another order |
| an RMS norm of each head before the rotation | weights in the call of `rotate_heads` |
| linear(x) + y, norm(x) + y | the module with y as its residual |

Operations that no rule matches stay as they are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ostinato.models.traced.graph_values import (
    drop_unused,
    in_order,
    input_of,
    integers_of,
    shape_of,
)
from ostinato.models.traced.leaf_modules import Leaf, LinearLeaf, NormLeaf
from ostinato.models.traced.rotations import (
    Repeats,
    Rotations,
    fuse_rotations,
    join_rotations,
)
from ostinato.models.traced.traced_modules import rows_of
from ostinato.ops.activation import activate

__all__ = ("Fused", "fuse")

_aten = torch.ops.aten
_HIDDEN_DIMS = 2  # [T, D]


@dataclass(slots=True)
class Fused:
    """The changes of `fuse`. The caller builds modules and inputs from them."""

    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)  # new module -> its parts
    rotations: Rotations = field(default_factory=Rotations)


def fuse(
    graph: Graph,
    leaves: Mapping[str, Leaf],
    repeats: Callable[[Node], Repeats | None] = lambda node: None,
    rows: Node | None = None,
) -> Fused:
    """Rewrite a graph in place.

    Args:
        graph: a part's graph, with an output.
        leaves: the modules that it calls, by target.
        repeats: returns how each number is repeated in the rows of a table; None = it is not.
        rows: the input with the numbers of the rows that are wanted; None = all rows are wanted.
    """
    fused = Fused()
    _merge_linears(graph, leaves, fused)
    _fuse_activations(graph)
    fused.rotations = fuse_rotations(graph, leaves, fused.merged, repeats)
    _fuse_residuals(graph, leaves)
    _cancel_copies(graph)
    drop_unused(graph)
    join_rotations(graph, leaves)
    drop_unused(graph)
    if rows is not None:
        _select_rows(graph, rows)
    graph.lint()
    return fused


def _merge_linears(graph: Graph, leaves: Mapping[str, Leaf], fused: Fused) -> None:
    """Stack the matrices of linear layers that read the same tensor.

    This is done only if no part of the result has to be copied: all parts are attention heads, or
    the two parts are a gate and its factor.
    """
    groups: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_module"):
        leaf = leaves.get(str(node.target))
        if isinstance(leaf, LinearLeaf):
            parent = str(node.target).rpartition(".")[0]
            groups[(node.args[0], parent, leaf.has_bias, leaf.dtype)].append(node)
    for (source, parent, *_), nodes in groups.items():
        targets = [str(node.target) for node in nodes]
        if len(nodes) < 2 or len(set(targets)) != len(targets):
            continue
        head_dim = _common_head_dim(nodes)
        if head_dim is None and not _are_gate_and_factor(nodes):
            continue
        sizes = [_out_features(leaves[target]) for target in targets]
        name = "_".join(target.rpartition(".")[2] for target in targets)
        target = f"{parent}.{name}" if parent else name
        fused.merged[target] = tuple(targets)
        with graph.inserting_before(nodes[0]):
            merged = graph.call_module(target, (source,))
            if head_dim is not None:
                heads = graph.call_method("reshape", (merged, -1, sum(sizes) // head_dim, head_dim))
                sizes = [size // head_dim for size in sizes]
                merged, nodes = heads, [next(iter(node.users)) for node in nodes]
            split = graph.call_method("split_with_sizes", (merged, sizes, 1))
            items = [
                graph.call_function(operator.getitem, (split, index)) for index in range(len(nodes))
            ]
        for node, item in zip(nodes, items, strict=True):
            item.meta = node.meta
            node.replace_all_uses_with(item)


def _common_head_dim(nodes: list[Node]) -> int | None:
    """The head size if each of the results is only viewed as heads of one size."""
    views = [next(iter(node.users)) if len(node.users) == 1 else None for node in nodes]
    shapes: list[tuple[Any, ...]] = [
        view.args[1:] for view in views if view is not None and view.target == "reshape"
    ]
    is_heads = len(shapes) == len(nodes) and all(
        len(shape) == 3 and shape[0] == -1 and shape[2] == shapes[0][2] for shape in shapes
    )
    return int(shapes[0][2]) if is_heads else None


def _are_gate_and_factor(nodes: list[Node]) -> bool:
    """Whether two results are multiplied, after an activation of the first."""
    if len(nodes) != 2 or any(len(node.users) != 1 for node in nodes):
        return False
    activation, product = (next(iter(node.users)) for node in nodes)
    return (
        _activation_name(activation) is not None
        and list(activation.users) == [product]
        and product.target is _aten.mul.Tensor
        and [str(size) for size in shape_of(nodes[0])] == [str(size) for size in shape_of(nodes[1])]
    )


def _out_features(leaf: Leaf) -> int:
    assert isinstance(leaf, LinearLeaf), "it is a linear layer"
    return leaf.out_features


def _fuse_activations(graph: Graph) -> None:
    for node in list(graph.nodes):
        name = _activation_name(node)
        if name is None or len(shape_of(node)) != _HIDDEN_DIMS:
            continue
        (source,) = node.all_input_nodes
        product = next(iter(node.users)) if len(node.users) == 1 else None
        merged = None if product is None else _gated(product, node, source)
        with graph.inserting_before(product if merged is not None else node):
            if merged is not None and product is not None:
                new = graph.call_function(activate, (merged, name), {"gated": True})
            else:
                product, new = node, graph.call_function(activate, (source, name))
        assert product is not None, "it was found above"
        new.meta = product.meta
        product.replace_all_uses_with(new)


def _activation_name(node: Node) -> str | None:
    if node.target is _aten.gelu.default:
        exact = node.kwargs.get("approximate", "none") == "none"
        return "gelu" if exact else "gelu_pytorch_tanh"
    names: dict[Any, str] = {_aten.silu.default: "silu", _aten.relu.default: "relu"}
    return names.get(node.target)


def _gated(product: Node, activation: Node, gate: Node) -> Node | None:
    """The merged matrix's result if `product` is activation(first half) * second half."""
    if product.target is not _aten.mul.Tensor:
        return None
    factors = [node for node in product.args if node is not activation]
    if len(factors) != 1 or not isinstance(factors[0], Node):
        return None
    up = factors[0]
    if gate.target is not operator.getitem or up.target is not operator.getitem:
        return None
    split = input_of(gate)
    if split is not up.args[0] or (gate.args[1], up.args[1]) != (0, 1):
        return None
    if split.target != "split_with_sizes" or split.args[2] != 1:
        return None
    merged, sizes = input_of(split), integers_of(split, 1)
    is_two = merged.op == "call_module" and len(set(sizes)) == 1 and len(sizes) == 2
    return merged if is_two else None


def _cancel_copies(graph: Graph) -> None:
    """Remove pairs of transpositions that cancel out, and copies of values that are contiguous."""
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "transpose":
            source = input_of(node)
            if source.target == "transpose" and source.args[1:] == node.args[1:]:
                inner = input_of(source)
                node.replace_all_uses_with(inner)
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "contiguous":
            source = input_of(node)
            if in_order(source):
                node.replace_all_uses_with(source)


def _fuse_residuals(graph: Graph, leaves: Mapping[str, Leaf]) -> None:
    for node in list(graph.nodes):
        if node.target is not _aten.add.Tensor or node.kwargs:
            continue
        for result, other in (node.args, node.args[::-1]):
            if isinstance(result, Node) and _takes_residual(result, other, leaves):
                with graph.inserting_before(node):
                    new = graph.call_module(str(result.target), (result.args[0], other))
                new.meta = node.meta
                node.replace_all_uses_with(new)
                graph.erase_node(node)
                break


def _takes_residual(result: Node, other: Any, leaves: Mapping[str, Leaf]) -> bool:
    """Whether a module's result, which nothing else reads, can be added to `other`."""
    if not isinstance(other, Node) or result.op != "call_module":
        return False
    leaf = leaves.get(str(result.target))
    is_fit = isinstance(leaf, LinearLeaf) or (isinstance(leaf, NormLeaf) and leaf.kind != "layer")
    has_room = len(result.args) == 1 and len(result.users) == 1
    same = [str(size) for size in shape_of(result)] == [str(size) for size in shape_of(other)]
    return is_fit and has_room and same and len(shape_of(result)) == _HIDDEN_DIMS


def _select_rows(graph: Graph, rows: Node) -> None:
    """Drop unwanted rows after attention, or if that is impossible, at the end of the layer.

    After attention, a token's values depend on values of the same token only.
    """
    (attention,) = (
        node for node in graph.find_nodes(op="call_module") if node.target == "attention"
    )
    (output,) = graph.find_nodes(op="output")
    flat = next(iter(attention.users)) if len(attention.users) == 1 else None
    later = _later(flat) if flat is not None and flat.target == "reshape" else set()
    crossing = [
        (node, source)
        for node in graph.nodes
        if node in later
        for source in node.all_input_nodes
        if source not in later and source is not flat and _has_tokens(source)
    ]
    is_2d = all(len(shape_of(source)) == _HIDDEN_DIMS for _, source in crossing)
    if flat is None or flat.target != "reshape" or not is_2d:
        result = output.all_input_nodes[0]
        with graph.inserting_before(output):
            output.replace_input_with(result, graph.call_function(rows_of, (result, rows)))
        return
    with graph.inserting_after(flat):
        fewer = graph.call_function(rows_of, (flat, rows))
    flat.replace_all_uses_with(fewer, delete_user_cb=lambda user: user is not fewer)
    chosen: dict[Node, Node] = {}
    for node, source in crossing:
        if source not in chosen:
            with graph.inserting_before(node):
                chosen[source] = graph.call_function(rows_of, (source, rows))
        node.replace_input_with(source, chosen[source])


def _later(node: Node) -> set[Node]:
    """All nodes that depend on this one, without the output."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user not in found and user.op != "output":
                found.add(user)
                todo.append(user)
    return found


def _has_tokens(node: Node) -> bool:
    """Whether a value can have a row for each token."""
    shape = shape_of(node)
    is_constant = bool(shape) and not any(isinstance(size, torch.SymInt) for size in shape)
    return node.op != "get_attr" and not is_constant
