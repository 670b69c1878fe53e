"""`run quantize`: what it writes is what the readers load, and calibration helps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ostinato.api.cli.quantize_command import quantize
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.models.demo.training.corpus import documents
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import LinearBase, RouterLinear
from ostinato.runtime.errors import StartupError
from ostinato.runtime.quantize_model import QuantizeReport, quantize_model
from tests.models.driver import Driver, Sequence
from tests.models.gguf_files import save_checkpoint
from tests.models.quantized_checkpoints.loading import load
from tests.models.random_checkpoints import VARIANTS, reference_model, save
from tests.runtime.text.tokenizer_builders import CORPUS, byte_level_bpe

PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(43)]


def run(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ostinato", "quantize", *overrides]
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)


def quantise(*overrides: str) -> QuantizeReport:
    """Quantise in this process; returns the report."""
    config = load_config(overrides)
    return quantize_model(config.engine, config.quantize, lambda done, total: None)


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
    words = (
        f"model.path={source}",
        f"quantize.output={target}",
        f"quantize.format={form}",
        f"quantize.bits={bits}",
        "quantize.group_size=32",
        "quantize.symmetric=false",
    )
    if name == "qwen2":  # this one runs as a command
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert "12 matrices quantised: each weight is rounded to the nearest" in done.stdout
        assert f"run serve model.path={target}" in done.stdout
    else:
        assert quantise(*words).num_matrices == 12
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


@pytest.mark.parametrize("head_bits", [4, 8])
def test_a_head_is_quantised_with_the_bits_that_are_asked_for(
    tmp_path: Path, head_bits: int
) -> None:
    source = save_checkpoint("mistral", tmp_path / "source", vocab_size=408)
    byte_level_bpe().save(str(source / "tokenizer.json"))
    text = tmp_path / "text"
    text.write_text("\n".join(CORPUS), encoding="utf-8")
    texts = [f"quantize.{use}={text}" for use in ("calibration", "evaluation")]
    target = tmp_path / "new"
    words = [f"model.path={source}", f"quantize.head_bits={head_bits}", "quantize.group_size=32"]
    report = quantise(*words, *texts, f"quantize.output={target}", "quantize.format=gptq")
    assert report.perplexity_before is not None
    assert report.perplexity_after is not None
    assert abs(math.log(report.perplexity_after / report.perplexity_before)) < 0.1
    model, whole = (load(each)[0] for each in (target, source))
    assert model.lm_head.method.name.startswith(f"int{head_bits}")  # type: ignore[union-attr]
    before, after = (m.lm_head.dense() for m in (whole, model))  # type: ignore[operator, union-attr]
    assert float((after - before).norm() / before.norm()) < (0.25 if head_bits == 4 else 0.1)
    with pytest.raises(StartupError, match=r"quantize.head_bits=.*set quantize.format=gptq"):
        quantise(*words, f"quantize.output={tmp_path / 'other'}", "quantize.format=awq")


@pytest.mark.parametrize(
    ("form", "bits"), [("gptq", 4), ("awq", 4), ("compressed-tensors", 8)], ids=str
)
def test_experts_are_quantised_for_their_own_tokens(tmp_path: Path, form: str, bits: int) -> None:
    source = save_checkpoint("qwen3-moe", tmp_path / "source", vocab_size=401)
    byte_level_bpe().save(str(source / "tokenizer.json"))
    text = tmp_path / "text"
    text.write_text("\n".join(CORPUS), encoding="utf-8")
    report = quantise(
        f"model.path={source}",
        f"quantize.output={tmp_path / 'new'}",
        f"quantize.format={form}",
        f"quantize.bits={bits}",
        "quantize.group_size=32",
        f"quantize.calibration={text}",
        f"quantize.evaluation={text}",
        "quantize.length=64",
    )
    assert report.num_matrices == 3 * (2 + 2 * 8)
    assert report.num_kept == 0
    assert report.perplexity_before is not None
    assert report.perplexity_after is not None
    assert abs(math.log(report.perplexity_after / report.perplexity_before)) < 0.1
    model, _ = load(tmp_path / "new")
    whole, _ = load(source)
    for own, module in model.layers.named_modules():
        if isinstance(module, LinearBase):
            before = whole.layers.get_submodule(own).dense()  # type: ignore[operator]
            assert module.method.is_quantized != isinstance(module, RouterLinear), own
            if isinstance(module, ExpertLinear):
                error = (module.dense() - before).norm() / before.norm()
                assert float(error) < (0.25 if bits == 4 else 0.02), own


def test_transformers_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers needs this package to read it")
    source = save(reference_model(VARIANTS["qwen2"]), VARIANTS["qwen2"].as_one_file(), tmp_path)
    target = tmp_path / "new"
    quantise(
        f"model.path={source}",
        f"quantize.output={target}",
        "quantize.group_size=32",
        "quantize.symmetric=false",
    )
    model, config = load(target)
    settings = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, quantization_config=settings
    )
    for index, layer in enumerate(model.layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            stored = theirs.get_submodule(f"model.layers.{index}.{name}").weight
            # The package compressed_tensors multiplies integers and float16 scales in float16.
            # So our weights are rounded to float16 before the comparison.
            ours = layer.get_submodule(name).dense().half().float()  # type: ignore[operator]
            assert torch.equal(ours, stored.detach())
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    ours = Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [len(PROMPT)])
    assert float((ours - expected).norm() / expected.norm()) < 0.06


def test_recurrent_layers_are_quantised_while_loading_alone(tmp_path: Path) -> None:
    variant = VARIANTS["lfm2"].as_one_file()
    directory = save(reference_model(variant), variant, tmp_path)
    with pytest.raises(StartupError, match=r"recurrent layers .* use model\.quantization=int8"):
        quantise(f"model.path={directory}", f"quantize.output={tmp_path / 'new'}")


def test_what_can_not_be_quantised_is_refused(tmp_path: Path) -> None:
    gpt2 = save(reference_model(VARIANTS["gpt2"]), VARIANTS["gpt2"].as_one_file(), tmp_path)
    done = run(f"model.path={gpt2}", f"quantize.output={tmp_path / 'new'}")
    assert done.returncode != 0
    assert "matrices of this family are not written" in done.stderr
    assert "Traceback" not in done.stderr
    tied = save(
        reference_model(VARIANTS["llama-tied"]),
        VARIANTS["llama-tied"].as_one_file(),
        tmp_path / "t",
    )
    with pytest.raises(StartupError, match="head is the table of embeddings"):
        quantise(
            f"model.path={tied}",
            f"quantize.output={tmp_path / 'new'}",
            "quantize.format=gptq",
            "quantize.group_size=32",
            "quantize.head_bits=8",
        )
    with pytest.raises(StartupError, match=r"quantize\.calibration=/nope cannot be read: No such"):
        quantise(
            f"model.path={gpt2}",
            f"quantize.output={tmp_path / 'new'}",
            "quantize.calibration=/nope",
            f"model.tokenizer={Path(__file__).parents[2] / 'models' / 'demo'}",
        )
    for output, text in ((gpt2, "must be a new or empty directory"), ("", "quantize.output=DIR")):
        with pytest.raises(ConfigError, match=text):
            quantize(load_config([f"model.path={gpt2}", f"quantize.output={output}"]))


@pytest.mark.slow
def test_calibration_loses_less_than_half_of_rounding_to_the_nearest(tmp_path: Path) -> None:
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
    assert 0 < losses[1] < 0.5 * losses[0]
