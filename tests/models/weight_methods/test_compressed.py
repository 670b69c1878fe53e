"""The weight method `compressed`: matrices from several parts, experts, and the choice of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.conf.schema import ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.choose_weights import WeightsByRole, choose_weights
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import BuildOptions, LinearBase, MergedLinear
from ostinato.models.layers.vocabulary_layers import Embedding
from ostinato.models.weight_methods.compressed import Compressed
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import WeightMethod

CPU = torch.device("cpu")
OPTIONS = BuildOptions(
    dtype=torch.bfloat16, device=CPU, attention_backend="reference", max_model_len=8
)


def _load(module: LinearBase, matrices: list[torch.Tensor], order: list[int]) -> None:
    """Load stored matrices, the parts of a module, in some order."""
    parts = module.stacked_parts([None] * len(matrices))
    for index in order:
        module.load("weight", matrices[index], parts[index])


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([32, 64, 5, 27, 40, 96]), min_size=1, max_size=5),
    columns=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_parts_of_any_size_in_any_order(sizes: list[int], columns: int, seed: int) -> None:
    """Parts that share a panel are compressed together. The bits are those of packed weights."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(sizes), generator=generator).tolist()
    matrices = [torch.randn(size, columns, generator=generator) for size in sizes]
    matrices[0] *= torch.logspace(-30, 30, columns)  # too diverse to be compressed
    x = torch.randn(3, columns, generator=generator).bfloat16()
    results: list[torch.Tensor] = []
    for method in (Compressed(), Packed()):
        module = MergedLinear(columns, sizes, OPTIONS)
        module.use(method)
        for _ in range(2):  # loading again replaces the matrix
            _load(module, matrices, order)
        assert torch.equal(module.dense(), torch.cat(matrices).bfloat16())
        results.append(module(x))
    assert torch.equal(*results)


def test_an_embedding_and_the_comparison_of_a_second_copy() -> None:
    weight = torch.randn(45, 20)
    table = Embedding(45, 20, OPTIONS, is_head=True)
    table.use(Compressed())
    (part,) = table.parts()
    table.load("weight", weight, part)
    assert torch.equal(table(torch.tensor([44, 0, 3])), weight[[44, 0, 3]].bfloat16())
    assert table.is_comparable(part)
    assert table.equals("weight", weight, part)
    weight[44, 19] += 1
    assert not table.equals("weight", weight, part)


@pytest.mark.parametrize("size", [(1, 1), (33, 7), (96, 64), (100, 513)])
def test_the_stated_memory_is_what_a_loaded_matrix_takes(size: tuple[int, int]) -> None:
    module = MergedLinear(size[1], [size[0]], OPTIONS)
    module.use(Compressed())
    stated = Compressed().num_bytes(module.spec)
    _load(module, [torch.randn(size, generator=torch.Generator().manual_seed(0))], [0])
    taken = sum(parameter.nbytes for parameter in module.parameters())
    panels = len(module.weights["weight"])
    assert stated <= taken <= stated + 64 * panels  # up to eight exceptions in a panel


def test_the_exceptions_of_experts_are_joined() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 45, 20, generator=generator)
    weight[1] *= torch.logspace(-30, 30, 20)  # too diverse to be compressed
    x = torch.randn(4, 20, generator=generator).bfloat16()
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [1, 0]], dtype=torch.int32)
    results: list[torch.Tensor] = []
    for method in (Compressed(), Packed()):
        module = ExpertLinear(3, 20, [20, 25], OPTIONS)
        module.use(method)
        for _ in range(2):  # loading again replaces the matrices
            for expert in (2, 0, 1):
                pieces = weight[expert].split([20, 25])
                parts = module.stacked_parts([None, None])
                for part, piece in zip(parts, pieces, strict=True):
                    module.load("weight", piece, replace(part, expert=expert))
        assert torch.equal(module.dense(), weight.bfloat16())
        results.append(module(x, ids))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("dtype", "pack", "compress", "expected"),
    [
        (torch.bfloat16, True, None, Compressed()),
        (torch.bfloat16, True, True, Compressed()),
        (torch.bfloat16, True, False, Packed()),
        (torch.float32, True, None, Packed()),
        (torch.float16, True, None, Plain()),
        (torch.bfloat16, False, None, Plain()),
    ],
)
def test_the_choice(
    dtype: torch.dtype, pack: bool, compress: bool | None, expected: WeightMethod
) -> None:
    section = ModelSection()
    policy = choose_weights(
        section, open_checkpoint(section), pack=pack, compress=compress, device=CPU, dtype=dtype
    )
    assert isinstance(policy, WeightsByRole)
    assert policy.layers == policy.head == expected


@pytest.mark.parametrize(
    ("dtype", "pack", "reason"),
    [
        (torch.float32, True, "only bfloat16 weights are compressed, but the weight is torch.fl"),
        (torch.bfloat16, False, "graphs.pack_weights=false keeps weights as they are; leave it"),
    ],
)
def test_compression_that_is_impossible_is_refused(
    dtype: torch.dtype, pack: bool, reason: str
) -> None:
    section = ModelSection()
    checkpoint = open_checkpoint(section)
    with pytest.raises(ValueError, match=f"graphs.compress_weights=true, but {reason}"):
        choose_weights(section, checkpoint, pack=pack, compress=True, device=CPU, dtype=dtype)
