"""The fused kernels against plain torch and the reference backend, under Triton's interpreter.

The interpreter must be chosen before a kernel is decorated. So this file has a name that pytest
does not collect. test_interpreted_kernels.py runs it in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import KVCache
from ostinato.models.registry import build_model, model_class
from ostinato.models.step_tensors import ForwardBatch
from ostinato.ops.activation import activate
from ostinato.ops.backends.reference import BACKEND as REFERENCE
from ostinato.ops.backends.triton import BACKEND
from ostinato.ops.fused.linear_tiles import choose_tile
from ostinato.ops.fused.triton_fused_experts import launch_experts
from ostinato.ops.fused.triton_fused_linear import (
    launch,
    launch_linear_and_scale,
    launch_norm_linear,
    launch_scale_rows,
)
from ostinato.ops.moe.routing import route_on_cuda
from ostinato.ops.moe.triton_moe_linear import moe_linear_on_cuda
from ostinato.ops.norm import plain_rms_norm
from tests.models.driver import Driver, Forward, Sequence
from tests.ops.attention_steps import Shape, known, make_step
from tests.ops.exact_fp8 import FP8, convert_exactly
from tests.ops.widened_bfloat16 import widen_products_of_bfloat16
from tests.runtime.tiny import MODEL

# Let these ops run their CUDA kernels for CPU tensors too.
_KERNELS = torch.library.Library("ostinato", "IMPL")
_KERNELS.impl("fused_linear", launch, "CPU")
_KERNELS.impl("linear_and_scale", launch_linear_and_scale, "CPU")
_KERNELS.impl("scale_rows", launch_scale_rows, "CPU")
_KERNELS.impl("fused_experts", launch_experts, "CPU")
_KERNELS.impl("norm_linear", launch_norm_linear, "CPU")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    """The result of a norm and `fused_linear`, in float64."""
    x, weight = x.double(), weight.double()
    if norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_weight.double()
    result = x @ weight.T
    if bias is not None:
        result = result + bias.double()
    if activation:
        result = activate(result, activation, gated=True)
    return result if residual is None else result + residual.double()


# (rows, N, K, parts), for float32's tiles: one row, more rows than a tile, sizes that fill no tile.
LINEARS = [
    (1, 64, 32, {"norm"}),
    (3, 48, 64, {"norm", "bias"}),
    (16, 40, 96, {"norm", "silu"}),
    (17, 64, 64, {"residual"}),
    (5, 33, 72, {"residual", "bias"}),
    (64, 48, 128, {"norm", "gelu_pytorch_tanh", "bias"}),
    (70, 20, 40, {"norm", "gelu", "residual"}),
    (2, 16, 600, {"norm", "relu"}),
    (2, 24, 32, {"quick_gelu"}),
    (4, 32, 40, {"relu2"}),
]


def arguments(
    rows: int, out_features: int, in_features: int, parts: set[str], dtype: torch.dtype
) -> tuple[Any, ...]:
    activation = next(iter(parts - {"norm", "bias", "residual"}), "")
    stacked = out_features * (2 if activation else 1)
    # Rows lie apart, as those of a larger tensor do.
    x = random(rows, in_features + 8, seed=1, dtype=dtype)[:, :in_features]
    weight = (random(stacked, in_features, seed=2) * in_features**-0.5).to(dtype)
    bias = random(stacked, seed=3, dtype=dtype) if "bias" in parts else None
    norm_weight = 1.0 + 0.1 * random(in_features, seed=4) if "norm" in parts else None
    residual = None
    if "residual" in parts:
        residual = random(rows, out_features + 8, seed=5, dtype=dtype)[:, :out_features]
    return x, weight, bias, norm_weight, 1e-6, activation, residual


def called(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """The kernel's arguments, with scaled rows, squares and the kernel's name of the activation."""
    x, weight, bias, norm_weight, eps, activation, residual = found
    squares = None
    if norm_weight is not None:
        x, squares, _ = launch_scale_rows(x, norm_weight)
    names = {"gelu_pytorch_tanh": "gelu_tanh"}
    return x, weight, bias, squares, eps, names.get(activation, activation), residual


def name_of(value: int | set[str]) -> str:
    """A part of a test's name. Sets are sorted, because their order differs between processes."""
    return "-".join(sorted(value)) if isinstance(value, set) else str(value)


@pytest.mark.parametrize(("rows", "out_features", "in_features", "parts"), LINEARS, ids=name_of)
def test_linear(rows: int, out_features: int, in_features: int, parts: set[str]) -> None:
    found = arguments(rows, out_features, in_features, parts, torch.float32)
    result = launch(*called(found))
    assert result.shape == (rows, out_features)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), expected(*found), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("rows", "size", "in_features"), [(1, 40, 32), (17, 64, 96), (70, 33, 72)])
def test_a_norm_of_the_result(rows: int, size: int, in_features: int) -> None:
    found = arguments(rows, size, in_features, {"residual", "bias"}, torch.float32)
    x, weight, bias, *_, residual = found
    norm_weight = 1.0 + 0.1 * random(size, seed=6)
    result, scaled, squares = launch_linear_and_scale(x, weight, bias, residual, norm_weight)
    assert torch.equal(result, launch(*found))
    assert torch.equal(scaled, result * norm_weight)
    exact = result.double().square().sum(1)
    torch.testing.assert_close(squares.double().sum(1), exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [5, 40])
def test_linear_in_bfloat16(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would multiply bfloat16's raw 16-bit integers, so operands are widened."""
    widen_products_of_bfloat16(monkeypatch)
    found = arguments(rows, 48, 160, {"norm", "silu", "residual"}, torch.bfloat16)
    result = launch(*called(found))
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), expected(*found), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("count", [7, 16, 40])
def test_a_row_gets_the_same_bits_among_others(count: int) -> None:
    """Steps of up to 16 rows have one tile shape, larger steps have another."""
    x, *rest = arguments(count, 40, 96, {"norm", "silu"}, torch.float32)
    together = launch(*called((x, *rest)))
    fewest = 1 if count <= 16 else 17
    # The rows keep their positions in the tile: a NumPy product, unlike one of tensor cores,
    # depends on the position.
    alone = launch(*called((x[:fewest], *rest)))
    assert torch.equal(alone, together[:fewest])


def test_tiles() -> None:
    assert choose_tile(1, 4096, 4096, 2, is_gated=False) == choose_tile(
        16, 4096, 4096, 2, is_gated=False
    )
    assert choose_tile(17, 6144, 4096, 2, is_gated=False).block_m == 64
    assert choose_tile(1, 4096, 4096, 2, is_gated=False).block_n == 32
    assert choose_tile(1, 6144, 4096, 2, is_gated=False).block_n == 64, "too many programs"
    assert choose_tile(65, 4096, 4096, 2, is_gated=False).block_m == 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({0: random(2, 16, dtype=torch.float16)}, "x is torch.float16"),
        ({0: random(16, 2).T}, "x has strides"),
        ({1: random(16, 8).T}, "the weight has strides"),
        ({6: random(8, 2).T}, "the residual has strides"),
    ],
)
def test_wrong_tensors_are_named(change: dict[int, Tensor], reason: str) -> None:
    found = [random(2, 16), random(8, 16), None, None, 0.0, "", None]
    for index, tensor in change.items():
        found[index] = tensor
    with pytest.raises(ValueError, match=reason):
        launch(*found)


MIXED = [(1, 100), (13, 40), (2, 2), (9, 64), (1, 300)]


def shape(heads: int, kv_heads: int, dim: int, size: int, **more: Any) -> Shape:
    return Shape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=size,
        num_rows=7,
        num_padding=3,
        **more,
    )


# (shape, rotated elements, norms of heads)
PROJECTIONS = [
    (shape(4, 2, 32, 16), 32, False),
    (shape(4, 1, 64, 8), 64, True),
    pytest.param(shape(3, 1, 80, 64), 20, False, marks=pytest.mark.slow),
    (shape(2, 2, 16, 16, sliding_window=9, soft_cap=5.0), 0, False),
    pytest.param(shape(4, 2, 32, 16, has_sinks=True), 16, True, marks=pytest.mark.slow),
    (shape(4, 2, 16, 16, cache_dtype=FP8), 16, True),
]


@pytest.mark.parametrize(("case", "rotated", "has_norms"), PROJECTIONS, ids=lambda x: str(x)[:60])
def test_projection(
    case: Shape, rotated: int, has_norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel rotates the heads and writes the cache as the reference backend does."""
    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly(interpreter._convert_float))
    step = make_step(MIXED, case)
    qkv = torch.cat([tensor.flatten(1) for tensor in step[:3]], 1)
    qkv = torch.cat((qkv, qkv), 1)[:, : qkv.shape[1]]  # rows lie apart
    angles = random(len(qkv), rotated // 2, seed=6)
    cos, sin = (angles.cos(), angles.sin()) if rotated else (None, None)
    norms = [1.0 + 0.1 * random(case.head_dim, seed=seed) for seed in (7, 8)]
    results = []
    for backend in (BACKEND, REFERENCE):
        k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
        out = backend.run_projected(
            qkv,
            cos,
            sin,
            norms[0] if has_norms else None,
            norms[1] if has_norms else None,
            1e-6,
            case.num_heads,
            k_cache,
            v_cache,
            step.metadata,
            case.head_dim**-0.5,
            case.sliding_window,
            case.soft_cap,
            *case.per_head(),
        )
        results.append((out[: step.num_tokens], known(k_cache), known(v_cache)))
        assert (out[step.num_tokens :] == 0).all(), "padding rows must be zeros"
    (out, k_cache, v_cache), (out_expected, k_expected, v_expected) = results
    # A difference in the last bit of float32 can lead to the next number of 8 bits.
    step_of = {None: 2e-6, FP8: 0.13}[case.cache_dtype]
    torch.testing.assert_close(k_cache, k_expected, atol=step_of, rtol=step_of)
    assert torch.equal(v_cache, v_expected), "values must be copied unchanged"
    tolerance = 5e-6 if case.cache_dtype is None else 2e-3
    torch.testing.assert_close(out, out_expected, atol=tolerance, rtol=tolerance)


SMALL = {**MODEL, "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 60}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": {**SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**SMALL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {
        **SMALL,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 7,
    },
    "smollm3": {
        **SMALL,
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
    },
    "gemma": {
        **SMALL,
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


def build(
    hf_config: dict[str, Any], backend: str, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, ModelConfig]:
    config = model_class(hf_config["architectures"][0]).read_config(hf_config)
    model = build_model(config, dtype=dtype, device=torch.device("cpu"), attention_backend=backend)
    init_dummy_weights(model, 3)
    assert isinstance(model, CausalLM)
    return model, config


def _as_it_is(model: CausalLM) -> None:
    """Returns None, so that the driver calls the model's own forward."""


def fused(model: CausalLM) -> Forward:
    """The model's forward with the layers for few rows."""

    def forward(batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        hidden, step = model.begin(batch)
        for index, (layer, cache) in enumerate(zip(model.layers, kv_cache, strict=True)):
            assert isinstance(layer, DecoderLayer)
            few = layer.few_rows()
            few = layer if few is None else few
            rows = batch.logits_indices if index == len(model.layers) - 1 else None
            hidden = few(hidden, step, *cache, rows)
        return model.finish(hidden)

    return forward


def logits_of(
    hf_config: dict[str, Any],
    backend: str,
    form: Callable[[CausalLM], Forward | None],
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The logits of `logits_of_steps` for a model with random weights."""
    model, config = build(hf_config, backend, dtype)
    return logits_of_steps(Driver(model, config, forward=form(model), dtype=cache_dtype))


def logits_of_steps(driver: Driver) -> list[Tensor]:
    """Logits of a prompt, a decode of it beside a second prompt in chunks, and a decode of both."""
    generator = torch.Generator().manual_seed(1)
    first, second = (
        Sequence(torch.randint(2, 60, (count,), generator=generator).tolist()) for count in (20, 26)
    )
    steps = [[(first, 17)], [(first, 1), (second, 17)], [(second, 8), (first, 1)]]
    steps += [[(first, 1), (second, 1)]]
    return [torch.cat(driver.step(step)) for step in steps]


# A model takes seconds. Only qwen3, which has norms of queries and keys, is not marked slow.
_OFTEN = ("qwen3",)
_WHOLE = [name if name in _OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", _WHOLE)
def test_whole_models(name: str) -> None:
    """Prefill, chunks beside decodes, decode: our kernels in every layer, against the reference."""
    expected = logits_of(MODELS[name], "reference", _as_it_is)
    for one, other in zip(logits_of(MODELS[name], "triton", fused), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-4)


EXPERTS = {
    **SMALL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
GEMMA2 = {
    **MODELS["gemma"],
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 16,
    "sliding_window": 7,
}
OPTIONS: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype | None, float]] = {
    "float16": (MODELS["qwen3"], torch.float16, None, 1e-2),
    "8-bit cache": (MODELS["qwen3"], torch.float32, FP8, 1e-2),
    "experts": (EXPERTS, torch.float32, None, 2e-5),
    "experts of larger steps": (EXPERTS, torch.float32, None, 2e-5),
    "soft caps and windows": (GEMMA2, torch.float32, None, 2e-5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_whole_models_with_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps with other types, experts, windows and caps."""
    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly(interpreter._convert_float))
    hf_config, dtype, cache_dtype, tolerance = OPTIONS[name]
    options = (dtype, cache_dtype)
    expected = logits_of(hf_config, "reference", _as_it_is, *options)
    kernels = torch.library.Library("ostinato", "IMPL")
    kernels.impl("moe_linear", moe_linear_on_cuda, "CPU")
    kernels.impl("route", route_on_cuda, "CPU")
    form = _as_it_is if name == "experts of larger steps" else fused
    for one, other in zip(logits_of(hf_config, "triton", form, *options), expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=10 * tolerance)


def test_plain_torch_is_the_same_op() -> None:
    """The plain norm and activation around a product, as other devices compute the op."""
    found = arguments(4, 24, 32, {"norm", "bias", "silu", "residual"}, torch.float32)
    normal = plain_rms_norm(found[0], found[3], found[4])
    plain = activate(normal @ found[1].T + found[2], "silu", gated=True) + found[6]
    torch.testing.assert_close(plain.double(), expected(*found), atol=2e-5, rtol=2e-5)
