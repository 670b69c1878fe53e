"""`run quantize`: what it writes is what the readers load, and calibration helps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ostinato.models.demo.training.corpus import documents
from ostinato.models.linear_layers import LinearBase
from tests.models.quantized_checkpoints.loading import load
from tests.models.random_checkpoints import VARIANTS, reference_model, save


def run(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ostinato", "quantize", *overrides]
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.parametrize(
    ("name", "form", "bits"),
    [
        ("cohere", "gptq", 8),  # rows of queries and keys are reordered
        ("qwen2", "awq", 4),
        ("phi3", "compressed-tensors", 4),
    ],
)
def test_the_readers_load_what_was_written(tmp_path: Path, name: str, form: str, bits: int) -> None:
    source = save(reference_model(VARIANTS[name]), VARIANTS[name], tmp_path)
    target = tmp_path / "new"
    done = run(
        f"model.path={source}",
        f"quantize.output={target}",
        f"quantize.format={form}",
        f"quantize.bits={bits}",
        "quantize.group_size=32",
        "quantize.symmetric=false",
    )
    assert done.returncode == 0, done.stderr
    assert "12 matrices, rounded to the nearest" in done.stdout
    assert f"run serve model.path={target}" in done.stdout
    model, _ = load(target)
    whole, _ = load(source)
    for own, module in model.layers.named_modules():
        if isinstance(module, LinearBase):
            before = whole.layers.get_submodule(own).dense()  # type: ignore[operator]
            assert module.method.is_quantized
            step = float(before.abs().amax()) * 2 / ((1 << bits) - 1)
            assert float((module.dense() - before).abs().amax()) < 1.02 * step
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == form
    embedding = "model.embed_tokens.weight"
    files = [load_file(folder / "model.safetensors") for folder in (source, target)]
    assert torch.equal(files[0][embedding], files[1][embedding])


def test_what_can_not_be_quantised_is_refused(tmp_path: Path) -> None:
    gpt2 = save(reference_model(VARIANTS["gpt2"]), VARIANTS["gpt2"].as_one_file(), tmp_path)
    done = run(f"model.path={gpt2}", f"quantize.output={tmp_path / 'new'}")
    assert done.returncode != 0
    assert "matrices of this family are not written" in done.stderr
    assert "Traceback" not in done.stderr
    done = run(f"model.path={gpt2}", f"quantize.output={gpt2}")
    assert "must be a new or empty directory" in done.stderr


@pytest.mark.slow
def test_calibration_loses_little_more_than_half_of_rounding_to_the_nearest(tmp_path: Path) -> None:
    for name, seed in (("calibration", 10**9 + 7), ("evaluation", 10**9 + 1)):
        texts = documents(seed)
        text = "\n\n".join(next(texts) for _ in range(400))
        (tmp_path / name).write_text(text, encoding="utf-8")
    shared = [
        "quantize.group_size=32",
        f"quantize.evaluation={tmp_path / 'evaluation'}",
        "quantize.samples=64",
        "quantize.length=256",
    ]
    losses = []
    for name, more in (
        ("nearest", []),
        ("calibrated", [f"quantize.calibration={tmp_path / 'calibration'}"]),
    ):
        done = run(f"quantize.output={tmp_path / name}", *shared, *more)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if "perplexity" in line]
        before, after = map(float, line.split()[-2:])
        losses.append(after - before)
    assert 0 < losses[1] < 0.6 * losses[0]
