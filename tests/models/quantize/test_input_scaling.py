"""Scaling the inputs of matrices: a layer's result stays the same, and rounding errors shrink."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.conf.schema import ModelSection
from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.quantize.input_scaling import apply_factors, best_factors, find_folds
from ostinato.models.registry import build_model, read_model_config
from tests.models.driver import Driver, Sequence
from tests.models.random_checkpoints import VARIANTS, reference_model, save

PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(31)]
ATTENTION, MLP, DOWN = "attention_norm", "mlp_norm", "mlp.gate_up_proj"


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("qwen2", [ATTENTION, MLP, DOWN]),
        ("gemma2", [ATTENTION, MLP, DOWN]),  # norms store the distance from 1
        ("qwen3-moe", [ATTENTION]),  # a router and experts read the second norm
        ("cohere", [DOWN]),  # the norm is no RMS norm
        ("olmo2", [DOWN]),  # no norm before a matrix
    ],
)
@torch.inference_mode()
def test_the_result_stays_the_same(tmp_path: Path, name: str, sources: list[str]) -> None:
    section = ModelSection(
        path=str(save(reference_model(VARIANTS[name]), VARIANTS[name], tmp_path))
    )
    checkpoint = open_checkpoint(section)
    config = read_model_config(checkpoint)
    model = build_model(
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend="reference",
    )
    assert isinstance(model, CausalLM)
    load_weights(model, checkpoint)
    before = Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [len(PROMPT)])
    generator = torch.Generator().manual_seed(0)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        assert [fold.source for fold in find_folds(layer)] == sources
        for fold in find_folds(layer):
            reader = layer.get_submodule(fold.readers[0])
            assert isinstance(reader, LinearBase)
            unscaled = reader.get_parameter("weight").clone()
            factors = torch.rand(reader.in_features, generator=generator) * 4 + 0.2
            apply_factors(layer, fold, factors, torch.bfloat16)
            assert not torch.equal(reader.get_parameter("weight"), unscaled)
            if fold.source != DOWN:
                norm = layer.get_submodule(fold.source)
                stored = norm.get_parameter("weight") - norm.stored_offset  # type: ignore[operator]
                assert torch.equal(stored, stored.bfloat16().float())
    after = Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [len(PROMPT)])
    torch.testing.assert_close(after, before, atol=2e-4, rtol=2e-4)


def test_factors_lower_the_error_of_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 64, generator=generator)
    x[:, ::9] *= 30.0  # a few large inputs, as language models have them
    hessian = x.T @ x / len(x)
    weight = torch.randn(48, 64, generator=generator)
    weight[:, ::9] *= 0.1
    factors = best_factors([weight], hessian, 4, 32, torch.float16, symmetric=True)
    assert float(factors[::9].mean()) > 2 * float(factors[1::9].mean())
    alike = best_factors([weight], torch.eye(64), 4, 32, torch.float16, symmetric=True)
    assert torch.equal(alike, torch.ones(64))
