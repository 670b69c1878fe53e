"""The fused kernels of small steps on a device: results, batch invariance, a captured replay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.layers.few_rows import MOST_EXPERT_ROWS, MOST_QUANTIZED_ROWS
from ostinato.models.registry import build_model
from ostinato.ops.fused.fused_experts import EXPERT_COUNTERS, fused_experts
from ostinato.ops.fused.fused_linear import fused_linear, linear_and_scale, most_rows, scale_rows
from ostinato.ops.fused.fused_quantized import (
    COUNTERS_OF_PRODUCT,
    fused_quantized_linear,
    quantized_linear_and_scale,
)
from ostinato.ops.moe.routing import RouteSpec
from ostinato.ops.quantized import quantize_linear_weight
from ostinato.ops.quantized_reference import QuantFormat
from tests.gpu.tiny_llama import MODEL

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MOST_ROWS = most_rows(torch.bfloat16)
# (N, K) of an 8B model: QKV, output, gate or up, down. The last size is no multiple of a tile.
SIZES = [(6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (1000, 712)]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


def rounding(expected: Tensor) -> float:
    """`2**-7` of the largest result. Rounding to bfloat16 changes it by at most half of that."""
    return float(expected.abs().max()) * 2.0**-7


@pytest.mark.parametrize("rows", [1, 8, 16, 17, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_linear_with_a_residual(rows: int, out_features: int, in_features: int) -> None:
    x = random(rows, in_features, seed=1)
    weight = random(out_features, in_features, seed=2) * in_features**-0.5
    residual = random(rows, out_features, seed=3)
    result = fused_linear(x, weight, residual=residual)
    expected = x.double() @ weight.double().T + residual.double()
    assert float((result.double() - expected).abs().max()) <= rounding(expected)


@pytest.mark.parametrize("rows", [1, 16, 40, MOST_ROWS])
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_norm_and_gate(rows: int, out_features: int, in_features: int) -> None:
    x = random(rows, in_features, seed=1) * 30
    weight = random(2 * out_features, in_features, seed=2) * in_features**-0.5
    norm_weight = 1 + 0.1 * random(in_features, seed=4)
    scaled, squares = scale_rows(x, norm_weight)
    result = fused_linear(scaled, weight, squares=squares, eps=1e-5, activation="silu")
    wide = x.double()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm_weight.double()
    gate, up = (normal @ weight.double().T).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert float((result.double() - expected).abs().max()) <= 2 * rounding(expected)


@pytest.mark.parametrize("rows", [1, 16, 40, MOST_ROWS])
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_a_norm_of_the_result(rows: int, out_features: int, in_features: int) -> None:
    x, residual = random(rows, in_features, seed=1), random(rows, out_features, seed=3)
    weight = random(out_features, in_features, seed=2) * in_features**-0.5
    norm_weight = 1 + 0.1 * random(out_features, seed=4)
    result, scaled, squares = linear_and_scale(x, weight, None, residual, norm_weight)
    assert torch.equal(result, fused_linear(x, weight, residual=residual))
    assert torch.equal(scaled, scale_rows(result, norm_weight)[0])
    exact = result.double().square().sum(1)
    torch.testing.assert_close(squares.double().sum(1), exact, atol=0.0, rtol=1e-5)


@pytest.mark.parametrize(("count", "fewest"), [(16, 1), (MOST_ROWS, 17)])
def test_a_row_gets_the_same_bits_among_others(count: int, fewest: int) -> None:
    x = random(count, 4096, seed=1)
    weight, norm_weight = random(6144, 4096, seed=2), random(4096, seed=3)

    def normal_product(x: Tensor) -> Tensor:
        scaled, squares = scale_rows(x, norm_weight)
        return fused_linear(scaled, weight, squares=squares, eps=1e-5)

    assert torch.equal(normal_product(x[-fewest:]), normal_product(x)[-fewest:])


def test_a_chain_of_captured_calls_waits_for_each_result() -> None:
    """A kernel starts before the previous one ends, but must read all its results."""
    weights = [random(1024, 1024, seed=seed) * 1024**-0.5 for seed in range(12)]
    norm_weight = 1 + 0.1 * random(1024, seed=20)
    x = random(8, 1024, seed=21)

    def chain() -> Tensor:
        hidden = x.clone()
        for weight in weights:
            scaled, squares = scale_rows(hidden, norm_weight)
            inner = fused_linear(scaled, weight, squares=squares, eps=1e-5)
            hidden, scaled, squares = linear_and_scale(inner, weight, None, hidden, norm_weight)
            hidden = fused_linear(scaled, weight, squares=squares, eps=1e-5, residual=hidden)
        return hidden

    torch.cuda.synchronize()
    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for seed in range(50):
        x.copy_(random(8, 1024, seed=seed))
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, chain()), seed
    assert not torch.equal(result, expected), "the replay ignored its new inputs"


def test_a_captured_call_reads_new_inputs() -> None:
    x, weight, residual = (random(*size, seed=7) for size in ((8, 512), (256, 512), (8, 256)))
    fused_linear(x, weight, residual=residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused_linear(x, weight, residual=residual)
    x.copy_(random(8, 512, seed=8))
    graph.replay()
    assert torch.equal(result, fused_linear(x, weight, residual=residual))


def test_layers_have_a_form_for_few_rows() -> None:
    """`test_graphs_gpu.py` compares steps that use this form with the eager model."""
    config = LlamaForCausalLM.read_config(MODEL)
    model = build_model(config, dtype=torch.bfloat16, device=CUDA, attention_backend="triton")
    init_dummy_weights(model, 0)
    assert isinstance(model, CausalLM)
    assert isinstance(layer := model.layers[0], DecoderLayer)
    assert layer.few_rows() is not None


@pytest.mark.parametrize("tokens", [1, 8, 40, MOST_ROWS, MOST_EXPERT_ROWS])
def test_experts(tokens: int) -> None:
    """Against plain torch in float32. All experts are chosen, so no rounding changes the choice."""
    spec = RouteSpec(8, 8)
    x, residual = random(tokens, 1024, seed=1), random(tokens, 512, seed=2)
    sizes = ((512, 1024), (8, 512), (8, 512, 512), (8, 512, 256))
    output, router, gate_up, down = (
        random(*size, seed=seed) * size[-1] ** -0.5 for seed, size in enumerate(sizes, 3)
    )
    norm_weight = 1 + 0.1 * random(512, seed=8)

    def call(*tensors: Tensor) -> Tensor:
        x, output, residual, norm_weight, router, gate_up, down = tensors
        matrices = (router, None, gate_up, down)
        options = {"rounds_logits": False, "activation": "silu"}
        return fused_experts(
            x,
            output,
            None,
            residual,
            norm_weight,
            1e-5,
            *matrices,
            spec,
            **options,
            counters=torch.zeros(EXPERT_COUNTERS, dtype=torch.int32, device=x.device),
        )

    operands = (x, output, residual, norm_weight, router, gate_up, down)
    result = call(*operands)
    expected = call(*(tensor.cpu().float() for tensor in operands))
    assert float((result.cpu().float() - expected).abs().max()) <= 3 * rounding(expected)
    for _ in range(20):  # a different program may be the last to add to a token
        assert torch.equal(call(*operands), result)


@pytest.mark.parametrize("rows", [1, 4, 8, 33, MOST_ROWS, MOST_QUANTIZED_ROWS])
def test_quantised_products(rows: int) -> None:
    """Against plain torch in float32; K is divided in all steps but the largest."""
    form = QuantFormat(4, 32, True)
    weight = quantize_linear_weight(random(2048, 1024, seed=1).cpu().float(), form)
    x, residual = random(rows, 1024, seed=2), random(rows, 2048, seed=3)
    norm_weight = 1 + 0.1 * random(2048, seed=4)

    def call(x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor) -> list[Tensor]:
        counters = torch.zeros(2 * COUNTERS_OF_PRODUCT, dtype=torch.int32, device=x.device)
        shared = (weight, None)
        whole = quantized_linear_and_scale(
            x, *shared, 2048, form, counters, 0, residual, norm_weight
        )
        inner = fused_quantized_linear(x, *shared, 1024, form, counters, 1, activation="silu")
        return [whole[0], whole[1], whole[2].sum(1), inner]

    operands = (x, weight.to(CUDA), residual, norm_weight)
    found = call(*operands)
    exact = call(x.cpu().float(), weight, residual.cpu().float(), norm_weight.cpu().float())
    for one, other in zip(found, exact, strict=True):
        assert float((one.cpu().float() - other).abs().max()) <= 3 * rounding(other)
    for _ in range(20):  # a different program may be the last to add the parts of a tile
        assert all(map(torch.equal, call(*operands)[:2], found[:2]))
