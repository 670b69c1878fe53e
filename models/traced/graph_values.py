"""Helpers for traced graphs: kinds of operations, shapes, memory order and arguments of nodes.

Two ops mark places in a traced graph: a module of the model, and an attention call. They are
traced and never computed. models/traced/graph_parts.py replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ostinato.ops.register import register_op

__all__ = (
    "ALONG_DIM",
    "COPIES",
    "DEFAULT_DIM",
    "PRODUCTS",
    "TOKENWISE",
    "VIEWS",
    "ValueShape",
    "argument_default",
    "argument_name",
    "drop_unused",
    "has_batch",
    "has_symbol",
    "in_order",
    "input_of",
    "inputs_of",
    "integers_of",
    "is_transpose",
    "is_whole_slice",
    "shape_of",
    "traced_attention",
    "traced_module",
    "traced_value",
    "transposed",
    "view_sizes",
    "without_writing",
)

_aten = torch.ops.aten

# Operations along dimensions -> index and name of the argument that names the dimensions.
ALONG_DIM: dict[Any, tuple[int, str]] = {
    _aten.slice.Tensor: (1, "dim"),
    _aten.select.int: (1, "dim"),
    _aten.split.Tensor: (2, "dim"),
    _aten.split_with_sizes.default: (2, "dim"),
    _aten.cat.default: (1, "dim"),
    _aten.stack.default: (1, "dim"),
    _aten.sum.dim_IntList: (1, "dim"),
    _aten.mean.dim: (1, "dim"),
    _aten._softmax.default: (1, "dim"),
    _aten.topk.default: (2, "dim"),
    _aten.max.dim: (1, "dim"),
    _aten.sort.default: (1, "dim"),
    _aten.gather.default: (1, "dim"),
    _aten.scatter.src: (1, "dim"),
    _aten.scatter.value: (1, "dim"),
    _aten.amax.default: (1, "dim"),
    _aten.linalg_vector_norm.default: (2, "dim"),
    _aten.unbind.int: (1, "dim"),
}
DEFAULT_DIM = {_aten.topk.default: -1, _aten.sort.default: -1}
# Matrix products: sums over the last dimension of the first factor and the last but one of the
# second.
PRODUCTS = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default)
COPIES = (
    _aten.clone.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.contiguous.default,
    _aten.lift_fresh_copy.default,
)
VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
TOKENWISE = (
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.masked_fill.Scalar,
    _aten.masked_fill.Tensor,
    _aten._to_copy.default,
    _aten.to.dtype,
    _aten.where.self,
)


class ValueShape:
    """Sizes and dtype of a value."""

    def __init__(self, shape: tuple[Any, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype


def input_of(node: Node, place: int = 0) -> Node:
    """The argument of a node at a place, which is a value of the graph.

    Raises:
        ValueError: it is something else.
    """
    return _value_of(node, place, node.args[place])


def inputs_of(node: Node, place: int = 0) -> list[Node]:
    """The argument of a node at a place, which is a list of values of the graph.

    Raises:
        ValueError: it is something else.
    """
    stated = node.args[place]
    values = stated if isinstance(stated, list | tuple) else [stated]
    return [_value_of(node, place, value) for value in values]


def _value_of(node: Node, place: int, value: object) -> Node:
    if not isinstance(value, Node):
        raise ValueError(  # noqa: TRY004 - the model is not supported
            f"argument {place} of {node.name} must be a value of the graph, got {value!r}"
        )
    return value


def integers_of(node: Node, place: int) -> list[int]:
    """The argument of a node at a place, which is an integer or several.

    Raises:
        ValueError: it is something else.
    """
    stated = node.args[place]
    values = stated if isinstance(stated, list | tuple) else [stated]
    integers = [value for value in values if isinstance(value, int)]
    if len(integers) != len(values):
        raise ValueError(
            f"argument {place} of {node.name} must be an integer or several, got {stated!r}"
        )
    return integers


def without_writing(traced: Node) -> Any:
    """The out-of-place form of an operation that overwrites its input.

    Raises:
        ValueError: there is none, the input is a view or is not computed in the graph, or the input
            is read afterwards too.
    """
    target: Any = traced.target
    source = input_of(traced)
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    packet = getattr(_aten, name.removesuffix("_"), None)
    is_own = source.op == "call_function" and not getattr(source.target, "is_view", False)
    is_last = all(user is traced or user < traced for user in source.users)
    if packet is None or overload not in packet.overloads() or not (is_own and is_last):
        raise ValueError(f"it overwrites a value with {target}")
    return getattr(packet, overload)


def drop_unused(graph: Graph) -> None:
    """Remove nodes whose values are not read. Inputs are kept."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def transposed(graph: Graph, node: Node, first: int = 0, second: int = 1) -> Node:
    """Exchange two dimensions of a value. If the node exchanges the same two, return its input."""
    if is_transpose(node) and (node.args[1], node.args[2]) == (first, second):
        return input_of(node)
    return graph.call_method("transpose", (node, first, second))


def in_order(node: Node) -> bool:
    """Whether a value is known to be contiguous in memory."""
    if node.op in ("call_module", "placeholder"):
        return True
    if node.op == "call_method":
        source = input_of(node)
        return node.target == "contiguous" or (node.target == "reshape" and in_order(source))
    is_own = str(getattr(node.target, "__module__", "")).startswith("ostinato.")
    return node.op == "call_function" and is_own


def is_transpose(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_method" and node.target == "transpose"


def traced_value(node: Any) -> Any:
    return node.meta.get("val") if node.op != "get_attr" else node.meta.get("val", 0)


def has_batch(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() > 0
        and type(value.shape[0]) is int
        and (value.shape[0] == 1)
    )


def view_sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    """Sizes for `view`, with -1 for the size that differs from step to step."""
    return tuple(-1 if isinstance(size, torch.SymInt) else int(size) for size in shape)


def is_whole_slice(traced: Node) -> bool:
    begin, end = ([*traced.args[2:4], None, None])[:2]
    step = traced.args[4] if len(traced.args) > 4 else 1
    is_start, is_end = begin in (None, 0), end in (None, (1 << 63) - 1)
    return bool(is_start and is_end and step == 1)


def argument_name(target: Any, index: int) -> str:
    return target._schema.arguments[index].name


def argument_default(target: Any, index: int) -> Any:
    return target._schema.arguments[index].default_value


def has_symbol(arguments: Any) -> bool:
    if isinstance(arguments, list | tuple):
        return any(map(has_symbol, arguments))
    return isinstance(arguments, torch.SymInt)


def shape_of(node: Node) -> tuple[Any, ...]:
    """The sizes of a converted node's value; empty if they are not known."""
    value = node.meta.get("val")
    return tuple(getattr(value, "shape", ()))


def _module(inputs: Sequence[Tensor], sizes: Sequence[int], name: str) -> Tensor:
    raise AssertionError(f"the call of {name} is traced, not computed")


def _module_fake(inputs: Sequence[Tensor], sizes: Sequence[int], name: str) -> Tensor:
    # The result of an embedding has the dtype of the model, which its ids do not have.
    return torch.empty(sizes, dtype=inputs[-1].dtype, device=inputs[-1].device)


def _attention(q: Tensor, k: Tensor, v: Tensor, call: int) -> Tensor:
    raise AssertionError("an attention call is traced, not computed")


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, call: int) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads, v.shape[-1]))


traced_module = register_op(
    "traced_module", {"CompositeExplicitAutograd": _module}, fake=_module_fake
)
"""The call of a module: inputs, sizes of the result, the module's name. The last input has the
dtype of the result."""

traced_attention = register_op(
    "traced_attention", {"CompositeExplicitAutograd": _attention}, fake=_attention_fake
)
"""q [1, Hq, T, d], k [1, Hkv, T, d], v [1, Hkv, T, e], number of the call -> [1, T, Hq, e]."""
