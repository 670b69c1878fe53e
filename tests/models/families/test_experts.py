"""Mixtures of experts: faulty checkpoints and configs, loading, quantisation, batch invariance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.conf.schema import ModelSection, Quantization
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.layers.moe import MoE
from ostinato.models.registry import build_model, model_class, read_model_config
from tests.live_bytes import LiveBytes
from tests.models.config_json.test_every_key import config_of
from tests.models.driver import Driver, Sequence
from tests.models.random_checkpoints import VARIANTS, Variant, reference_model, save

CPU = torch.device("cpu")
PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(30)]
NAME = "qwen3-moe-mixed"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = VARIANTS[NAME].as_one_file()
    return save(reference_model(variant), variant, tmp_path_factory.mktemp("experts"))


def build(
    directory: Path, quantization: Quantization = Quantization.none
) -> tuple[CausalLM, ModelConfig, Checkpoint]:
    """The model before its weights are loaded."""
    section = ModelSection(path=str(directory), quantization=quantization)
    checkpoint = open_checkpoint(section)
    config = read_model_config(checkpoint)
    weights = choose_weights(section, checkpoint, pack=True, device=CPU, dtype=torch.float32)
    model = build_model(
        config, dtype=torch.float32, device=CPU, attention_backend="reference", weights=weights
    )
    assert isinstance(model, CausalLM)
    return model, config, checkpoint


def load(
    directory: Path, quantization: Quantization = Quantization.none
) -> tuple[CausalLM, ModelConfig]:
    model, config, checkpoint = build(directory, quantization)
    load_weights(model, checkpoint)
    return model, config


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """A copy of a checkpoint whose tensors `change` has edited."""
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(EXPERT), rf"lacks tensor {EXPERT}"),
        (
            lambda tensors: tensors.update({EXPERT.replace(".5.", ".8."): torch.zeros(32, 64)}),
            r"unexpected tensor model.layers.1.mlp.experts.8",
        ),
        (
            lambda tensors: tensors.update({EXPERT: torch.zeros(32, 60)}),
            rf"{EXPERT} has shape \[32, 60\], but the configuration needs \[32, 64\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.gate.weight": torch.zeros(7, 64)}),
            r"mlp.gate.weight has shape \[7, 64\], but the configuration needs \[8, 64\]",
        ),
    ],
)
def test_wrong_tensors_of_experts_are_named(
    directory: Path, tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(rewritten(directory, tmp_path, change))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (NAME, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be at most"),
        (NAME, {"num_local_experts": None}, "must be an integer of at least 1, got None"),
        (NAME, {"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer of at least 1"),
        (NAME, {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] must name layers 0 to 2"),
        (NAME, {"moe_intermediate_size": -1}, "moe_intermediate_size must be an integer"),
        ("glm4-moe", {"n_group": 3}, "n_group=3 must divide"),
        ("glm4-moe", {"topk_group": 5}, "topk_group=5 must be at most n_group"),
        ("glm4-moe", {"topk_group": 1}, "num_experts_per_tok=3 must be at most"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    config = config_of(VARIANTS[name]) | changes
    with pytest.raises(ValueError, match=message):
        model_class(config["architectures"][0]).read_config(config)


@pytest.mark.parametrize("quantization", [Quantization.none, Quantization.int8])
def test_a_nan_in_a_router_spoils_its_own_token_alone(
    monkeypatch: pytest.MonkeyPatch, directory: Path, quantization: Quantization
) -> None:
    model, config = load(directory, quantization)
    good = Driver(model, config).prefill(Sequence(PROMPT), [len(PROMPT)])
    moe = [module for module in model.modules() if isinstance(module, MoE)][-1]

    multiply = moe.gate.multiply

    def broken(x: torch.Tensor, *, float32_output: bool) -> torch.Tensor:
        logits = multiply(x, float32_output=float32_output)
        logits[-1, 3] = torch.nan
        return logits

    monkeypatch.setattr(moe.gate, "multiply", broken)
    logits = Driver(model, config).prefill(Sequence(PROMPT), [len(PROMPT)])
    assert logits[-1].isnan().all()
    assert torch.equal(logits[:-1], good[:-1])


@pytest.mark.parametrize("quantization", [Quantization.int8, Quantization.int4])
@pytest.mark.parametrize(
    "name",
    [
        *(NAME, "glm4-moe", "deepseek-v3", "nemotron-h-moe"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "gpt-oss",
                "granitemoe",
                "llama4",
                "lfm2-moe",
                "mixtral",
                "olmoe",
                "qwen2-moe",
            )
        ),
    ],
)
def test_quantised_experts_are_the_sum_of_their_dense_ones(
    tmp_path: Path, name: str, quantization: Quantization
) -> None:
    """The router stays as stored; logits are near those of the model with float weights."""
    variant: Variant = VARIANTS[name]
    reference = reference_model(variant)
    model, config = load(save(reference, variant, tmp_path), quantization)
    experts = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    assert experts
    assert all(module.method.is_quantized for module in experts)
    gates = [module.gate for module in model.modules() if isinstance(module, MoE)]
    assert not any(gate.method.is_quantized for gate in gates)
    ours = Driver(model, config).prefill(Sequence(PROMPT), [len(PROMPT)])
    with torch.no_grad():
        theirs = reference(torch.tensor([PROMPT])).logits[0]
    error = float((ours - theirs).norm() / theirs.norm())
    # Rounding moves a few tokens to other experts.
    assert error < (0.2 if quantization is Quantization.int8 else 0.6)
    # A token's bits do not depend on the other tokens of the step or on their experts.
    alone = Driver(model, config)
    first, second = Sequence(PROMPT), Sequence(PROMPT[::-1])
    both = Driver(model, config)
    expected = alone.step([(Sequence(PROMPT), len(PROMPT))])[0]
    assert torch.equal(both.step([(second, 17), (first, len(PROMPT))])[1], expected)


@pytest.mark.parametrize("quantization", [Quantization.none, Quantization.int8])
def test_one_expert_at_a_time_exists_twice(directory: Path, quantization: Quantization) -> None:
    """An expert's parameters are written as soon as its tensors are read from the checkpoint."""
    model, _, checkpoint = build(directory, quantization)
    with LiveBytes() as live:
        load_weights(model, checkpoint)
    experts = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    others = [
        module
        for module in model.modules()
        if isinstance(module, LinearBase) and not isinstance(module, ExpertLinear)
    ]
    largest = max(4 * module.out_features * module.in_features for module in others)
    one = max(4 * module.out_features * module.in_features for module in experts)
    layer = one * experts[0].experts.size
    assert 2 * max(largest, one) < layer  # otherwise the bound below would always hold
    # All finished weights lie in memory that LiveBytes does not count.
    assert live.peak < 2 * max(largest, one)


@pytest.mark.parametrize(
    "name", ["qwen3-moe", "qwen2-moe", "glm4-moe", "gpt-oss", "nemotron-h-moe"]
)
def test_the_program_depends_on_each_matrix(name: str) -> None:
    """Blocks whose matrices differ in kind do not share a program."""
    config = config_of(VARIANTS[name])
    family = model_class(config["architectures"][0])
    model = build_model(
        family.read_config(config),
        dtype=torch.float32,
        device=torch.device("meta"),
        attention_backend="reference",
    )
    moe = next(module for module in model.modules() if isinstance(module, MoE))
    before = moe.static_key()
    matrices = {key: each for key, each in moe.named_modules() if isinstance(each, LinearBase)}
    assert len(matrices) >= 3
    for key, matrix in matrices.items():
        matrix.has_bias = not matrix.has_bias
        assert moe.static_key() != before, key
        matrix.has_bias = not matrix.has_bias
