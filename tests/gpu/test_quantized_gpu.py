"""Quantised checkpoints on a device give the tokens of the float weights that they stand for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.ops.w8a8.round_rows import InputScales
from ostinato.ops.w8a8.w8a8_linear import w8a8_linear
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
    """Activations that are not rounded give results that differ by the order of sums only."""
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
    exact = ("model.round_activations=false",)
    result = generate(quantised, "device.name=cuda", "graphs.mode=captured", *exact)
    for (tokens, logprobs), (other, others) in zip(result, expected, strict=True):
        assert tokens == other
        assert logprobs == pytest.approx(others, abs=1e-3)


ROUNDED = [
    Form("fp8", bits=8, group=32),
    Form("float_quantized", bits=8, group=-1),
    Form("int_quantized", bits=8, group=-1),
    Form("modelopt", bits=8, group=-1),
]


@pytest.mark.parametrize("form", ROUNDED, ids=lambda form: form.id)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_round_activations_like_eager_ones(
    form: Form, dtype: str, tmp_path: Path
) -> None:
    """In float32 the first tokens are equal, and their log-probabilities are close.

    In bfloat16 captured and eager steps round at different places, and a rounded activation can
    fall on the other side of a border. So only the mean distance of the log-probabilities is
    limited.
    """
    source, quantised = tmp_path / "floats", tmp_path / "quantised"
    variant = VARIANTS["qwen2"]
    save(reference_model(variant), variant.as_one_file(), source)
    write(source, quantised, form)
    settings = ("device.name=cuda", f"model.dtype={dtype}")
    eager = generate(quantised, *settings, "graphs.mode=eager")
    captured = generate(quantised, *settings, "graphs.mode=captured")
    firsts = [(one[0][0], other[0][0]) for one, other in zip(captured, eager, strict=True)]
    distances = [abs(one[1][0] - other[1][0]) for one, other in zip(captured, eager, strict=True)]
    if dtype == "float32":
        assert all(token == other for token, other in firsts)
        assert max(distances) <= 1e-2
    assert sum(distances) / len(distances) <= 0.15, distances


@pytest.mark.parametrize("rows", [1, 4, 40, 300])
@pytest.mark.parametrize(
    ("dtype", "group", "inputs"),
    [
        (torch.float8_e4m3fn, 4096, InputScales.row),
        (torch.float8_e4m3fn, 4096, InputScales.static),
        (torch.float8_e4m3fn, 128, InputScales.group),
        (torch.int8, 4096, InputScales.row),
        (torch.int8, 64, InputScales.row),
    ],
)
def test_products_of_8_bits_are_those_of_plain_torch(
    rows: int, dtype: torch.dtype, group: int, inputs: InputScales
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(512, 4096, generator=generator) * 40).clamp(-127, 127).to(dtype)
    scales = (torch.rand(4096 // group, 512, generator=generator) + 0.5) / 1000
    x = torch.randn(rows, 4096, generator=generator).bfloat16()
    given = torch.tensor([0.01]) if inputs is InputScales.static else None
    residual = torch.randn(rows, 512, generator=generator).bfloat16()

    def product(device: str) -> Tensor:
        scale = None if given is None else given.to(device)
        operands = (x.to(device), weight.to(device), scales.to(device))
        added = residual.to(device)
        result = w8a8_linear(*operands, None, group, inputs, input_scale=scale, residual=added)
        return result.cpu().float()

    torch.testing.assert_close(product("cuda"), product("cpu"), atol=0.1, rtol=0.02)
