"""Quantised checkpoints on a device give the tokens of the float weights that they stand for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from tests.models.quantized_checkpoints.writers import Form, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

pytestmark = pytest.mark.gpu

FORMS = [
    Form("gptq"),
    Form("gptq", symmetric=False, act_order=True),
    Form("awq", symmetric=False),
    Form("fp8", bits=8, group=64),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [[(7 * n * n + 13 * n + start) % 199 for n in range(5 + 9 * start)] for start in range(6)]
SETTINGS = (
    "cache.block_size=16",
    "cache.memory_gib=0.05",
    "graphs.bundle=false",
    "model.dtype=float32",
    "model.max_model_len=128",
    "scheduler.max_num_batched_tokens=96",
    "scheduler.max_num_seqs=8",
)


def generate(directory: Path, *overrides: str) -> list[tuple[list[int], list[float]]]:
    """The tokens of each prompt and their log probabilities."""
    config = load_config([f"model.path={directory}", *SETTINGS, *overrides])
    with LLM(config=config) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_progress=False)
        assert llm.stats().late_compiles == []
    found = [output.outputs[0] for output in outputs]
    return [(one.token_ids, [entry.logprob for entry in one.logprobs or ()]) for one in found]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)
def test_a_checkpoint_has_the_tokens_of_its_float_weights(form: Form, tmp_path: Path) -> None:
    """Activations are not rounded on a GPU, so results differ by the order of sums only."""
    source, quantised, restored = (tmp_path / name for name in ("floats", "quantised", "restored"))
    variant = VARIANTS["qwen2"]
    save(reference_model(variant), variant.as_one_file(), source)
    weights = write(source, quantised, form)
    restored.mkdir()
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, restored / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", restored / "config.json")
    reference = ("device.name=cpu", "graphs.mode=eager", "graphs.attention=reference")
    expected = generate(restored, *reference, "graphs.pack_weights=false")
    result = generate(quantised, "device.name=cuda", "graphs.mode=captured")
    for (tokens, logprobs), (other, others) in zip(result, expected, strict=True):
        assert tokens == other
        assert logprobs == pytest.approx(others, abs=1e-3)
