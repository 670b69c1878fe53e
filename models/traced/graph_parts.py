"""Converts a part of a traced graph from [1, T, ...] to [T, ...]: the tokens of a step, no batch.

transformers computes [1, T, ...]. Every value whose first dimension has the size 1 loses that
dimension: results of operations, parameters, buffers and constants. Each operation has a rule for
the conversion. If an operation has no rule, the error names it. Only attention may mix tokens: any
other operation that computes a token's values from those of other tokens is an error too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ostinato.models.traced.graph_values import (
    ALONG_DIM,
    COPIES,
    DEFAULT_DIM,
    PRODUCTS,
    TOKENWISE,
    VIEWS,
    ValueShape,
    argument_default,
    argument_name,
    has_batch,
    has_symbol,
    in_order,
    input_of,
    inputs_of,
    integers_of,
    is_transpose,
    is_whole_slice,
    traced_attention,
    traced_module,
    traced_value,
    transposed,
    view_sizes,
    without_writing,
)
from ostinato.models.traced.model_trace import ModelTrace

__all__ = ("TENSORS", "PartBuilder")

TENSORS = "traced_tensors"
"""The module of a part that holds the tensors which the part's graph reads directly.

These tensors are kept apart from the modules that the graph calls, because the graph can call a
module and read another of its tensors. For example, a router can pass only its weight to
`F.linear`, which is traced as a call of the router without bias, and then add its bias itself.
"""

_aten = torch.ops.aten


class PartBuilder:
    """Builds the graph of one part.

    Args:
        trace: the traced run.
        prefix: dropped from the names of modules and parameters.
        device: where the part runs.
    """

    def __init__(self, trace: ModelTrace, prefix: str, device: torch.device) -> None:
        self.graph = Graph()
        self.leaf_names: list[str] = []  # full names of the modules that the part calls
        self.tensor_names: list[str] = []  # full names of tensors that the part reads
        self.constants: dict[str, Tensor] = {}  # other tensors that the part reads
        self.attention_call: int | None = None
        self._trace = trace
        self._prefix = prefix
        self._device = device
        self._new: dict[Node, Any] = {}
        # traced nodes with a batch dimension, which their converted values do not have
        self._has_batch: set[Node] = set()
        self.attention_inputs: tuple[Node, ...] = ()  # step and caches
        self._rules: dict[Any, Callable[[Node], None]] = {
            traced_module: self._leaf,
            traced_attention: self._attention,
            operator.getitem: self._item,
            **dict.fromkeys(VIEWS, self._view),
            **dict.fromkeys(COPIES, self._copy),
            **dict.fromkeys(ALONG_DIM, self._along),
            **dict.fromkeys(PRODUCTS, self._product),
            **dict.fromkeys(TOKENWISE, self._pointwise),
            _aten.expand.default: self._expand,
            _aten.transpose.int: self._transpose,
            _aten.permute.default: self._permute,
            _aten.t.default: self._same,
            _aten.embedding.default: self._same,
            _aten.unsqueeze.default: self._unsqueeze,
            _aten.squeeze.dim: self._unsqueeze,
            _aten.squeeze.default: self._view,
            _aten.native_layer_norm.default: self._layer_norm,
        }

    def input(self, name: str, traced: Node | None = None) -> Node:
        """An input of the part: the value `traced`, if given, without its batch dimension."""
        node = self.graph.placeholder(name)
        if traced is not None:
            self.bind(traced, node)
        return node

    def has(self, traced: Node) -> bool:
        """Whether a traced node has a converted value in this part."""
        return traced in self._new

    def bind(self, traced: Node, value: Node) -> None:
        """Use a node of the part as the converted value of a traced one."""
        self._new[traced] = value
        if has_batch(traced_value(traced)):
            self._has_batch.add(traced)

    def reshaped(self, node: Node, sizes: tuple[int, ...]) -> Node:
        """A node of the part with other sizes."""
        return self.graph.call_method("reshape", (node, *sizes))

    def add(self, traced: Node) -> None:
        """Convert one traced node. Its inputs must be converted already.

        Raises:
            ValueError: the node has no rule, mixes tokens, needs their number, overwrites a value
                that is used otherwise, moves the batch dimension or cannot be computed without it,
                or reads the padding mask or token ids.
        """
        if traced.op == "get_attr":
            self._add_constant(traced)
            return
        if traced.op == "placeholder":
            self._add_tensor(traced)
            return
        target: Any = traced.target
        is_writing = getattr(getattr(target, "_schema", None), "is_mutable", False)
        if target is _aten.sym_size.int or isinstance(traced_value(traced), torch.SymInt | int):
            self._new[traced] = traced_value(traced)
            return
        self._check_tokens(traced)
        if is_writing:
            target = traced.target = without_writing(traced)
        rule = self._rule(target)
        if rule is None:
            raise ValueError(f"it computes {target}, which has no rule here and may mix tokens")
        rule(traced)
        node = self._new.get(traced)
        if isinstance(node, Node):
            node.meta["val"] = self._stripped(traced)

    def result(self, traced: Node) -> Node:
        """The converted node of a value, without its batch dimension."""
        return self._new[traced]

    def _rule(self, target: Any) -> Callable[[Node], None] | None:
        rule = self._rules.get(target)
        if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
            return self._pointwise
        return rule

    # ---- rules ----

    def _same(self, traced: Node) -> None:
        """Keep the operation as traced: its inputs get their batch dimension back."""
        arguments = self._restored(traced.args)
        node = self._call(traced.target, arguments, dict(traced.kwargs))
        self._set_whole(traced, node)

    def _pointwise(self, traced: Node) -> None:
        keywords = {
            key: self._device if key == "device" else self._mapped(value)
            for key, value in traced.kwargs.items()
            if key not in ("pin_memory", "layout", "memory_format", "non_blocking")
        }
        target: Any = traced.target
        if target is _aten._to_copy.default and "dtype" not in keywords:
            self._copy(traced)
            return
        node = self._call(target, self._mapped(traced.args), keywords)
        if has_batch(traced_value(traced)):
            self._has_batch.add(traced)
        self._new[traced] = node

    def _leaf(self, traced: Node) -> None:
        inputs, name = inputs_of(traced), str(traced.args[2])
        first = inputs[:-1] if len(inputs) > 1 else inputs
        if len(inputs) == 3:
            first = [inputs[2], inputs[0], inputs[1]]
        values = [self._new[node] for node in first]
        new = [self._ordered(value) for value in values]
        shape = self._stripped(traced).shape
        self.leaf_names.append(name)
        target = name.removeprefix(self._prefix)
        is_flat = len(shape) <= 2 or len(inputs) > 1
        if is_flat:
            node = self.graph.call_module(target, tuple(new))
        else:  # a norm of heads: [T, H, d], or transposed
            source = values[0]
            is_transposed = is_transpose(source)
            if is_transposed:
                source, shape = source.args[0], (shape[1], shape[0], *shape[2:])
            flat = self.graph.call_method("reshape", (self._ordered(source), -1, int(shape[-1])))
            node = self.graph.call_module(target, (flat,))
            node = self.graph.call_method("reshape", (node, *view_sizes(shape)))
            if is_transposed:
                node = transposed(self.graph, node)
        self.bind(traced, node)

    def _attention(self, traced: Node) -> None:
        (call,) = integers_of(traced, 3)
        self.attention_call = call
        heads = [self._new[input_of(traced, place)] for place in range(3)]
        swapped = [self._ordered(transposed(self.graph, node)) for node in heads]
        name, sinks = self._trace.calls[call].sinks, None
        if name:
            sinks = self._tensor(name)
        node = self.graph.call_module("attention", (*swapped, sinks, *self.attention_inputs))
        self.bind(traced, node)

    def _ordered(self, node: Node) -> Node:
        """The value, made contiguous in memory, which this project's ops and views need."""
        return node if in_order(node) else self.graph.call_method("contiguous", (node,))

    def _item(self, traced: Node) -> None:
        source = self._new[input_of(traced)]
        node = self.graph.call_function(operator.getitem, (source, traced.args[1]))
        if has_batch(traced_value(traced)):
            self._has_batch.add(traced)
        self._new[traced] = node

    def _copy(self, traced: Node) -> None:
        source = input_of(traced)
        self._new[traced] = self._new[source]
        if source in self._has_batch:
            self._has_batch.add(traced)

    def _view(self, traced: Node) -> None:
        source = input_of(traced)
        sizes = self._stripped(traced).shape
        whole = self._ordered(self._new[source])
        node = self.graph.call_method("reshape", (whole, *view_sizes(sizes)))
        self.bind(traced, node)

    def _expand(self, traced: Node) -> None:
        source = input_of(traced)
        old, new = self._stripped(source).shape, self._stripped(traced).shape
        added = len(new) - len(old)
        sizes = [
            -1 if index >= added and new[index] == old[index - added] else new[index]
            for index in range(len(new))
        ]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise ValueError("it repeats a value for each token of a step")
        node = self.graph.call_method("expand", (self._new[source], *map(int, sizes)))
        self.bind(traced, node)

    def _transpose(self, traced: Node) -> None:
        source = input_of(traced)
        dims = len(traced_value(source).shape)
        places = sorted(dim % dims for at in (1, 2) for dim in integers_of(traced, at))
        if source not in self._has_batch:
            self._same(traced)
        elif places[0] == 0:
            raise ValueError("it transposes the batch")
        else:
            one, two = places[0] - 1, places[1] - 1
            node = transposed(self.graph, self._new[source], one, two)
            self.bind(traced, node)

    def _permute(self, traced: Node) -> None:
        source = input_of(traced)
        count = len(traced_value(source).shape)
        order = [dim % count for dim in integers_of(traced, 1)]
        if source in self._has_batch and order[0] == 0:
            order = [dim - 1 for dim in order[1:]]
            node = self._call(_aten.permute.default, (self._new[source], order), {})
            self.bind(traced, node)
            return
        self._same(traced)

    def _unsqueeze(self, traced: Node) -> None:
        source, (dim,) = input_of(traced), integers_of(traced, 1)
        dims = len(traced_value(source).shape) + (traced.target is _aten.unsqueeze.default)
        place = dim % dims
        if source in self._has_batch and place > 0:
            node = self._call(traced.target, (self._new[source], place - 1), {})
            self.bind(traced, node)
        elif (
            place == 0
            and traced.target is _aten.unsqueeze.default
            and (source not in self._has_batch)
        ):
            self.bind(traced, self._new[source])
        else:
            self._same(traced)

    def _along(self, traced: Node) -> None:
        """An operation along dimensions.

        If all inputs have lost the batch dimension, the dimensions are counted without it. If only
        some have, or the operation is along the batch, the inputs get it back.
        """
        target: Any = traced.target
        place, key = ALONG_DIM[target]
        arguments: list[Any] = list(traced.args)
        keywords: dict[str, Any] = dict(traced.kwargs)
        source = inputs_of(traced)[0]
        stated = arguments[place] if len(arguments) > place else keywords.pop(key, None)
        if stated is None:
            stated = DEFAULT_DIM.get(target, 0)
        is_stack = target is _aten.stack.default
        count = len(traced_value(source).shape) + is_stack
        stated_list = stated if isinstance(stated, list | tuple) else [stated]
        dims = [int(dim) % count for dim in stated_list]
        if target is _aten.slice.Tensor and is_whole_slice(traced):
            self._copy(traced)
            return
        tensors = [
            node for node in traced.all_input_nodes if isinstance(traced_value(node), Tensor)
        ]
        shapes = [traced_value(node).shape for node in tensors]
        if not is_stack and any(
            isinstance(shape[dim], torch.SymInt) for shape in shapes for dim in dims
        ):
            raise ValueError(f"{target} goes over the tokens of a step")
        batched = [node in self._has_batch for node in tensors]
        if any(batched):
            if not all(batched) or 0 in dims:
                self._same(traced)
                return
            dims = [dim - 1 for dim in dims]
        while len(arguments) <= place:
            keywords_key = argument_name(target, len(arguments))
            if len(arguments) == place:
                arguments.append(None)
            else:
                arguments.append(
                    keywords.pop(keywords_key, argument_default(target, len(arguments)))
                )
        arguments[place] = dims if isinstance(stated, list | tuple) else dims[0]
        new_arguments = self._mapped(tuple(arguments))
        if target is _aten.split_with_sizes.default or target is _aten.split.Tensor:
            size, sizes = arguments[1], arguments[1]
            if not isinstance(size, list | tuple):
                total = int(traced_value(source).shape[dims[0] + (1 if any(batched) else 0)])
                sizes = tuple(min(size, total - at) for at in range(0, total, size))
            node = self.graph.call_method(
                "split_with_sizes", (self._new[source], list(sizes), dims[0])
            )
        else:
            node = self._call(target, new_arguments, self._mapped(keywords))
        self.bind(traced, node)

    def _layer_norm(self, traced: Node) -> None:
        source, sizes = input_of(traced), integers_of(traced, 1)
        if len(sizes) != 1 or isinstance(traced_value(source).shape[-1], torch.SymInt):
            raise ValueError(f"{traced.target} does not go over the features of a token alone")
        self._new[traced] = self._call(traced.target, self._mapped(traced.args), {})

    def _product(self, traced: Node) -> None:
        """A matrix product, which must not sum over tokens."""
        factors = traced.args[-2:]
        summed = [traced_value(factors[0]).shape[-1], traced_value(factors[1]).shape[-2]]
        if any(isinstance(size, torch.SymInt) for size in summed):
            raise ValueError(f"{traced.target} sums over the tokens of a step")
        self._same(traced)

    # ---- values ----

    def _add_tensor(self, traced: Node) -> None:
        """A parameter or buffer of the model."""
        name = self._trace.tensors.get(traced.name)
        if name is None:
            raise ValueError("it reads the padding mask, or token ids in a layer")
        self._set_whole(traced, self._tensor(name))

    def _tensor(self, name: str) -> Node:
        self.tensor_names.append(name)
        return self.graph.get_attr(f"{TENSORS}.{name.removeprefix(self._prefix)}")

    def _add_constant(self, traced: Node) -> None:
        name = str(traced.target)
        self.constants[name] = getattr(self._trace.graph, name)
        traced.meta.setdefault("val", self.constants[name])
        self._set_whole(traced, self.graph.get_attr(name))

    def _check_tokens(self, traced: Node) -> None:
        value = traced_value(traced)
        if isinstance(value, Tensor):
            symbols = sum(isinstance(size, torch.SymInt) for size in value.shape)
            if symbols > 1:
                raise ValueError(f"{traced.target} pairs the tokens of a step with each other")

    def _stripped(self, traced: Node) -> Any:
        """A tensor's shape and dtype, without the batch dimension; any other value as it is."""
        value = traced_value(traced)
        if isinstance(value, Tensor) and has_batch(value):
            return ValueShape(tuple(value.shape[1:]), value.dtype)
        if isinstance(value, Tensor):
            return ValueShape(tuple(value.shape), value.dtype)
        return value

    def _set_whole(self, traced: Node, node: Node) -> None:
        """Note the result of an operation that kept the batch."""
        value = traced_value(traced)
        if isinstance(value, Tensor) and has_batch(value):
            node = self._call(_aten.select.int, (node, 0, 0), {})
            self._has_batch.add(traced)
        elif isinstance(value, list | tuple):
            raise ValueError(
                f"{traced.target} has several results, and no rule here takes the batch "
                "dimension from each of them"
            )
        self._new[traced] = node

    def _restored(self, arguments: Any) -> Any:
        """The converted arguments, with their batch dimension added again."""

        def restore(node: Node) -> Any:
            new = self._new[node]
            if node in self._has_batch:
                return self._call(_aten.unsqueeze.default, (new, 0), {})
            return new

        return map_arg(arguments, restore)

    def _mapped(self, arguments: Any) -> Any:
        return map_arg(arguments, lambda node: self._new[node])

    def _call(self, target: Any, arguments: Any, keywords: Any) -> Node:
        if has_symbol(arguments) or has_symbol(tuple(keywords.values())):
            raise ValueError(f"{target} needs the number of tokens of a step")
        return self.graph.call_function(target, tuple(arguments), dict(keywords))
