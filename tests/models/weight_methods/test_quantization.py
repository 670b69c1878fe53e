"""Quantised models against float models with the dequantised weights.

The float models round activations as the kernels do, so only the order of float32 sums differs. A
value at the border of two steps may then be rounded to the other step. That is one step of 127 in
one of hundreds of values. The tolerance allows it.
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
from ostinato.graphs.compiler.compile import compile_model
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.choose_weights import PLAIN, WeightsByRole, choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.layers.vocabulary_layers import Embedding
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import Span
from ostinato.models.weight_methods.grouped import GroupQuantized
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_methods.int8 import Int8
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import MatrixSpec, Part
from ostinato.ops.quantized import quantize_linear_weight
from ostinato.ops.quantized_reference import quantize_rows
from tests.live_bytes import LiveBytes
from tests.models.driver import Driver, Sequence
from tests.models.random_checkpoints import VARIANTS, reference_model, save

PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(43)]
CPU = torch.device("cpu")
BOTH = {
    "int8": WeightsByRole(layers=Int8(), router=Packed(), head=Int8(), embedding=Int8()),
    "int4": WeightsByRole(layers=Int4(), router=Packed(), head=Int8(), embedding=Int8()),
    "int4-zero-points": WeightsByRole(
        layers=Int4(symmetric=False),
        router=Packed(),
        head=Int4(symmetric=False),
        embedding=Int4(symmetric=False),
    ),
}
NAMES = ["bamba", "gpt2", "granite4-dense", "lfm2", "llama3", "nemotron-h"]
NAMES += ["qwen2", "qwen3-tied", "qwen3.5"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> its checkpoint."""

    @cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save(reference_model(VARIANTS[name]), VARIANTS[name], folder)
        return folder

    return write


def build(
    directory: Path, weights: WeightsByRole = PLAIN, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, ModelConfig]:
    config = read_model_config(open_checkpoint(ModelSection(path=str(directory))))
    model = build_model(config, dtype=dtype, device=CPU, attention_backend="cpu", weights=weights)
    assert isinstance(model, CausalLM)
    return model, config


def loaded(
    directory: Path, weights: WeightsByRole = PLAIN, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, ModelConfig]:
    model, config = build(directory, weights, dtype)
    load_weights(model, open_checkpoint(ModelSection(path=str(directory))))
    return model, config


def matrices(model: nn.Module) -> dict[str, LinearBase]:
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, LinearBase)}


def _round_first(self: LinearBase, method: GroupQuantized) -> None:
    """Let products of this matrix round their input as the quantised kernels do."""
    multiply = self.multiply

    def rounded(_: LinearBase, x: Tensor, *arguments: Tensor | None, **named: bool) -> Tensor:
        parts = [quantize_rows(part.float()) for part in x.split(method.group_size, 1)]
        x = torch.cat([whole * scale for whole, scale in parts], 1).to(x.dtype)
        return multiply(x, *arguments, **named)

    self.multiply = MethodType(rounded, self)  # type: ignore[method-assign]


def restored(model: CausalLM, directory: Path, *, round_inputs: bool) -> CausalLM:
    """A float model with the dequantised weights of the quantised model."""
    plain, _ = loaded(directory)
    for module, source in zip(matrices(plain).values(), matrices(model).values(), strict=True):
        if isinstance(source.method, GroupQuantized):
            (part,) = module.parts()
            module.load("weight", source.dense(), part)
            if round_inputs:
                _round_first(module, source.method)
    return plain


def logits_of(model: CausalLM, config: ModelConfig) -> Tensor:
    return Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [43])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_parity_with_the_restored_weights(directory, name: str, kind: str) -> None:
    model, config = loaded(directory(name), BOTH[kind])
    ours = logits_of(model, config)
    exact = logits_of(restored(model, directory(name), round_inputs=True), config)
    spread = float(exact.std())
    errors = (ours - exact).abs().amax(1)  # by position; a difference propagates to later positions
    assert int((errors < 1e-5 * spread).sum()) >= 4
    assert float(errors.max()) < 0.1 * spread
    # The distance to a model with exact activations is the error of rounding 64 random features.
    unrounded = logits_of(restored(model, directory(name), round_inputs=False), config)
    assert float((ours - unrounded).norm() / unrounded.norm()) < 0.06


def test_matrices_of_cuda_are_laid_out_on_the_cpu() -> None:
    method, value = Int4(), torch.randn(40, 64)
    part = Part(0, 1, (40, 64), slice(0, 40), Span.of(64), 0, 40)
    spec = MatrixSpec(40, 64, torch.float16, torch.device("cuda"))
    tensors: dict[str, Tensor] = {}
    method.load(tensors, "weight", value.half(), part, spec)
    expected = quantize_linear_weight(value.half().float(), method.form(spec))
    found = method.finish(tensors, spec)
    assert torch.equal(found["weight"], expected)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["qwen3-tied", "lfm2"])
def test_cut_into_steps_and_batched_the_bits_are_the_same(directory, name: str, kind: str) -> None:
    model, config = loaded(directory(name), BOTH[kind])
    whole = logits_of(model, config)
    driver = Driver(model, config, dtype=torch.float32)
    assert torch.equal(driver.prefill(Sequence(PROMPT), [5, 1, 17, 20]), whole)
    one, two = Sequence(PROMPT), Sequence(PROMPT[:20])
    logits = driver.step([(two, 20), (one, 43)])
    assert torch.equal(logits[1], whole)
    assert torch.equal(logits[0], whole[:20])


@pytest.mark.parametrize(
    "form", [GraphForm.layer, pytest.param(GraphForm.model, marks=pytest.mark.slow)]
)
def test_compiled_equals_eager(directory, form: GraphForm) -> None:
    model, config = loaded(directory("qwen3-tied"), BOTH["int4"])
    driver = Driver(model, config, dtype=torch.float32)
    whole = driver.prefill(Sequence(PROMPT), [43])
    example = driver.batch([(Sequence(PROMPT), 5), (Sequence(PROMPT), 7)])
    driver.forward = compile_model(model, form, example, driver.cache)(model)
    assert torch.equal(driver.prefill(Sequence(PROMPT), [16, 27]), whole)


@pytest.mark.parametrize("name", ["gpt2", "lfm2", "llama3"])
def test_quantised_while_loading_equals_quantised_after(directory, name: str) -> None:
    model, config = loaded(directory(name), BOTH["int4"], torch.bfloat16)
    plain = dict(loaded(directory(name), PLAIN, torch.bfloat16)[0].named_parameters())
    modules = matrices(model)
    quantised = [m for m in modules.values() if isinstance(m.method, GroupQuantized)]
    assert len(quantised) == 4 * config.num_layers + 1
    for name, parameter in model.named_parameters():
        module = modules.get(name.removesuffix(".weight"))
        expected = plain[name]
        if module is not None and isinstance(module.method, GroupQuantized):
            expected = quantize_linear_weight(expected, module.method.form(module.spec))
        assert torch.equal(parameter, expected), name


def test_only_one_matrix_at_a_time_is_whole_and_unquantised(directory) -> None:
    """A matrix is quantised as soon as it is complete, before the next one is read."""
    model, _ = build(directory("llama3"), BOTH["int8"])
    checkpoint = open_checkpoint(ModelSection(path=str(directory("llama3"))))
    with LiveBytes() as live:
        load_weights(model, checkpoint)
    sizes = [4 * m.out_features * m.in_features for m in matrices(model).values()]
    assert 3 * max(sizes) < sum(sizes)  # otherwise the bound below would always hold
    # These are in memory at once: the file's matrix, its merged copy, and one matrix's quantised
    # form. The finished weights lie in memory that LiveBytes does not count.
    assert max(sizes) // 4 < live.peak < 3 * max(sizes)
    # An embedding of few rows is not quantised.
    left = [module for module in matrices(model).values() if module.method == Plain()]
    assert [type(module) for module in left] == [Embedding]


def test_a_stored_head_is_compared_with_the_quantised_embedding(directory, tmp_path: Path) -> None:
    source = directory("qwen3-tied")
    for file in source.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    same, _ = loaded(tmp_path, BOTH["int8"])
    assert torch.equal(
        same.get_parameter("embed_tokens.weight"),
        loaded(source, BOTH["int8"])[0].get_parameter("embed_tokens.weight"),
    )
    head[3, 5] += 1.0
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"differs from .*, to which it is tied"):
        loaded(tmp_path, BOTH["int8"])


def test_dummy_weights_are_the_same_before_quantisation(directory) -> None:
    model, _ = build(directory("gpt2"), BOTH["int8"])
    init_dummy_weights(model, 3)
    plain, _ = build(directory("gpt2"))
    init_dummy_weights(plain, 3)
    values = dict(plain.named_parameters())
    for name, module in matrices(model).items():
        weight = values.pop(f"{name}.weight")
        if isinstance(module.method, GroupQuantized):
            weight = quantize_linear_weight(weight, module.method.form(module.spec))
        assert torch.equal(module.get_parameter("weight"), weight), name
    for name, value in values.items():
        assert torch.equal(model.get_parameter(name), value), name


def asked(dtype: torch.dtype = torch.float32, **keys: object) -> object:
    section = ModelSection(**keys)  # type: ignore[arg-type]
    checkpoint = Checkpoint(path=None, hf_config={}, generation_config={})
    return choose_weights(section, checkpoint, pack=True, device=CPU, dtype=dtype)


def test_what_the_configuration_asks_for() -> None:
    int8, int4 = Quantization.int8, Quantization.int4
    unquantised = WeightsByRole(layers=Packed(), router=Packed(), head=Packed(), embedding=Plain())
    assert asked() == unquantised
    assert asked(torch.float16) == PLAIN
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
    ) == WeightsByRole(layers=Int4(64), router=Packed(), head=Packed(), embedding=Plain())
    assert asked(quantization_head=HeadQuantization.int8) == WeightsByRole(
        layers=Packed(), router=Packed(), head=Int8(), embedding=Int8()
    )
    assert asked(quantization_head=HeadQuantization.none) == unquantised


@pytest.mark.parametrize("method", ["aqlm", "policy", "../../etc", "keys"])
def test_a_checkpoint_of_an_unknown_method_is_refused(method: str) -> None:
    stated = {"quantization_config": {"quant_method": method}}
    checkpoint = Checkpoint(path=None, hf_config=stated, generation_config={})
    with pytest.raises(
        ValueError, match="is not supported; use the unquantized checkpoint"
    ) as error:
        choose_weights(ModelSection(), checkpoint, pack=True, device=CPU, dtype=torch.float32)
    assert f"quant_method={method!r}" in str(error.value)
