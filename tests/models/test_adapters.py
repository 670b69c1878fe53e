"""Low-rank adapters in a model's steps, compared with merged weights.

Sequences with different adapters share steps. Eager, compiled and captured programs are compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import LayerProgram
from ostinato.models.base import CausalLM
from ostinato.models.config.model_config import ModelConfig
from ostinato.ops.native.library import load as load_kernels
from tests.models.adapted_models import SPACE, Adapters, fill_slots, merged, slots_of
from tests.models.driver import Driver, Forward, Sequence
from tests.models.parity import PROMPT, load
from tests.models.random_checkpoints import VARIANTS, reference_model, save

SLOW = pytest.mark.slow
# Attention and MLPs in all forms: gated, plain, parallel, with two norms, latent, shared experts.
FAMILIES = [
    "llama3",
    pytest.param("gpt2", marks=SLOW),
    pytest.param("gpt-neox", marks=SLOW),
    pytest.param("gemma2", marks=SLOW),
    "deepseek-v3",
]


def run(
    model: CausalLM, config: ModelConfig, slots: list[int], forward: Forward | None = None
) -> list[Tensor]:
    """Logits of sequences with these slots: prompts, chunks and decodes in shared steps."""
    driver = Driver(model, config, forward=forward, dtype=torch.float32)
    sequences = [Sequence(PROMPT[index:]) for index in range(len(slots))]
    for sequence, slot in zip(sequences, slots, strict=True):
        sequence.adapter_slot = slot
    found = [driver.step([(one, 20) for one in sequences])]
    found.append(driver.step([(one, 15 + index) for index, one in enumerate(sequences)]))
    found += [driver.step([(one, 1) for one in sequences]) for _ in range(3)]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.fixture
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    variant = VARIANTS[request.param]
    save(reference_model(variant), variant, tmp_path)
    return tmp_path


@pytest.mark.parametrize("directory", FAMILIES, indirect=True)
@torch.inference_mode()
def test_a_sequence_gets_the_logits_of_merged_weights(directory: Path) -> None:
    load_kernels("adapters")
    base, config = load(directory, "cpu")
    model, _ = load(directory, "cpu", pack=True, adapters=SPACE)
    adapters = fill_slots(model)
    assert adapters[0].keys() == slots_of(model).keys()
    slots = [0, -1, 2]
    got = run(model, config, slots)
    for index, slot in enumerate(slots):
        none: Adapters = {}
        alone = merged(base, none if slot < 0 else adapters[slot])
        expected = run(alone, config, [-1] * len(slots))[index]
        torch.testing.assert_close(got[index], expected, atol=2e-4, rtol=1e-4)
    assert (got[0] - run(base, config, [-1] * 3)[0]).abs().max() > 0.01, "the adapter does nothing"


@pytest.mark.parametrize("directory", ["llama3", "deepseek-v3"], indirect=True)
@torch.inference_mode()
def test_compiled_and_captured_steps_have_the_bits_of_eager_steps(directory: Path) -> None:
    load_kernels("adapters")
    model, config = load(directory, "cpu", pack=True, adapters=SPACE)
    fill_slots(model)
    driver = Driver(model, config, dtype=torch.float32)
    example = Sequence(PROMPT[:4])
    example.adapter_slot = 0
    batch = driver.batch([(example, 4)])
    bind = compile_model(model, GraphForm.layer, batch, driver.cache)
    program = bind(model)
    expected = {slots: run(model, config, list(slots)) for slots in ((1, -1, 0), (-1, -1, -1))}
    for slots, logits in expected.items():
        for one, other in zip(run(model, config, list(slots), program), logits, strict=True):
            assert torch.equal(one, other), "compiled"
    replayed = bind(model)
    with replayed.recording():
        for slots, logits in expected.items():
            for one, other in zip(run(model, config, list(slots), replayed), logits, strict=True):
                assert torch.equal(one, other), "captured"
    assert replayed.layers_by_program == {LayerProgram.captured: len(model.layers)}
    fill_slots(model, seed=1)  # programs read what was loaded last
    for one, other in zip(
        run(model, config, [1, -1, 0], replayed), run(model, config, [1, -1, 0]), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("directory", ["llama3"], indirect=True)
@torch.inference_mode()
def test_a_sequence_has_the_bits_of_a_run_alone(directory: Path) -> None:
    load_kernels("adapters")
    model, config = load(directory, "cpu", pack=True, adapters=SPACE)
    fill_slots(model)
    plain, _ = load(directory, "cpu", pack=True)
    together = run(model, config, [0, -1, 2])
    for slots in ([0, 1, 1], [0, -1, -1]):
        assert torch.equal(run(model, config, slots)[0], together[0])
    assert torch.equal(run(plain, config, [-1] * 3)[1], together[1]), "a base row has other bits"
