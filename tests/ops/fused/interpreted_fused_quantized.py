"""The fused kernels of quantised weights under Triton's interpreter, against plain torch.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.choose_weights import PLAIN
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.few_rows import MOST_QUANTIZED_ROWS
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.registry import build_model, model_class
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_policy import WeightPolicy
from ostinato.ops.fused import triton_fused_quantized
from ostinato.ops.fused.fused_quantized import COUNTERS_OF_PRODUCT, _plain
from ostinato.ops.fused.triton_fused_linear import launch_scale_rows
from ostinato.ops.fused.triton_fused_quantized import launch_quantized
from ostinato.ops.gpu_quantized import triton_quantized_linear
from ostinato.ops.quantized_reference import QuantFormat
from tests.models.driver import Driver
from tests.ops.fused.interpreted_fused import MODELS, fused, logits_of_steps, random
from tests.ops.gpu_quantized.interpreted_quantized import FORMS, stored

_KERNELS = torch.library.Library("ostinato", "IMPL")
_KERNELS.impl("fused_quantized_linear", launch_quantized, "CPU")

FEW, MANY = 3, 6  # rows without and with matrix units


def arguments(
    form: QuantFormat, rows: int, size: tuple[int, int], parts: set[str]
) -> tuple[Any, ...]:
    """Arguments of the op for a weight [N or 2 N, K] of random bytes."""
    (out_features, in_features), is_gated = size, "silu" in parts
    width = out_features * (2 if is_gated else 1)
    x = random(rows, in_features + 8, seed=1)[:, :in_features]
    squares = None
    if "norm" in parts:
        x, squares, _ = launch_scale_rows(x, 1.0 + 0.1 * random(in_features, seed=4))
    order = torch.randperm(in_features, generator=torch.Generator().manual_seed(7)).int()
    return (
        x,
        stored(form, rows, (width, in_features)),
        random(width, seed=3) if "bias" in parts else None,
        out_features,
        order if "order" in parts else None,
        squares,
        1e-6,
        "silu" if is_gated else "",
        random(rows, out_features + 8, seed=5)[:, :out_features] if "residual" in parts else None,
        1.0 + 0.1 * random(out_features, seed=6) if "scale" in parts else None,
    )


def counters() -> Tensor:
    """Zeros for the call number 1; no other counter may change."""
    found = torch.full((3 * COUNTERS_OF_PRODUCT,), -7, dtype=torch.int32)
    found[COUNTERS_OF_PRODUCT : 2 * COUNTERS_OF_PRODUCT] = 0
    return found


def call(given: tuple[Any, ...], own: Tensor, form: QuantFormat) -> tuple[Any, ...]:
    """All arguments of call number 1, to be unpacked."""
    return (*given, own, 1, *form)


def check(form: QuantFormat, rows: int, size: tuple[int, int], parts: set[str]) -> None:
    given, own = arguments(form, rows, size, parts), counters()
    found = launch_quantized(*call(given, own, form))
    expected = _plain(*call(given, counters(), form))
    others = torch.cat([own[:COUNTERS_OF_PRODUCT], own[2 * COUNTERS_OF_PRODUCT :]])
    assert (others == -7).all(), "a call must change its own counters only"
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-5)
    sums = [each.sum(1) for each in (found[2], expected[2])]
    torch.testing.assert_close(sums[0], sums[1], atol=1e-2, rtol=1e-5)


# (format, rows, [N, K], parts). With K = 164, nothing is divided; with 600, K is.
CASES = [
    (FORMS[1], FEW, (70, 164), {"norm", "bias"}),
    (FORMS[4], 1, (70, 600), {"residual", "scale", "order"}),
    (FORMS[5], FEW, (40, 600), {"norm", "silu", "bias"}),
    (FORMS[0], MANY, (70, 600), {"residual", "scale"}),
    (FORMS[2], 20, (40, 600), {"norm", "silu"}),
    (FORMS[7], MANY, (40, 164), {"norm", "silu", "order"}),
]
_MARKED = [
    case if case in CASES[1:4] else pytest.param(*case, marks=pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize(("form", "rows", "size", "parts"), _MARKED, ids=str)
def test_parts_of_a_product(
    form: QuantFormat, rows: int, size: tuple[int, int], parts: set[str]
) -> None:
    check(form, rows, size, parts)


def test_the_cases_divide_k() -> None:
    """Cases of both kernels have parts, with a gated activation and with a norm after them."""
    divided = set()
    for form, rows, (out_features, in_features), parts in CASES:
        sizes = (form, rows, out_features, in_features, "silu" if "silu" in parts else "")
        if rows <= triton_quantized_linear.FEW_ROWS:
            launch = triton_fused_quantized.few_rows_fused_launch(*sizes)
        else:
            launch = triton_fused_quantized.many_rows_fused_launch(*sizes, torch.float32)
        if launch.grid[2] > 1:
            divided.add((rows <= triton_quantized_linear.FEW_ROWS, "silu" in parts))
    assert divided == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name} {form.kind}")
@pytest.mark.parametrize("rows", [1, 4, 5, 33, 130])
def test_every_format(form: QuantFormat, rows: int) -> None:
    check(form, rows, (40, 600), {"norm", "silu", "bias"})
    check(form, rows, (70, 600), {"residual", "scale", "order"})


def test_counters_that_are_too_few_are_refused() -> None:
    form, rows, size, parts = CASES[3]
    given = arguments(form, rows, size, parts)
    few = torch.zeros(COUNTERS_OF_PRODUCT, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"256 counters hold no \d for call 1; give 512 or more"):
        launch_quantized(*call(given, few, form))


def build(weights: WeightPolicy, backend: str) -> tuple[CausalLM, ModelConfig]:
    hf_config = MODELS["qwen3"]
    config = model_class(hf_config["architectures"][0]).read_config(hf_config)
    device = torch.device("cpu")
    model = build_model(
        config, dtype=torch.float32, device=device, attention_backend=backend, weights=weights
    )
    init_dummy_weights(model, 3)
    assert isinstance(model, CausalLM)
    return model, config


@pytest.mark.slow
def test_a_whole_model() -> None:
    """Layers of weights of 4 bits, against the same model with these weights as floats."""
    model, config = build(replace(PLAIN, layers=Int4()), "triton")
    exact, _ = build(PLAIN, "reference")
    for ours, theirs in zip(model.modules(), exact.modules(), strict=True):
        if isinstance(ours, LinearBase):
            assert isinstance(theirs, LinearBase)
            theirs.weights["weight"].copy_(ours.method.dense(ours.weights, ours.spec))
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        few = layer.few_rows()
        assert few is not None
        assert few.most_tokens == MOST_QUANTIZED_ROWS
    found = logits_of_steps(Driver(model, config, forward=fused(model)))
    for one, other in zip(found, logits_of_steps(Driver(exact, config)), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-4)
