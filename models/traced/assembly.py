"""Builds the modules of a traced model from the parts of its graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ostinato.models.layers.linear_layers import BuildOptions, MergedLinear
from ostinato.models.layers.vocabulary_layers import Embedding, OutputHead
from ostinato.models.step_tensors import RopeRows, TableRows
from ostinato.models.traced.fusions import Fused, fuse
from ostinato.models.traced.graph_parts import TENSORS, PartBuilder
from ostinato.models.traced.graph_values import drop_unused, inputs_of
from ostinato.models.traced.leaf_modules import (
    EmbeddingLeaf,
    ExpertsLeaf,
    Leaf,
    LinearLeaf,
)
from ostinato.models.traced.model_trace import ModelTrace
from ostinato.models.traced.partition import compute_table, partition
from ostinato.models.traced.rotations import Repeats
from ostinato.models.traced.traced_modules import (
    Logits,
    TracedAttention,
    TracedGraph,
    TracedLayer,
    build_leaf,
)

__all__ = ("Assembly", "Tables", "rows_of_kind")

_TABLE_DIMS = 2  # [positions, width]
_FEW_POSITIONS = 9  # positions at which the columns of a table are compared


@dataclass(slots=True, eq=False)
class Tables:
    """Tables that follow from the position alone, such as rotary cosines, for all positions."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # [positions, width]
    # kind of table -> the names of its one or two tensors
    pairs: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Assembly:
    """The parts of a traced model as modules.

    Args:
        trace: the traced run.
        options: dtype, device, attention backend and length.

    Raises:
        ValueError: the model computes something that is not supported.
    """

    def __init__(self, trace: ModelTrace, options: BuildOptions) -> None:
        self.tables = Tables()
        self.merged: dict[str, tuple[str, ...]] = {}
        self.row_orders: dict[str, Tensor] = {}  # name of a stored matrix -> order of its rows
        self._trace = trace
        self._options = options
        self._parts = partition(trace)
        model = trace.model
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self.is_tied = head.weight is embedding.weight
        self._embedding = _name_of(model, embedding)
        self._repeats: dict[Node, Repeats | None] = {}

    def begin(self) -> TracedGraph:
        """Token ids [T] and positions [T] -> hidden states [T, D]."""
        parts = self._parts
        builder = self._builder("")
        builder.input("ids", parts.ids)
        builder.input("positions", parts.positions)
        return self._finished(builder, parts.begin, parts.layers[0].hidden)

    def layers(self) -> Iterable[TracedLayer]:
        """The layers in order."""
        for index, name in enumerate(self._trace.layers):
            yield self._layer(index, f"{name}.")

    def finish(self) -> TracedGraph:
        """[R, D] -> [R, D]: the part between the last layer and the output head."""
        parts = self._parts
        builder = self._builder("")
        builder.input("hidden", parts.layers[-1].result)
        return self._finished(builder, parts.finish, inputs_of(parts.head)[0])

    def head(self, embedding: Embedding) -> TracedGraph:
        """[R, D] -> logits [R, vocab_size] float32.

        Args:
            embedding: the tokens' embedding, which is also the head if the two are tied.
        """
        parts = self._parts
        name = str(parts.head.args[2])
        leaf = self._trace.leaves[name]
        assert isinstance(leaf, LinearLeaf), "it is a linear layer"
        if self.is_tied and not leaf.has_bias:
            matrix: OutputHead | Embedding = embedding
        else:
            matrix = OutputHead(
                leaf.in_features, leaf.out_features, self._options, bias=leaf.has_bias
            )
        builder = self._builder("")
        hidden = builder.input("hidden")
        logits = builder.graph.call_module(name, (hidden,))
        logits.meta["val"] = parts.head.meta["val"][0]
        builder.bind(parts.head, logits)
        return self._finished(builder, parts.logits, parts.result, {name: Logits(matrix)})

    def embedding_of(self, begin: TracedGraph) -> Embedding:
        """The token embedding in the part that `begin` made."""
        embedding = begin.get_submodule(self._embedding)
        assert isinstance(embedding, Embedding), "it is the token embedding"
        return embedding

    def _builder(self, prefix: str) -> PartBuilder:
        return PartBuilder(self._trace, prefix, self._options.device)

    def _finished(
        self,
        builder: PartBuilder,
        nodes: Iterable[Node],
        result: Node,
        modules: dict[str, nn.Module] | None = None,
    ) -> TracedGraph:
        """Convert the nodes of a part outside of the layers."""
        for node in nodes:
            self._add(builder, node)
        builder.graph.output(builder.result(result))
        drop_unused(builder.graph)
        found = self._modules(builder, Fused(), "") | (modules or {})
        return TracedGraph(builder.graph, found | self._tensors(builder, ""))

    def _add(self, builder: PartBuilder, node: Node) -> None:
        for source in node.all_input_nodes:
            if not builder.has(source):
                builder.add(source)
        builder.add(node)

    def _layer(self, index: int, prefix: str) -> TracedLayer:
        part = self._parts.layers[index]
        builder = self._builder(prefix)
        hidden = builder.input("hidden", part.hidden)
        hidden.meta["val"] = part.hidden.meta["val"][0]
        step, k_cache, v_cache, rows = (
            builder.input(name) for name in ("step", "k_cache", "v_cache", "rows")
        )
        builder.attention_inputs = (step, k_cache, v_cache)
        inputs = {}
        for table in part.tables:
            node = builder.input(f"table_{self._number(table)}")
            node.meta["val"] = value = table.meta["val"][0]
            inputs[node] = table
            # A table is passed as [T, width]. Its other shapes are restored from that.
            is_flat = value.dim() == _TABLE_DIMS
            sizes = (-1, *map(int, value.shape[1:]))
            builder.bind(table, node if is_flat else builder.reshaped(node, sizes))
        try:
            for node in part.nodes:
                self._add(builder, node)
        except ValueError as error:
            kind = type(self._trace.model).__name__
            raise ValueError(f"{kind}: {prefix.rstrip('.')}: {error}") from error
        builder.graph.output(builder.result(part.result))
        leaves = {
            name.removeprefix(prefix): self._trace.leaves[name] for name in builder.leaf_names
        }
        fused = fuse(builder.graph, leaves, lambda node: self._repeats_of(inputs.get(node)), rows)
        for target, order in fused.rotations.row_orders.items():
            self.row_orders[f"layers.{index}.traced_layer.{target}"] = order
        keys = self._table_keys(builder, fused, inputs)
        modules = self._modules(builder, fused, prefix)
        assert builder.attention_call is not None, "a layer makes one attention call"
        call = self._trace.calls[builder.attention_call]
        modules["attention"] = TracedAttention(call, self._options.attention_backend)
        tensors = self._tensors(builder, prefix)
        graph = TracedGraph(builder.graph, modules | tensors)
        shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in tensors.items())
        called = tuple(leaves.values())
        key = (graph.code, call.scale, call.sliding_window, call.soft_cap, shapes, called, keys)
        for target, names in fused.merged.items():
            self.merged[target] = names
        return TracedLayer(graph, keys, ("traced layer", *key))

    def _table_keys(
        self, builder: PartBuilder, fused: Fused, inputs: dict[Node, Node]
    ) -> tuple[tuple[str, int], ...]:
        """The key and field of each table input of the graph. Unused inputs are removed."""
        halves = {}
        for cos, sin in fused.rotations.tables:
            tables = [
                next(table for node, table in inputs.items() if half.name == f"{node.name}_half")
                for half in (cos, sin)
            ]
            kind = f"rope_{self._number(tables[0])}"
            self.tables.pairs[kind] = tuple(self._table(table, is_half=True) for table in tables)
            halves |= {cos: (kind, 0), sin: (kind, 1)}
        keys = []
        for node in list(builder.graph.find_nodes(op="placeholder")):
            if node in halves:
                keys.append(halves[node])
            elif node in inputs:
                if not node.users:
                    builder.graph.erase_node(node)
                    continue
                kind = str(node.target)
                self.tables.pairs[kind] = (self._table(inputs[node], is_half=False),)
                keys.append((kind, 0))
        return tuple(keys)

    def _number(self, table: Node) -> int:
        return self._parts.tables.index(table)

    def _table(self, table: Node, *, is_half: bool) -> str:
        """The name of the tensor with all rows of a table.

        With `is_half`, numbers that a row has twice are taken once, in float32.
        """
        name = f"table_{self._number(table)}{'_half' if is_half else ''}"
        if name not in self.tables.tensors:
            device, length = self._options.device, self._options.max_model_len
            repeats = self._repeats_of(table) if is_half else None
            if is_half:
                while table.target is torch.ops.aten._to_copy.default:
                    # take the table as it was before rounding to the model's dtype
                    (table,) = table.all_input_nodes
            if device.type == "meta":
                few = compute_table(self._trace, table, 1)
                rows = torch.empty((length, *few.shape[1:]), dtype=few.dtype, device=device)
            else:
                rows = compute_table(self._trace, table, length).to(device)
            if is_half:
                is_pairs = repeats == Repeats.pairs
                rows = (rows[:, ::2] if is_pairs else rows[:, : rows.shape[1] // 2]).float()
            self.tables.tensors[name] = rows.reshape(length, -1).contiguous()
        return name

    def _repeats_of(self, table: Node | None) -> Repeats | None:
        if table is None:
            return None
        if table not in self._repeats:
            rows, found = compute_table(self._trace, table, _FEW_POSITIONS), None
            if rows.dim() == _TABLE_DIMS and rows.shape[1] % 2 == 0:
                half = rows.shape[1] // 2
                if torch.equal(rows[:, :half], rows[:, half:]):
                    found = Repeats.halves
                elif torch.equal(rows[:, ::2], rows[:, 1::2]):
                    found = Repeats.pairs
            self._repeats[table] = found
        return self._repeats[table]

    def _modules(self, builder: PartBuilder, fused: Fused, prefix: str) -> dict[str, nn.Module]:
        """The modules that a part's graph calls, by target."""
        leaves = self._trace.leaves
        found = [leaves[name] for name in builder.leaf_names]
        num_experts = max(
            (leaf.num_experts for leaf in found if isinstance(leaf, ExpertsLeaf)), default=0
        )
        modules: dict[str, nn.Module] = {}
        called = [str(node.target) for node in builder.graph.find_nodes(op="call_module")]
        read = builder.graph.find_nodes(op="get_attr")  # some are the weight of a norm
        for target in [*called, *(str(node.target).rpartition(".")[0] for node in read)]:
            if target in fused.merged:
                modules[target] = self._merged_linear(
                    [leaves[prefix + part] for part in fused.merged[target]]
                )
            elif prefix + target in leaves and target not in modules:
                leaf = leaves[prefix + target]
                is_token_table = prefix + target == self._embedding
                if isinstance(leaf, EmbeddingLeaf) and is_token_table:
                    modules[target] = Embedding(
                        leaf.num_rows, leaf.size, self._options, is_head=self.is_tied
                    )
                else:
                    modules[target] = build_leaf(leaf, self._options, num_experts=num_experts)
        return modules

    def _merged_linear(self, leaves: list[Leaf]) -> MergedLinear:
        linears = [leaf for leaf in leaves if isinstance(leaf, LinearLeaf)]
        outputs = tuple(leaf.out_features for leaf in linears)
        first = linears[0]
        options = replace(self._options, dtype=first.dtype)
        return MergedLinear(first.in_features, outputs, options, bias=first.has_bias)

    def _tensors(self, builder: PartBuilder, prefix: str) -> dict[str, Any]:
        """Parameters and buffers that a part's graph reads directly, by target."""
        model, device = self._trace.model, self._options.device
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        stored = model.state_dict().keys()
        found: dict[str, Any] = {}
        read = {str(node.target) for node in builder.graph.find_nodes(op="get_attr")}
        for name in builder.tensor_names:
            target = f"{TENSORS}.{name.removeprefix(prefix)}"
            if target not in read:  # only its conversion to another dtype was traced
                continue
            tensor = parameters.get(name, buffers.get(name))
            assert tensor is not None, f"{name} is a tensor of the model"
            if name in stored:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                found[target] = nn.Parameter(memory, requires_grad=False)
            else:
                found[target] = tensor.to(device)
        for name, value in builder.constants.items():
            found[name] = value.to(device)
        return found


def _name_of(model: Any, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def rows_of_kind(tensors: tuple[Tensor, ...]) -> RopeRows | TableRows:
    """The rows of one kind of table."""
    return RopeRows(*tensors) if len(tensors) > 1 else TableRows(*tensors)
