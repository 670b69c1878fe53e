"""Traced graphs with parameters whose first dimension has the size 1, as the batch has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ostinato.models.traced.graph_parts import TENSORS, PartBuilder
from ostinato.models.traced.graph_values import input_of, inputs_of, integers_of
from ostinato.models.traced.model_trace import ModelTrace

HEADS, TOKENS, DIM = 3, 5, 4


def scaled_heads(x: Tensor, parameter: Tensor) -> Tensor:
    """A scale [1, heads, 1, 1] times heads [1, heads, tokens, dim]."""
    return (x * parameter[:, :, :1, :1]).transpose(1, 2).reshape(1, TOKENS, HEADS * DIM)


def reshaped_parameter(x: Tensor, parameter: Tensor) -> Tensor:
    """Operations whose only input is the parameter, except for the last one."""
    return x + (parameter * 2).squeeze(0).unsqueeze(0)


def split_parameter(x: Tensor, parameter: Tensor) -> Tensor:
    """The parameter's parts have its first dimension too."""
    low, high = (parameter * 2).split(DIM // 2, -1)
    return x.transpose(1, 2) * torch.cat((high, low), -1).transpose(1, 2)


@pytest.mark.parametrize("function", [scaled_heads, reshaped_parameter, split_parameter])
def test_a_parameter_with_a_first_size_of_one(function: Callable[..., Tensor]) -> None:
    x = torch.randn(1, HEADS, TOKENS, DIM)
    parameter = torch.randn(1, HEADS, 1, DIM)
    graph = make_fx(function, tracing_mode="fake")(x, parameter)
    nodes = list(graph.graph.nodes)
    trace = ModelTrace(
        model=None,
        graph=graph,
        tensors={nodes[1].name: "scale"},
        leaves={},
        calls=(),
        layers=(),
        sections={},
    )
    builder = PartBuilder(trace, "", torch.device("cpu"))
    builder.input("x", nodes[0])
    for node in nodes[1:-1]:
        builder.add(node)
    builder.graph.output(builder.result(nodes[-1].args[0]))
    holder = nn.Module()
    holder.register_buffer("scale", parameter)
    root = nn.Module()
    root.add_module(TENSORS, holder)
    part = GraphModule(root, builder.graph)
    torch.testing.assert_close(part(x[0]), function(x, parameter)[0], rtol=0, atol=0)


def test_arguments_of_another_kind_are_named() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.add.Tensor, (x, 1.5), name="sum_of_both")
    assert input_of(node) is x
    assert inputs_of(node) == [x]
    with pytest.raises(ValueError, match="argument 1 of sum_of_both must be a value of the graph"):
        input_of(node, 1)
    with pytest.raises(ValueError, match=r"argument 1 of sum_of_both must be an integer.*got 1\.5"):
        integers_of(node, 1)
