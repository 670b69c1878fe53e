"""Quantised models against the same models with the weights that their quantised ones stand for.

What the kernels round on the way in is rounded in the comparison too, so that what is left is the
order of float32 sums. A value at the border of two steps may then fall to the other side: one step
of 127 in one of hundreds of values, which is the tolerance.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import MethodType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ostinato.conf.schema import GraphForm, HeadQuantization, ModelSection, Quantization
from ostinato.graphs.compile import compile_model
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import CheckpointError, open_checkpoint
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers import Embedding, Matrix
from ostinato.models.quantization import (
    ModelQuantization,
    quantization_of,
    quantize_model,
    quantize_module,
)
from ostinato.models.registry import build_model, read_model_config
from ostinato.ops.quantized_reference import QuantFormat, dequantize_linear_weight, quantize_rows
from tests.models.checkpoints import VARIANTS, reference_model, save
from tests.models.driver import Driver, Sequence

PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(43)]
BOTH = {
    "int8": ModelQuantization(layers=QuantFormat(8, 128, True), head=QuantFormat(8, 128, True)),
    "int4": ModelQuantization(layers=QuantFormat(4, 32, True), head=QuantFormat(8, 128, True)),
    "int4-zero-points": ModelQuantization(
        layers=QuantFormat(4, 32, False), head=QuantFormat(4, 32, False)
    ),
}
NAMES = ["gpt2", "llama3", "qwen2", "qwen3-tied"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> its checkpoint."""

    @cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save(reference_model(VARIANTS[name]), VARIANTS[name], folder)
        return folder

    return write


def build(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[CausalLM, ModelConfig]:
    config = read_model_config(open_checkpoint(ModelSection(path=str(directory))))
    model = build_model(config, dtype=dtype, device=torch.device("cpu"), attention_backend="cpu")
    assert isinstance(model, CausalLM)
    return model, config


def quantized(
    directory: Path, quantization: ModelQuantization, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, ModelConfig]:
    """Quantised module by module while it is loaded."""
    model, config = build(directory, dtype)
    load_weights(
        model,
        open_checkpoint(ModelSection(path=str(directory))),
        on_loaded=lambda module: quantize_module(module, quantization),
    )
    return model, config


def _round_first(self: Matrix, form: QuantFormat) -> None:
    """Let products of this matrix round their input as the quantised kernels do."""
    multiply = self.multiply

    def rounded(_: Matrix, x: Tensor, *arguments: Tensor | None, **named: bool) -> Tensor:
        parts = [quantize_rows(part.float()) for part in x.split(form.group_size, 1)]
        x = torch.cat([whole * scale for whole, scale in parts], 1).to(x.dtype)
        return multiply(x, *arguments, **named)

    self.multiply = MethodType(rounded, self)  # type: ignore[method-assign]


def restored(model: CausalLM, directory: Path, *, round_inputs: bool) -> CausalLM:
    """A plain model of the weights that the quantised model's stand for."""
    plain, _ = build(directory)
    load_weights(plain, open_checkpoint(ModelSection(path=str(directory))))
    for module, source in zip(plain.modules(), model.modules(), strict=True):
        if isinstance(module, Matrix) and isinstance(source, Matrix) and source.quantized:
            size = (source.out_features, source.in_features)
            weight = dequantize_linear_weight(source.weight, source.quantized, *size)
            module.weight = nn.Parameter(weight, requires_grad=False)
            if round_inputs:
                _round_first(module, source.quantized)
    return plain


def logits_of(model: CausalLM, config: ModelConfig) -> Tensor:
    return Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [43])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_parity_with_the_restored_weights(directory, name: str, kind: str) -> None:
    model, config = quantized(directory(name), BOTH[kind])
    ours = logits_of(model, config)
    exact = logits_of(restored(model, directory(name), round_inputs=True), config)
    spread = float(exact.std())
    errors = (ours - exact).abs().amax(1)  # by position; a step's difference carries on from there
    assert int((errors < 1e-5 * spread).sum()) >= 4
    assert float(errors.max()) < 0.1 * spread
    # Without the rounding of activations: what it costs a random model of 64 features.
    unrounded = logits_of(restored(model, directory(name), round_inputs=False), config)
    assert float((ours - unrounded).norm() / unrounded.norm()) < 0.06


@pytest.mark.parametrize("kind", BOTH)
def test_cut_into_steps_and_batched_the_bits_are_the_same(directory, kind: str) -> None:
    model, config = quantized(directory("qwen3-tied"), BOTH[kind])
    whole = logits_of(model, config)
    driver = Driver(model, config, dtype=torch.float32)
    assert torch.equal(driver.prefill(Sequence(PROMPT), [5, 1, 17, 20]), whole)
    one, two = Sequence(PROMPT), Sequence(PROMPT[:20])
    logits = driver.step([(two, 20), (one, 43)])
    assert torch.equal(logits[1], whole)
    assert torch.equal(logits[0], whole[:20])


@pytest.mark.parametrize("form", GraphForm)
def test_compiled_equals_eager(directory, form: GraphForm) -> None:
    model, config = quantized(directory("qwen3-tied"), BOTH["int4"])
    driver = Driver(model, config, dtype=torch.float32)
    whole = driver.prefill(Sequence(PROMPT), [43])
    example = driver.batch([(Sequence(PROMPT), 5), (Sequence(PROMPT), 7)])
    driver.forward = compile_model(model, form, example, driver.cache)(model)
    assert torch.equal(driver.prefill(Sequence(PROMPT), [16, 27]), whole)


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_quantised_while_loading_equals_quantised_after(directory, name: str) -> None:
    model, _ = quantized(directory(name), BOTH["int4"], torch.bfloat16)
    after, config = build(directory(name), torch.bfloat16)
    load_weights(after, open_checkpoint(ModelSection(path=str(directory(name)))))
    assert quantize_model(after, BOTH["int4"]) == 4 * config.num_layers + 1
    values = dict(after.named_parameters())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, values[key]), key


def test_only_one_module_at_a_time_is_whole_and_unquantised(directory) -> None:
    """Streaming: when a matrix has been filled it is quantised before the next is begun."""
    model, _ = build(directory("llama3"))
    waiting: list[int] = []

    def on_loaded(module: nn.Module) -> None:
        waiting.append(sum(isinstance(m, Matrix) and not m.quantized for m in model.modules()))
        quantize_module(module, BOTH["int8"])

    load_weights(
        model,
        open_checkpoint(ModelSection(path=str(directory("llama3")))),
        on_loaded=on_loaded,
    )
    assert waiting[0] > 10
    assert waiting == sorted(waiting, reverse=True)
    # a table of few rows stays as it is
    left = [m for m in model.modules() if isinstance(m, Matrix) and not m.quantized]
    assert [type(module) for module in left] == [Embedding]


def test_a_stored_head_is_compared_with_the_quantised_embedding(directory, tmp_path: Path) -> None:
    source = directory("qwen3-tied")
    for file in source.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    same, _ = quantized(tmp_path, BOTH["int8"])
    assert torch.equal(
        same.get_parameter("embed_tokens.weight"),
        quantized(source, BOTH["int8"])[0].get_parameter("embed_tokens.weight"),
    )
    head[3, 5] += 1.0
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="weight differs from the embedding"):
        quantized(tmp_path, BOTH["int8"])


def test_dummy_weights_are_the_same_before_quantisation(directory) -> None:
    streamed, _ = build(directory("gpt2"))
    init_dummy_weights(streamed, 3, on_loaded=lambda m: quantize_module(m, BOTH["int8"]))
    after, _ = build(directory("gpt2"))
    init_dummy_weights(after, 3)
    quantize_model(after, BOTH["int8"])
    values = dict(after.named_parameters())
    for key, parameter in streamed.named_parameters():
        assert torch.equal(parameter, values[key]), key


def test_what_the_configuration_asks_for() -> None:
    def asked(**keys: object) -> ModelQuantization | None:
        return quantization_of(ModelSection(**keys))  # type: ignore[arg-type]

    int8, int4 = Quantization.int8, Quantization.int4
    assert asked() is None
    assert asked(quantization=int8) == BOTH["int8"]
    assert asked(quantization=int4) == BOTH["int4"]
    assert (
        asked(
            quantization=int4, quantization_head=HeadQuantization.int4, quantization_symmetric=False
        )
        == BOTH["int4-zero-points"]
    )
    assert asked(
        quantization=int4, quantization_head=HeadQuantization.none, quantization_group_size=64
    ) == ModelQuantization(layers=QuantFormat(4, 64, True), head=None)
