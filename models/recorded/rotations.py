"""Finds rotary embeddings in the graph of a recorded part, and replaces them by `rotate_heads`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from ostinato.models.recorded.graph_values import shape_of, transposed
from ostinato.models.recorded.leaf_modules import Leaf, NormLeaf
from ostinato.ops.rope import rotate_heads

__all__ = ("fuse_rotations", "join_rotations")

_aten = torch.ops.aten


def fuse_rotations(
    graph: Graph, has_equal_halves: Callable[[Node], bool]
) -> list[tuple[Node, Node]]:
    """Replace each rotation of heads by a call of `rotate_heads`.

    Args:
        graph: a part's graph.
        has_equal_halves: whether the second half of each row of a table repeats the first.

    Returns:
        The new inputs: the first halves of cosines and sines.
    """
    found_tables: list[tuple[Node, Node]] = []
    halves: dict[Node, Node] = {}

    def half(table: Node) -> Node:
        """The input for the first half of a table."""
        if table not in halves:
            with graph.inserting_after(table):
                halves[table] = graph.placeholder(f"{table.name}_half")
            halves[table].meta = table.meta
        return halves[table]

    for node in list(graph.nodes):
        found = _rotation(node)
        if found is None:
            continue
        x, cos, sin = found
        heads = _transposed_source(x)
        if heads is None or not (has_equal_halves(cos) and has_equal_halves(sin)):
            continue
        whole = _with_rest(node, x)
        last, source = (node, heads) if whole is None else whole
        num_heads = int(shape_of(node)[0])
        with graph.inserting_before(last):
            tables = (half(cos), half(sin))
            rotated = graph.call_function(rotate_heads, (source, *tables, num_heads))
            new = transposed(graph, rotated)
        new.meta = last.meta
        last.replace_all_uses_with(new)
        if tables not in found_tables:
            found_tables.append(tables)
    return found_tables


def join_rotations(graph: Graph, leaves: Mapping[str, Leaf]) -> None:
    """Normalise and rotate the queries and keys of one matrix in one call."""
    for attention in graph.find_nodes(op="call_module", target="attention"):
        rotations = [node for node in attention.args[:2] if isinstance(node, Node)]
        if len(rotations) != 2 or any(node.target is not rotate_heads for node in rotations):
            continue
        heads, norms = zip(*(_before_norm(node.args[0], leaves) for node in rotations), strict=True)
        kinds = [None if norm is None else leaves[norm] for norm in norms]
        if rotations[0].args[1:3] != rotations[1].args[1:3] or kinds[0] != kinds[1]:
            continue
        if any(node.target is not operator.getitem for node in heads):
            continue
        split = heads[0].args[0]
        if split is not heads[1].args[0] or [node.args[1] for node in heads] != [0, 1]:
            continue
        merged, sizes, dim = split.args
        if dim != 1 or len(sizes) != 3:  # pyright: ignore
            continue
        (norm, _), keywords = kinds, {}
        with graph.inserting_before(rotations[0]):
            if isinstance(norm, NormLeaf):
                q_weight, k_weight = (graph.get_attr(f"{name}.weight") for name in norms)
                keywords = {"q_weight": q_weight, "k_weight": k_weight, "eps": norm.eps}
            num_q, num_k, num_v = sizes  # pyright: ignore
            both = graph.call_method("split_with_sizes", (merged, [num_q + num_k, num_v], 1))
            first = graph.call_function(operator.getitem, (both, 0))
            arguments = (first, *rotations[0].args[1:3], num_q)
            rotated = graph.call_function(rotate_heads, arguments, keywords)
            parts = graph.call_method("split_with_sizes", (rotated, [num_q, num_k], 1))
            new = [graph.call_function(operator.getitem, (parts, index)) for index in (0, 1)]
        for old, node in zip(rotations, new, strict=True):
            node.meta = old.meta
            old.replace_all_uses_with(node)


def _before_norm(heads: Any, leaves: Mapping[str, Leaf]) -> tuple[Node, str | None]:
    """The heads [T, H, d] before an RMS norm of each, and the norm's name; None = there is none."""
    norm = heads.args[0] if heads.target == "reshape" else None
    name = str(norm.target) if isinstance(norm, Node) and norm.op == "call_module" else ""
    leaf = leaves.get(name)
    flat = norm.args[0] if isinstance(norm, Node) else None
    is_usual = isinstance(leaf, NormLeaf) and leaf.kind != "layer"
    if not is_usual or not isinstance(flat, Node) or flat.target != "reshape":
        return heads, None
    source = flat.args[0]
    assert isinstance(source, Node), "it is a value of the graph"
    return source, name


def _rotation(node: Node) -> tuple[Node, Node, Node] | None:
    """(x [H, T, d], cos, sin) if the node is x * cos + rotate_half(x) * sin."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return None
    for first, second in (node.args, node.args[::-1]):
        direct, turned = _product_with_table(first), _product_with_table(second)
        if direct is None or turned is None:
            continue
        (x, cos), (half, sin) = direct, turned
        if _is_rotated_half(half, x):
            return x, cos, sin
    return None


def _product_with_table(node: Any) -> tuple[Node, Node] | None:
    """(x, table) if the node is x * table.unsqueeze(0)."""
    if not isinstance(node, Node) or node.target is not _aten.mul.Tensor:
        return None
    x, table = node.args
    if not isinstance(x, Node) or not isinstance(table, Node):
        return None
    if table.target is not _aten.unsqueeze.default or table.args[1] != 0:
        return None
    source = table.args[0]
    return (x, source) if isinstance(source, Node) and source.op == "placeholder" else None


def _is_rotated_half(node: Node, x: Node) -> bool:
    """Whether the node is cat(-second half of x, first half of x)."""
    if node.target is not _aten.cat.default:
        return False
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    size = int(shape_of(x)[-1])
    if not isinstance(parts, list | tuple) or len(parts) != 2 or dim != 2:
        return False
    second, first = parts
    if not isinstance(second, Node) or second.target is not _aten.neg.default:
        return False
    return _is_slice(second.args[0], x, size // 2, size) and _is_slice(first, x, 0, size // 2)


def _is_slice(node: Any, x: Node, begin: int, end: int) -> bool:
    """Whether the node is x[..., begin:end] of a tensor [H, T, d]."""
    if not isinstance(node, Node):
        return False
    if node.target is operator.getitem:  # the tensor is split into two equal halves
        split, index = node.args
        assert isinstance(split, Node), "it is a value of the graph"
        if split.target != "split_with_sizes" or split.args[0] is not x:
            return False
        _, sizes, dim = split.args
        starts = [sum(sizes[:place]) for place in range(len(sizes))]  # pyright: ignore
        place = int(index)  # pyright: ignore
        return dim == 2 and (starts[place], starts[place] + sizes[place]) == (begin, end)  # pyright: ignore
    if node.target is not _aten.slice.Tensor or node.args[0] is not x or node.args[1] != 2:
        return False
    size = int(shape_of(x)[-1])
    first, last = node.args[2] or 0, min(int(node.args[3]), size)  # pyright: ignore
    return (first, last) == (begin, end)


def _transposed_source(x: Node) -> Node | None:
    """The tensor [T, H, d] of which x [H, T, d] is the transpose, or its first columns."""
    if x.target is _aten.slice.Tensor and x.args[1] == 2 and not x.args[2]:
        x = x.args[0]  # pyright: ignore
    if x.op == "call_method" and x.target == "transpose" and x.args[1:] == (0, 1):
        source = x.args[0]
        return source if isinstance(source, Node) else None
    return None


def _with_rest(node: Node, x: Node) -> tuple[Node, Node] | None:
    """For heads that are rotated in part: the node that joins both parts, and the whole heads.

    None if x is the whole head.
    """
    heads = _transposed_source(x)
    if x.target is not _aten.slice.Tensor or heads is None:
        return None
    whole, size = x.args[0], int(shape_of(x)[-1])
    for user in node.users:
        if user.target is _aten.cat.default and isinstance(user.args[0], list | tuple):
            parts, dim = user.args[0], user.args[1] if len(user.args) > 1 else 0
            assert isinstance(whole, Node), "it is a value of the graph"
            end = int(shape_of(whole)[-1])
            if len(parts) == 2 and dim == 2 and _is_slice(parts[1], whole, size, end):
                return user, heads
    return None
