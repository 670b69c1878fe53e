"""Finds rotary embeddings in the graph of a traced part, and replaces them by `rotate_heads`.

`rotate_heads` rotates element i of a head with element i + R / 2, where R elements are rotated.
Many models do the same. Others rotate element 2 i with element 2 i + 1. For those models, the
rows of the matrices of queries and keys get another order when they are loaded
(models/checkpoints/row_orders.py). The products of queries and keys stay the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ostinato.models.checkpoints.row_orders import interleaved_rope
from ostinato.models.traced.graph_values import (
    input_of,
    inputs_of,
    integers_of,
    shape_of,
    transposed,
)
from ostinato.models.traced.leaf_modules import Leaf, LinearLeaf, NormLeaf
from ostinato.ops.rope import rotate_heads

__all__ = ("Repeats", "Rotations", "fuse_rotations", "join_rotations")

_aten = torch.ops.aten


class Repeats(StrEnum):
    """How each number is repeated in a row of a table of cosines or sines."""

    halves = "halves"  # the second half repeats the first
    pairs = "pairs"  # element 2 i + 1 repeats element 2 i


@dataclass(slots=True)
class Rotations:
    """The changes of `fuse_rotations`."""

    # The new inputs: cosines and sines with each number once.
    tables: list[tuple[Node, Node]] = field(default_factory=list)
    # target of a linear layer -> for each of its rows, the row of the stored matrix
    row_orders: dict[str, Tensor] = field(default_factory=dict)


class _Rotation(NamedTuple):
    """`x * cos + turned(x) * sin`, where x is heads [H, T, d]."""

    last: Node  # its result
    heads: Node  # [T, H, d]: its source
    cos: Node
    sin: Node
    num_heads: int
    rotary_dim: int
    is_interleaved: bool


def fuse_rotations(
    graph: Graph,
    leaves: Mapping[str, Leaf],
    merged: Mapping[str, tuple[str, ...]],
    repeats: Callable[[Node], Repeats | None],
) -> Rotations:
    """Replace each rotation of heads by a call of `rotate_heads`.

    Rotations of interleaved pairs are replaced if only the attention call reads the results, and
    each source is all rows of a linear layer.

    Args:
        graph: a part's graph.
        leaves: the modules that it calls, by target.
        merged: the targets of stacked linear layers -> the targets of their parts.
        repeats: returns how each number is repeated in the rows of a table; None = it is not.
    """
    done = Rotations()
    inputs: dict[Node, Node] = {}

    def once(table: Node) -> Node:
        """The input for a table with each number once."""
        if table not in inputs:
            with graph.inserting_after(table):
                inputs[table] = graph.placeholder(f"{table.name}_half")
            inputs[table].meta = table.meta
        return inputs[table]

    found = [_rotation(node, repeats) for node in graph.nodes]
    rotations = [rotation for rotation in found if rotation is not None]
    orders = _row_orders([one for one in rotations if one.is_interleaved], leaves, merged)
    done.row_orders = orders or {}
    for one in rotations:
        if one.is_interleaved and orders is None:
            continue
        with graph.inserting_before(one.last):
            tables = (once(one.cos), once(one.sin))
            rotated = graph.call_function(rotate_heads, (one.heads, *tables, one.num_heads))
            new = transposed(graph, rotated)
        new.meta = one.last.meta
        one.last.replace_all_uses_with(new)
        if tables not in done.tables:
            done.tables.append(tables)
    return done


def _row_orders(
    rotations: list[_Rotation], leaves: Mapping[str, Leaf], merged: Mapping[str, tuple[str, ...]]
) -> dict[str, Tensor] | None:
    """The orders that replace interleaved rotations; None = they cannot be replaced."""
    if [_attention_argument(one.last) for one in rotations] not in ([0, 1], [1, 0]):
        return None
    first, second = rotations
    if (first.cos, first.sin, first.rotary_dim) != (second.cos, second.sin, second.rotary_dim):
        return None
    orders: dict[str, Tensor] = {}
    for one in rotations:
        name, head_dim = _linear_of(one.heads, merged), int(shape_of(one.last)[-1])
        leaf = leaves.get(name or "")
        is_whole = isinstance(leaf, LinearLeaf) and leaf.out_features == one.num_heads * head_dim
        if name is None or not is_whole or not _is_read_only_by(one.heads, one.last):
            return None
        orders[name] = interleaved_rope(one.num_heads, head_dim, one.rotary_dim)
    return orders if len(orders) == len(rotations) else None


def _attention_argument(node: Node) -> int | None:
    """Which argument of the attention call a value [H, T, d] is; None = it is read elsewhere."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.op == "call_module" and user.target == "attention":
            return user.args.index(node)
        is_transpose = user.target == "transpose" and user.args[1:] == (0, 1)
        if user.op != "call_method" or not (is_transpose or user.target == "contiguous"):
            return None
        node = user
    return None


def _linear_of(heads: Node, merged: Mapping[str, tuple[str, ...]]) -> str | None:
    """The linear layer whose rows are the heads [T, H, d]."""
    part = None
    if heads.target is operator.getitem:
        split, (part,) = input_of(heads), integers_of(heads, 1)
        if split.target != "split_with_sizes" or split.args[2] != 1:
            return None
        heads = input_of(split)
    linear = heads.args[0] if heads.target == "reshape" else None
    if not isinstance(linear, Node) or linear.op != "call_module":
        return None
    target = str(linear.target)
    is_only_call = len(linear.graph.find_nodes(op="call_module", target=target)) == 1
    if part is not None:
        return merged[target][part] if target in merged else None
    return target if is_only_call and target not in merged and len(linear.users) == 1 else None


def _is_read_only_by(source: Node, last: Node) -> bool:
    """Whether a value reaches modules and the result of the graph through `last` only."""
    todo, seen = [source], {source, last}
    while todo:
        for user in todo.pop().users:
            if user.op in ("call_module", "output"):
                return False
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return True


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
        split = input_of(heads[0])
        if split is not heads[1].args[0] or [node.args[1] for node in heads] != [0, 1]:
            continue
        if split.target != "split_with_sizes" or split.args[2] != 1:
            continue
        merged, sizes = input_of(split), integers_of(split, 1)
        if len(sizes) != 3:
            continue
        (norm, _), keywords = kinds, {}
        with graph.inserting_before(rotations[0]):
            if isinstance(norm, NormLeaf):
                q_weight, k_weight = (graph.get_attr(f"{name}.weight") for name in norms)
                keywords = {"q_weight": q_weight, "k_weight": k_weight, "eps": norm.eps}
            num_q, num_k, num_v = sizes
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
    source = input_of(flat)
    return source, name


def _rotation(node: Node, repeats: Callable[[Node], Repeats | None]) -> _Rotation | None:
    """The rotation that this node computes as a sum; None if the node is no such sum."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return None
    for first, second in (node.args, node.args[::-1]):
        direct, turned = _product_with_table(first), _product_with_table(second)
        if direct is None or turned is None:
            continue
        (x, cos, cos_is_paired), (half, sin, sin_is_paired) = direct, turned
        is_interleaved = _is_turned_pairs(half, x)
        if cos_is_paired != sin_is_paired or not (is_interleaved or _is_rotated_half(half, x)):
            continue
        if cos_is_paired and not is_interleaved:
            continue
        wanted = Repeats.pairs if is_interleaved and not cos_is_paired else Repeats.halves
        if repeats(cos) != wanted or repeats(sin) != wanted:
            continue
        source = _transposed_source(x)
        if source is None:
            continue
        heads, dtype = source
        last = _cast_back(_with_rest(node, x) or node, dtype)
        if last is not None:
            num_heads, _, rotary_dim = shape_of(node)
            return _Rotation(last, heads, cos, sin, int(num_heads), int(rotary_dim), is_interleaved)
    return None


def _product_with_table(node: Any) -> tuple[Node, Node, bool] | None:
    """(x, table, is_paired) if the node is x * table.

    A paired table has each number of the input's first half twice, one after the other.
    """
    if not isinstance(node, Node) or node.target is not _aten.mul.Tensor:
        return None
    x, factor = node.args
    if not isinstance(x, Node) or not isinstance(factor, Node):
        return None
    paired = _paired_source(factor)
    table = factor if paired is None else paired
    if table.target is not _aten.unsqueeze.default or table.args[1] != 0:
        return None
    source = table.args[0]
    if not isinstance(source, Node) or source.op != "placeholder":
        return None
    return _uncast(x), source, paired is not None


def _paired_source(node: Node) -> Node | None:
    """The table t [1, T, R] if the node is `t[..., : R / 2].repeat_interleave(2, -1)`."""
    shape = shape_of(node)
    if not shape:  # a scalar, such as a parameter of an activation
        return None
    size = int(shape[-1])
    steps = (
        ("reshape", (1, -1, size)),
        ("contiguous", ()),
        ("expand", (-1, -1, -1, 2)),
        (_aten.unsqueeze.default, (3,)),
    )
    half = _before(node, steps)
    table = None if half is None else half.args[0]
    if half is None or not isinstance(table, Node) or int(shape_of(table)[-1]) != size:
        return None
    return table if _is_slice(half, table, 0, size // 2) else None


def _before(node: Node, steps: tuple[tuple[Any, tuple[int, ...]], ...]) -> Node | None:
    """The value from which these operations compute the node; None = other operations do.

    `steps` has the last operation first.
    """
    for target, arguments in steps:
        source = node.args[0] if node.target == target and node.args[1:] == arguments else None
        if not isinstance(source, Node):
            return None
        node = source
    return node


def _uncast(node: Node) -> Node:
    """The value before it was converted to the dtype in which `rotate_heads` computes."""
    is_cast = node.target is _aten._to_copy.default and node.kwargs == {"dtype": torch.float32}
    source = node.args[0] if is_cast else None
    return source if isinstance(source, Node) else node


def _cast_back(node: Node, dtype: torch.dtype) -> Node | None:
    """The value in a dtype: the node, or its conversion. None = it is not converted to that."""
    if node.meta["val"].dtype == dtype:
        return node
    users = list(node.users)
    is_cast = len(users) == 1 and users[0].target is _aten._to_copy.default
    return users[0] if is_cast and users[0].kwargs == {"dtype": dtype} else None


def _is_turned_pairs(node: Node, x: Node) -> bool:
    """Whether the node has (-b, a) for each pair of neighbours (a, b) in x."""
    sizes = (int(shape_of(x)[0]), -1, int(shape_of(x)[-1]))
    stack = _before(node, (("reshape", sizes), ("contiguous", ())))
    if stack is None or stack.target is not _aten.stack.default or stack.args[1:] != (3,):
        return False
    parts = inputs_of(stack)
    if len(parts) != 2 or parts[0].target is not _aten.neg.default:
        return False
    second, first = parts
    return _is_every_other(second.args[0], x, 1) and _is_every_other(first, x, 0)


def _is_every_other(node: Any, x: Node, begin: int) -> bool:
    """Whether the node is x[..., begin::2]."""
    if not isinstance(node, Node) or node.target is not _aten.slice.Tensor or len(node.args) != 5:
        return False
    source, dim, first, end, step = node.args
    is_to_end = isinstance(end, int) and end >= int(shape_of(x)[-1])
    is_same = isinstance(source, Node) and _uncast(source) is x
    return is_same and is_to_end and (dim, first or 0, step) == (2, begin, 2)


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
        split, (place,) = input_of(node), integers_of(node, 1)
        if split.target != "split_with_sizes" or _uncast(input_of(split)) is not x:
            return False
        sizes = integers_of(split, 1)
        start = sum(sizes[:place])
        return split.args[2:] == (2,) and (start, start + sizes[place]) == (begin, end)
    if node.target is not _aten.slice.Tensor or node.args[1] != 2 or len(node.args) != 4:
        return False
    if _uncast(input_of(node)) is not x:
        return False
    size = int(shape_of(x)[-1])
    first = 0 if node.args[2] is None else integers_of(node, 2)[0]
    return first == begin and min(*integers_of(node, 3), size) == end


def _transposed_source(x: Node) -> tuple[Node, torch.dtype] | None:
    """The tensor [T, H, d] that x [H, T, d] is the transpose of, and its dtype.

    x may also be only the first columns of that transpose.
    """
    is_first = x.target is _aten.slice.Tensor and x.args[1:3] in ((2, None), (2, 0))
    if is_first and len(x.args) < 5:
        x = _uncast(input_of(x))
    if x.op == "call_method" and x.target == "transpose" and x.args[1:] == (0, 1):
        source = x.args[0]
        return (source, x.meta["val"].dtype) if isinstance(source, Node) else None
    return None


def _with_rest(node: Node, x: Node) -> Node | None:
    """For heads that are rotated in part: the node that joins both parts; None = there is none."""
    if x.target is not _aten.slice.Tensor:
        return None
    whole, size = input_of(x), int(shape_of(x)[-1])
    for user in node.users:
        if user.target is _aten.cat.default and isinstance(user.args[0], list | tuple):
            parts, dim = user.args[0], user.args[1] if len(user.args) > 1 else 0
            end = int(shape_of(whole)[-1])
            if len(parts) == 2 and dim == 2 and _is_slice(parts[1], whole, size, end):
                return user
    return None
