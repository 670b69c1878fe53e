"""Matrices that are loaded in parts, in another row order, sharded, or one for each expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear

from ostinato.models.base import CheckpointLayout, LanguageModel
from ostinato.models.checkpoints.row_orders import (
    gated_queries,
    grouped_parts,
    interleaved_rope,
    per_group_qkv,
    per_head_qkv,
    rotated_last,
)
from ostinato.models.checkpoints.slots import find_slots
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import (
    BuildOptions,
    Linear,
    LinearBase,
    MergedLinear,
)
from ostinato.models.sharding import Shard, Span
from ostinato.models.weight_methods.int8 import Int8
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import WeightMethod

METHODS: list[WeightMethod] = [Plain(), Packed(), Int8(8)]
WIDTH = 64


def options(shard: Shard | None = None) -> BuildOptions:
    return BuildOptions(
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend="reference",
        max_model_len=16,
        shard=shard or Shard(),
    )


class Holder(LanguageModel):
    """A model of the given modules: the loader only asks for modules by name."""

    def __init__(self, layout: CheckpointLayout, **modules: nn.Module) -> None:
        super().__init__()
        self.checkpoint_layout = layout
        for name, module in modules.items():
            self.add_module(name, module)


def fill(model: LanguageModel, tensors: dict[str, Tensor], method: WeightMethod) -> None:
    """Load tensors. Checks that they are exactly those that the model needs."""
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.use(method)
    slots = find_slots(model, model.checkpoint_layout)
    assert slots.keys() == tensors.keys()
    with torch.no_grad():
        for name, tensor in tensors.items():
            slots[name].fill(name, tensor)


def close(one: Tensor, other: Tensor, method: WeightMethod) -> None:
    tolerance = 0.05 * float(other.std()) if method.is_quantized else 1e-4
    torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


shards = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None, max_examples=30)
@given(ranks=shards, kv_heads=st.sampled_from([1, 2, 4, 8]), method=st.sampled_from(METHODS))
def test_column_and_row_parallel_layers_add_up(
    ranks: int, kv_heads: int, method: WeightMethod
) -> None:
    """Each rank has some heads of q, k and v, and a part of the output product's sum."""
    heads, size = 8, 8
    generator = torch.Generator().manual_seed(ranks * 8 + kv_heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = {"q_proj": heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
    tensors = {f"{name}.weight": draw(count, WIDTH) for name, count in rows.items()}
    tensors |= {f"{name}.bias": draw(count) for name, count in rows.items()}
    tensors |= {"o_proj.weight": draw(WIDTH, heads * size), "o_proj.bias": draw(WIDTH)}
    layout = CheckpointLayout(merged=(("qkv_proj", tuple(rows)),))
    prefixed = {f"layer.{name}": tensor for name, tensor in tensors.items()}
    x, attended, residual = draw(5, WIDTH), draw(5, heads * size), draw(5, WIDTH)
    sides: dict[str, list[Tensor]] = {name: [] for name in rows}
    total = torch.zeros(5, WIDTH)
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        queries = shard.span(heads, "heads").times(size)
        keys = shard.kv_heads(kv_heads).times(size)
        qkv = MergedLinear(WIDTH, (queries, keys, keys), options(shard), bias=True)
        out = Linear(queries, WIDTH, options(shard), bias=True)
        model = Holder(layout, layer=nn.ModuleDict({"qkv_proj": qkv, "o_proj": out}))
        fill(model, prefixed, method)
        for name, part in zip(
            rows, qkv(x).split([queries.size, keys.size, keys.size], 1), strict=True
        ):
            sides[name].append(part)
        start = queries.start
        total += out.multiply(attended[:, start : start + queries.size].contiguous())
        assert out.is_partial == (ranks > 1)
    for name, count in rows.items():
        expected = linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        parts = sides[name]
        if name != "q_proj" and kv_heads < ranks:  # each of these heads is on several ranks
            copies = ranks // kv_heads
            for index, part in enumerate(parts):
                assert torch.equal(part, parts[index - index % copies])
            parts = parts[::copies]
        assert sum(part.shape[1] for part in parts) == count
        close(torch.cat(parts, 1), expected, method)
    expected = linear(attended, tensors["o_proj.weight"], tensors["o_proj.bias"]) + residual
    close(total + residual, expected, method)


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    for call, words in (
        (lambda: Shard(0, 4).span(6, "intermediate_size"), "intermediate_size=6"),
        (lambda: Shard(0, 4).kv_heads(3), "num_key_value_heads=3"),
        (lambda: Shard(4, 4), "rank 4 is not in a group of 4"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@settings(deadline=None, max_examples=30)
@given(
    groups=st.integers(1, 4),
    group=st.integers(1, 3),
    ranks=st.sampled_from([1, 2]),
    method=st.sampled_from([Plain(), Packed()]),
)
def test_grouped_qkv_is_sorted_when_it_is_loaded(
    groups: int, group: int, ranks: int, method: WeightMethod
) -> None:
    """Rows are stored as [groups, q heads + k + v, d], as in transformers' Falcon."""
    if groups % ranks:
        return
    heads, size = groups * group, 4
    stored = torch.randn(groups, group + 2, size, WIDTH)
    expected = [stored[:, :group], stored[:, group : group + 1], stored[:, group + 1 :]]
    order = per_group_qkv(heads, groups, size)
    if group == 1:
        assert torch.equal(order, per_head_qkv(heads, size))
    layout = CheckpointLayout(
        renamed=(("qkv_proj.", "query_key_value."),), row_orders=(("qkv_proj", order),)
    )
    bias = torch.randn(stored.shape[:3])
    got: list[tuple[Tensor, ...]] = []
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        queries = shard.span(heads, "heads").times(size)
        keys = shard.kv_heads(groups).times(size)
        qkv = MergedLinear(WIDTH, (queries, keys, keys), options(), bias=True)
        tensors = {
            "query_key_value.weight": stored.reshape(-1, WIDTH),
            "query_key_value.bias": bias.reshape(-1),
        }
        fill(Holder(layout, qkv_proj=qkv), tensors, method)
        got.append(qkv.dense().split([queries.size, keys.size, keys.size]))
        assert qkv.bias is not None
        whole = torch.cat(
            [side.reshape(-1) for side in (bias[:, :group], bias[:, group], bias[:, -1])]
        )
        if ranks == 1:
            assert torch.equal(qkv.bias, whole)
    for index, side in enumerate(expected):
        assert torch.equal(torch.cat([parts[index] for parts in got]), side.reshape(-1, WIDTH))


def test_interleaved_pairs_become_halves() -> None:
    """Rotating pairs (0, 1), (2, 3) of stored rows equals rotating the halves of reordered rows."""
    heads, size, rotary = 3, 8, 6
    order = interleaved_rope(heads, size, rotary)
    stored = torch.randn(heads, size, dtype=torch.float64)
    angle = torch.randn(rotary // 2, dtype=torch.float64)
    first, second = stored[:, 0:rotary:2], stored[:, 1:rotary:2]
    pairs = torch.stack(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    ).flatten(1)
    rotated = torch.cat([pairs, stored[:, rotary:]], 1).view(-1)[order].view(heads, size)
    ours = stored.view(-1)[order].view(heads, size)
    left, right = ours[:, : rotary // 2], ours[:, rotary // 2 : rotary]
    halves = [left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()]
    torch.testing.assert_close(torch.cat([*halves, ours[:, rotary:]], 1), rotated)


def test_rotated_rows_that_are_stored_last_come_first() -> None:
    stored = torch.arange(2 * 7)
    order = rotated_last(2, 7, 4)
    assert stored[order].tolist() == [3, 5, 4, 6, 0, 1, 2, 10, 12, 11, 13, 7, 8, 9]
    order = rotated_last(2, 7, 4, is_interleaved=False)
    assert stored[order].tolist() == [3, 4, 5, 6, 0, 1, 2, 10, 11, 12, 13, 7, 8, 9]


def test_pairs_that_are_stored_by_head_become_two_parts() -> None:
    assert grouped_parts(2, 1, 2).tolist() == [0, 3, 1, 2, 4, 5]


def test_gates_that_are_stored_after_the_queries_of_a_head_come_first() -> None:
    assert gated_queries(2, 2).tolist() == [2, 3, 6, 7, 0, 1, 4, 5]


@pytest.mark.parametrize("order", [None, gated_queries(4, 4)], ids=["as stored", "reordered"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_stored_matrix_can_have_several_outputs(ranks: int, order: Tensor | None) -> None:
    """`two_proj` has two outputs of 16 rows each, `one_proj` the third, of 8 rows."""
    tensors = {
        "a.two_proj.weight": torch.randn(32, WIDTH),
        "a.one_proj.weight": torch.randn(8, WIDTH),
    }
    tensors |= {"a.two_proj.bias": torch.randn(32), "a.one_proj.bias": torch.randn(8)}
    layout = CheckpointLayout(
        merged=(("all_proj", ("two_proj", "two_proj", "one_proj")),),
        row_orders=() if order is None else (("two_proj", order),),
    )
    x = torch.randn(5, WIDTH)
    rows = torch.arange(32) if order is None else order
    two = linear(x, tensors["a.two_proj.weight"], tensors["a.two_proj.bias"])[:, rows]
    one = linear(x, tensors["a.one_proj.weight"], tensors["a.one_proj.bias"])
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        spans = [shard.span(size, "rows") for size in (16, 16, 8)]
        module = MergedLinear(WIDTH, spans, options(shard), bias=True)
        fill(Holder(layout, a=nn.ModuleDict({"all_proj": module})), tensors, Plain())
        wholes = (two[:, :16], two[:, 16:], one)
        parts = [whole.narrow(1, *span[:2]) for whole, span in zip(wholes, spans, strict=True)]
        torch.testing.assert_close(module(x), torch.cat(parts, 1))


def test_orders_reach_separate_parts_and_the_norms_beside_them() -> None:
    order = interleaved_rope(2, 4, 4)
    norm = nn.Module()
    norm.weight = nn.Parameter(torch.empty(8), requires_grad=False)
    qkv = MergedLinear(WIDTH, (8, 8), options())
    layout = CheckpointLayout(
        merged=(("qk_proj", ("q_proj", "k_proj")),),
        row_orders=(("q_proj", order), ("q_norm", order)),
    )
    tensors = {
        "a.q_proj.weight": torch.randn(8, WIDTH),
        "a.k_proj.weight": torch.randn(8, WIDTH),
        "a.q_norm.weight": torch.randn(8),
    }
    model = Holder(layout, a=nn.ModuleDict({"qk_proj": qkv, "q_norm": norm}))
    fill(model, tensors, Plain())
    expected = torch.cat([tensors["a.q_proj.weight"][order], tensors["a.k_proj.weight"]])
    assert torch.equal(qkv.dense(), expected)
    assert torch.equal(model.get_parameter("a.q_norm.weight"), tensors["a.q_norm.weight"][order])


@settings(deadline=None, max_examples=30)
@given(
    is_stacked=st.booleans(),
    is_transposed=st.booleans(),
    ranks=st.sampled_from([1, 2]),
    method=st.sampled_from(METHODS),
)
def test_experts_stacked_or_one_by_one(
    is_stacked: bool, is_transposed: bool, ranks: int, method: WeightMethod
) -> None:
    count, inner = 4, 24
    weight, bias = torch.randn(count, 2 * inner, WIDTH), torch.randn(count, 2 * inner)
    x = torch.randn(3, WIDTH)
    is_transposed = is_transposed and is_stacked
    found: list[Tensor] = []
    outputs: list[Tensor] = []
    for rank in range(ranks):
        span: Span = Shard(rank, ranks).span(count, "experts")
        experts = ExpertLinear(span, WIDTH, (inner, inner), options(), bias=True)
        if is_stacked:
            layout = CheckpointLayout(
                stacked=("gate_up_proj",), transposed=("gate_up_proj",) if is_transposed else ()
            )
            tensors = {
                "mlp.gate_up_proj.weight": weight.transpose(1, 2) if is_transposed else weight,
                "mlp.gate_up_proj.bias": bias,
            }
        else:
            layout = CheckpointLayout(merged=(("gate_up_proj", ("w1", "w3")),))
            tensors = {
                f"mlp.{expert}.{name}.{kind}": value
                for expert in range(count)
                for kind, whole in (("weight", weight), ("bias", bias))
                for name, value in zip(("w1", "w3"), whole[expert].split(inner), strict=True)
            }
        fill(Holder(layout, mlp=nn.ModuleDict({"gate_up_proj": experts})), tensors, method)
        found.append(experts.dense())
        every_expert = torch.arange(span.size, dtype=torch.int32).expand(len(x), -1).contiguous()
        outputs.append(experts(x, every_expert).view(len(x), span.size, -1))
    close(torch.cat(found), weight, method)
    expected = torch.einsum("ti,eoi->teo", x, weight) + bias
    close(torch.cat(outputs, 1), expected, method)
