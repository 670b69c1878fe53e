"""Each variant in `VARIANTS` against transformers on the same weights (tests/models/parity.py)."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import LayerProgram
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.weight_methods.packed import Packed
from ostinato.ops.native import library as native
from tests.models.driver import Driver, Sequence
from tests.models.parity import NUM_PROMPT, PROMPT, Expected, check_all, expect, load
from tests.models.random_checkpoints import VARIANTS, reference_model

SLOW = pytest.mark.slow  # for a variant whose parts other variants cover
PACKED = [
    "bamba",
    "bamba-bias",
    "deepseek-v2",
    "deepseek-v3",
    "gpt2",
    "granite4",
    "lfm2",
    "llama3",
    "llama-linear-bias",
    "mixtral",
    "nemotron-h",
    "nemotron-h-mixed",
    "phi3",
    "qwen3-moe-mixed",
    "qwen3-tied",
]
# Variants that differ from another variant only in the configuration or the order of stored rows.
SECOND = {
    "codegen",
    "deepseek-v2-groups",
    "deepseek-v3-yarn",
    "glm4-moe-lite",
    "lfm2-moe-unbiased",
    "llama4-two-experts",
}
# A variant of each kind of attention. For other variants, the test with the reference backend is
# slow.
# Equal results of the backends are tested in tests/ops.
ATTENTION = {
    "bloom",  # ALiBi
    "deepseek-v3",  # values of another size
    "gemma2",  # windows and soft caps
    "gpt-oss",  # sinks
    "llama-mqa",
    "llama3",
    "llama4",  # chunks
}
EAGER = [
    pytest.param(
        name,
        backend,
        marks=SLOW if name in SECOND or (backend == "reference" and name not in ATTENTION) else (),
    )
    for name in VARIANTS
    for backend in ("reference", "cpu")
]
# A packed model is lowered to calls of our ops within 1 s. For one that is not packed, Inductor
# takes 10 s; tests/graphs/compiler has a quick case of it.
COMPILED = [
    (GraphForm.layer, "bamba", True),
    pytest.param(GraphForm.layer, "bamba", False, marks=SLOW),
    (GraphForm.layer, "bloom", True),
    pytest.param(GraphForm.layer, "bloom", False, marks=SLOW),
    pytest.param(GraphForm.layer, "deepseek-v3", False, marks=SLOW),
    pytest.param(GraphForm.layer, "falcon-40b", False, marks=SLOW),
    (GraphForm.layer, "gemma3", True),
    (GraphForm.layer, "gpt-neox", True),
    pytest.param(GraphForm.layer, "gpt-neox", False, marks=SLOW),
    (GraphForm.layer, "gpt2", True),
    pytest.param(GraphForm.layer, "gpt2", False, marks=SLOW),
    pytest.param(GraphForm.layer, "llama3", False, marks=SLOW),
    pytest.param(GraphForm.layer, "mpt", False, marks=SLOW),
    pytest.param(GraphForm.layer, "olmo2", False, marks=SLOW),
    pytest.param(GraphForm.layer, "mistral", False, marks=SLOW),
    (GraphForm.layer, "lfm2", True),  # two kinds of layers
    (GraphForm.layer, "nemotron-h", True),  # three kinds of layers with one part each
    pytest.param(GraphForm.layer, "nemotron-h-moe", False, marks=SLOW),
    (GraphForm.layer, "qwen3.5", True),  # gates of attention
    (GraphForm.layer, "qwen3-moe-mixed", True),  # two kinds of layers
    (GraphForm.layer, "qwen2-window", True),  # two kinds of layers
    pytest.param(GraphForm.layer, "qwen2-window", False, marks=SLOW),
    (GraphForm.layer, "qwen3-tied", True),
    pytest.param(GraphForm.model, "gpt2", False, marks=SLOW),
    pytest.param(GraphForm.model, "qwen2-window", False, marks=SLOW),
    (GraphForm.model, "qwen3-tied", True),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> Expected, computed once."""

    @cache
    def compute(name: str) -> Expected:
        return expect(VARIANTS[name], tmp_path_factory.mktemp(name))

    return compute


@pytest.mark.parametrize(("name", "backend"), EAGER)
def test_eager(expected, name: str, backend: str) -> None:
    model, config = load(expected(name).directory, backend)
    check_all(Driver(model, config), expected(name))


@pytest.mark.parametrize("name", PACKED)
def test_packed(expected, name: str) -> None:
    model, config = load(expected(name).directory, "cpu", pack=True)
    # A layer has 4 matrices, or 2 if it has one part; and a router before experts. The output head
    # is one more, tied or not.
    # Latent attention adds one matrix, or two if queries have a rank. Shared experts add two.
    matrices = [module for module in model.modules() if isinstance(module, LinearBase)]
    per_layer = 2 if config.mlp_layers else 4
    expected_count = (
        per_layer * config.num_layers + 1 + sum(config.moe.layers if config.moe else ())
    )
    if config.moe is not None and config.moe.shared_size:
        expected_count += 2 * sum(config.moe.layers)
    if config.latent is not None:
        expected_count += config.num_layers * (2 if config.latent.query_rank else 1)
    assert sum(module.method == Packed() for module in matrices) == expected_count
    check_all(Driver(model, config), expected(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["bamba", "gpt2", "granite4", "llama3", "nemotron-h", "qwen3-tied"]
)
def test_half_precision(expected, name: str, dtype: torch.dtype) -> None:
    """The distance to float32 logits is at most 1.25 times that of transformers in this dtype."""
    model, config = load(expected(name).directory, "cpu", dtype, pack=True)
    exact = expected(name).prompt_logits
    ours = Driver(model, config).prefill(Sequence(PROMPT), [20, NUM_PROMPT - 20])
    with torch.no_grad():
        theirs = reference_model(VARIANTS[name]).to(dtype)(torch.tensor([PROMPT])).logits[0]
    assert ours.dtype == torch.float32
    assert float((ours - exact).norm()) < 1.25 * float((theirs.float() - exact).norm())


@pytest.mark.parametrize(("form", "name", "pack"), COMPILED)
def test_compiled(expected, form: GraphForm, name: str, pack: bool) -> None:
    model, config = load(expected(name).directory, "cpu", pack=pack)
    driver = Driver(model, config)
    example = driver.batch([(Sequence(PROMPT), 5), (Sequence(PROMPT), 7)])
    driver.forward = compile_model(model, form, example, driver.cache)(model)
    check_all(driver, expected(name))


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",  # views of slices, and keys that are joined
        pytest.param("deepseek-v2", marks=SLOW),
        pytest.param("granite4", marks=SLOW),
        pytest.param("lfm2", marks=SLOW),
        pytest.param("llama4", marks=SLOW),
        "nemotron-h",
        "nemotron-h-moe",
        pytest.param("olmo2", marks=SLOW),
        "qwen3.5",
    ],
)
def test_captured(expected, name: str) -> None:
    """The model is packed, compiled layer by layer, and recorded as a CPU graph."""
    native.load("core")
    native.load("recurrent")
    model, config = load(expected(name).directory, "cpu", pack=True)
    driver = Driver(model, config)
    example = driver.batch([(Sequence(PROMPT), 5), (Sequence(PROMPT), 7)])
    program = compile_model(model, GraphForm.layer, example, driver.cache)(model)
    driver.forward = program
    with program.recording():
        driver.prefill(Sequence(PROMPT), [len(PROMPT)])
    assert program.layers_by_program == {LayerProgram.captured: config.num_layers}
    check_all(driver, expected(name))
