"""Weight methods of float checkpoints: plain and packed results, and the stated size of each."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from ostinato.models.layers.linear_layers import BuildOptions, Linear
from ostinato.models.layers.vocabulary_layers import Embedding
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_methods.int8 import Int8
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import WeightMethod


def options(dtype: torch.dtype, device: str = "cpu") -> BuildOptions:
    return BuildOptions(
        dtype=dtype, device=torch.device(device), attention_backend="reference", max_model_len=8
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [Plain(), Packed()])
@torch.no_grad()
def test_products_and_rows(method: WeightMethod, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(45, 20, dtype=dtype), torch.randn(45, dtype=dtype)
    x, residual = torch.randn(5, 20, dtype=dtype), torch.randn(5, 45, dtype=dtype)
    layer = Linear(20, 45, options(dtype), bias=True)
    table = Embedding(45, 20, options(dtype), is_head=True)
    for module in (layer, table):
        module.use(method)
        (part,) = module.parts()
        module.load("weight", weight, part)
        assert torch.equal(module.dense(), weight)
    layer.load("bias", bias, layer.parts()[0])
    expected = linear(x.float(), weight.float(), bias.float()) + residual.float()
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(layer(x, residual).float(), expected, rtol=tolerance, atol=tolerance)
    ids = torch.tensor([44, 0, 3])
    assert torch.equal(table(ids), weight[ids])
    logits = table.logits(x)
    assert logits.dtype == torch.float32
    exact = linear(x.float(), weight.float())
    torch.testing.assert_close(logits, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [(1, 1), (33, 7), (96, 64), (100, 513)])
@pytest.mark.parametrize("method", [Plain(), Packed(), Int8(), Int4(), Int4(64, symmetric=False)])
def test_the_stated_memory_is_what_a_loaded_matrix_takes(
    method: WeightMethod, size: tuple[int, int]
) -> None:
    """Memory plans and traced programs rely on the shapes that are stated before loading."""
    rows, columns = size
    planned = Linear(columns, rows, options(torch.bfloat16, "meta"))
    planned.use(method)
    loaded = Linear(columns, rows, options(torch.bfloat16))
    loaded.use(method)
    loaded.load("weight", torch.randn(rows, columns), loaded.parts()[0])
    for name, parameter in planned.named_parameters():
        real = loaded.get_parameter(name)
        assert (real.shape, real.dtype) == (parameter.shape, parameter.dtype)
    assert method.num_bytes(planned.spec) == sum(p.nbytes for p in loaded.parameters())
    assert loaded.static_key == planned.static_key
