"""Models that run through transformers give what transformers gives (tests/models/parity.py)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from docs.list_models import NOT_TRACED, TRACED
from ostinato.conf.schema import GraphForm, ModelImplementation, ModelSection, Quantization
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import LayerProgram
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.registry import read_model_config
from ostinato.models.traced import hf_model
from ostinato.models.traced.traced_modules import TracedLayer
from ostinato.ops.native import library as native
from tests.models.driver import Driver, Sequence
from tests.models.parity import PROMPT, Expected, check_all, expect, load
from tests.models.random_checkpoints import VARIANTS, Variant
from tests.models.traced.traced_variants import FORCED, REFUSED, UNKNOWN

TRANSFORMERS = ModelImplementation.transformers
# These models have, in this order: interleaved rotary pairs; windows and norms of heads; experts
# with an unusual router; soft caps.
QUICK = {"helium", "exaone4", "phimoe", "gemma2"}


def names(all_names: Any) -> list[Any]:
    """Test parameters. Those that are not in `QUICK` are marked slow."""
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in all_names
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> Expected, computed once."""

    @cache
    def compute(name: str) -> Expected:
        return expect((UNKNOWN | VARIANTS)[name], tmp_path_factory.mktemp(name))

    return compute


@pytest.mark.parametrize("name", names([*UNKNOWN, *FORCED]))
def test_eager(expected, name: str) -> None:
    # With `auto`, an architecture without an implementation here runs through transformers.
    implementation = TRANSFORMERS if name in FORCED else ModelImplementation.auto
    model, config = load(expected(name).directory, "cpu", implementation=implementation)
    assert config.traced is not None
    check_all(Driver(model, config), expected(name))


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "cohere",
        "glm4",
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(QUICK)),
    ],
)
def test_captured(expected, name: str) -> None:
    """The model is packed, compiled layer by layer, and recorded as a CPU graph."""
    native.load("core")
    model, config = load(expected(name).directory, "cpu", pack=True, implementation=TRANSFORMERS)
    driver = Driver(model, config)
    example = driver.batch([(Sequence(PROMPT), 5), (Sequence(PROMPT), 7)])
    program = compile_model(model, GraphForm.layer, example, driver.cache)(model)
    driver.forward = program
    with program.recording():
        driver.prefill(Sequence(PROMPT), [len(PROMPT)])
    assert program.layers_by_program == {LayerProgram.captured: config.num_layers}
    check_all(driver, expected(name))


@pytest.mark.slow  # torch can store this graph in a fresh process only
def test_compiled_as_one_graph(expected) -> None:
    model, config = load(expected("llama3").directory, "cpu", implementation=TRANSFORMERS)
    driver = Driver(model, config)
    example = driver.batch([(Sequence(PROMPT), 5), (Sequence(PROMPT), 7)])
    driver.forward = compile_model(model, GraphForm.model, example, driver.cache)(model)
    check_all(driver, expected("llama3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama3", "cohere", "glm4"])
def test_a_model_becomes_the_ops_of_the_native_model(
    expected, name: str, dtype: torch.dtype
) -> None:
    """The matrices are the same, so packing and quantisation apply. No torch operation is left."""
    directory = expected(name).directory
    traced, _ = load(directory, "cpu", dtype, implementation=TRANSFORMERS)
    native_model, _ = load(directory, "cpu", dtype)

    def sizes(model: torch.nn.Module) -> list[tuple[int, int]]:
        found = (module for module in model.modules() if isinstance(module, LinearBase))
        return sorted((module.out_features, module.in_features) for module in found)

    assert sizes(traced) == sizes(native_model)
    assert calls(traced) == {"rotate_heads": 1, "aten": 0}


def test_interleaved_pairs_stay_in_torch_where_norms_of_heads_have_their_order(
    tmp_path: Path,
) -> None:
    """If loading reordered the rows, it would have to reorder the weights of these norms, too."""
    settings = {**VARIANTS["cohere"].settings, "use_qk_norm": True}
    normed = expect(Variant("cohere", settings), tmp_path)
    model, config = load(tmp_path, "cpu", implementation=TRANSFORMERS)
    assert calls(model)["rotate_heads"] == 0
    ours = Driver(model, config).prefill(Sequence(PROMPT), [len(PROMPT)])
    torch.testing.assert_close(ours, normed.prompt_logits, atol=1e-4, rtol=0)


def test_norms_of_heads_are_part_of_the_rotation(expected) -> None:
    traced, _ = load(expected("qwen3").directory, "cpu", implementation=TRANSFORMERS)
    assert calls(traced) == {"rotate_heads": 1, "aten": 0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dots1", "ernie4_5_moe", "exaone_moe"])
def test_routers_stay_float32_in_half_precision(expected, name: str) -> None:
    """transformers keeps them in float32, too. Our error is less than twice its error."""
    directory, exact = expected(name).directory, expected(name).prompt_logits
    model, config = load(directory, "cpu", torch.bfloat16, pack=True)
    of_routers = {key: one.dtype for key, one in model.named_parameters() if ".gate." in key}
    assert len(of_routers) == 2 * len([key for key in of_routers if key.endswith("_bias")])
    assert set(of_routers.values()) == {torch.float32}
    ours = Driver(model, config).prefill(Sequence(PROMPT), [len(PROMPT)])
    half = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = half(torch.tensor([PROMPT])).logits[0].float()
    # Rounding moves a few tokens to other experts.
    assert float((ours - exact).norm()) < 2 * float((theirs - exact).norm())


def calls(model: torch.nn.Module) -> dict[str, int]:
    """The numbers of calls of `rotate_heads` and of torch's own operations in the first layer."""
    layer = model.layers[0]
    assert isinstance(layer, TracedLayer)
    code = layer.traced_layer.code
    return {"rotate_heads": code.count("rotate_heads("), "aten": code.count("aten.")}


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("llama3", Quantization.int8),
        ("llama3", Quantization.int4),
        ("glm4", Quantization.int4),
    ],
)
def test_quantised_weights_are_those_of_the_native_model(
    expected, name: str, quantization: Quantization
) -> None:
    # Norms in plain torch round differently. A value at the border of two steps could then be
    # rounded to the other step.
    native.load("core")

    def logits(implementation: ModelImplementation) -> torch.Tensor:
        model, config = load(
            expected(name).directory,
            "cpu",
            pack=True,
            implementation=implementation,
            quantization=quantization,
        )
        return Driver(model, config).prefill(Sequence(PROMPT), [len(PROMPT)])

    ours, native_logits = logits(TRANSFORMERS), logits(ModelImplementation.native)
    torch.testing.assert_close(ours, native_logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [Quantization.int8, Quantization.int4])
@pytest.mark.parametrize("name", ["afmoe", "phimoe"])
def test_experts_are_quantised_too(expected, name: str, quantization: Quantization) -> None:
    directory = expected(name).directory
    model, config = load(directory, "cpu", pack=True, quantization=quantization)
    experts = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    assert experts
    assert all(module.method.is_quantized for module in experts)
    ours = Driver(model, config).prefill(Sequence(PROMPT), [len(PROMPT)])
    floats, _ = load(directory, "cpu")
    exact = Driver(floats, config).prefill(Sequence(PROMPT), [len(PROMPT)])
    error = float((ours - exact).norm() / exact.norm())
    # Rounding moves a few tokens to other experts.
    assert error < (0.2 if quantization is Quantization.int8 else 0.8)


def test_the_page_lists_what_is_tested() -> None:
    tested = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[variant.model_type] for variant in UNKNOWN.values()}
    assert set(TRACED) == tested
    assert NOT_TRACED.keys() == REFUSED.keys()


def read(
    config: dict[str, Any], implementation: ModelImplementation = ModelImplementation.auto
) -> ModelConfig:
    checkpoint = Checkpoint(path=None, hf_config=config, generation_config={})
    return read_model_config(checkpoint, implementation)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_is_not_exact_is_refused(architecture: str) -> None:
    model_type, settings, why = REFUSED[architecture]
    config = {**settings, "architectures": [architecture], "model_type": model_type}
    with pytest.raises(ValueError, match=why) as error:
        read(config)
    assert f"architecture {architecture!r} is not supported" in str(error.value)


@pytest.mark.parametrize("name", ["falcon-7b", "bloom", "mpt"])
def test_families_with_attention_of_their_own_stay_native(name: str) -> None:
    variant = VARIANTS[name]
    architecture = {"falcon": "Falcon", "bloom": "Bloom", "mpt": "Mpt"}[variant.model_type]
    config = {
        **variant.settings,
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": variant.model_type,
    }
    assert read(config).traced is None
    with pytest.raises(ValueError, match=r"implementation=transformers.*computes attention itself"):
        read(config, TRANSFORMERS)


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def test_native_alone_refuses_unknown_architectures(expected) -> None:
    config = config_of(expected("helium").directory)
    with pytest.raises(ValueError, match="'HeliumForCausalLM' is not supported; supported: "):
        read(config, ModelImplementation.native)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_temperature": 0.5}, "HeliumConfig .* does not read logit_temperature"),
        ({"is_causal": False}, "not that of causal attention|is not causal"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "cannot be traced|from the length of a sequence",
        ),
    ],
)
def test_keys_that_would_change_the_result_are_refused(
    expected, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(config_of(expected("helium").directory) | changes)


def test_a_key_without_effect_can_be_removed(expected) -> None:
    section = ModelSection(
        path=str(expected("helium").directory), config={"logit_temperature": None}
    )
    assert read_model_config(open_checkpoint(section)).traced is not None


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """A copy of a checkpoint whose tensors `change` has edited."""
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_missing_experts_are_named(expected, tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    directory = rewritten(expected("phimoe").directory, tmp_path, lambda found: found.pop(name))
    with pytest.raises(CheckpointError, match=f"lacks tensor {name}"):
        load(directory, "cpu")


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(
    expected, tmp_path: Path
) -> None:
    directory = rewritten(
        expected("gemma2").directory,
        tmp_path,
        lambda found: found.update({"lm_head.weight": torch.zeros(199, 64)}),
    )
    with pytest.raises(CheckpointError, match="to which it is tied"):
        load(directory, "cpu", implementation=TRANSFORMERS)


def test_other_modelling_code_is_another_model(
    expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is part of a bundle's key, so the model's programs are compiled anew."""
    config = config_of(expected("helium").directory)
    before = read(config)
    copy = tmp_path / "modeling_helium.py"
    copy.write_text("# changed")
    files = hf_model.source_files
    monkeypatch.setattr(hf_model, "source_files", lambda found: [*files(found), copy])
    assert repr(read(config)) != repr(before)
