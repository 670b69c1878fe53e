"""Measures the speed of loading stored weights from the page cache, and the memory it takes.

    python -m ostinato.benchmarks.micro.model.weight_loading --model qwen3-0.6b --json FILE

For each format a checkpoint with random numbers is written to a temporary directory, and loaded
several times in bfloat16 on a CPU. GGUF files can be written for qwen3 models only. "GB/s" counts
bytes of the files. "peak" is the most resident memory during the loading, minus the memory before;
mapped pages of the files count. The table also has the bytes of the finished weights, and of the
largest matrix with one byte for each weight. Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.workload.random_gguf import write_random_gguf
from ostinato.conf.compose import load_config
from ostinato.conf.schema import ModelSection, Quantization
from ostinato.models.base import LanguageModel
from ostinato.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from ostinato.models.checkpoints.slots import MatrixSlot, find_slots
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.quantize.packing import settings_of
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.weight_methods.weight_method import DummyTensor
from ostinato.ops.native.library import load
from ostinato.runtime.startup.plan.model_source import open_model

__all__ = ("FORMATS", "GGUF_TYPES", "Measured", "measure")

_CPU = torch.device("cpu")
_MIB = 1 << 20


def _by_row(form: str, number: str) -> dict[str, Any]:
    """Settings of compressed-tensors: 8 bits and a scale for each row."""
    weights = {"type": number, "num_bits": 8, "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[dict[str, Any], Quantization]] = {
    "bfloat16": ({}, Quantization.none),
    "bfloat16, to int8": ({}, Quantization.int8),
    "bfloat16, to int4": ({}, Quantization.int4),
    "GPTQ, 4 bits": (settings_of("gptq", 4, 128, (), symmetric=True), Quantization.none),
    "GPTQ, 8 bits": (settings_of("gptq", 8, 128, (), symmetric=True), Quantization.none),
    "GPTQ, act-order": (
        settings_of("gptq", 4, 128, (), symmetric=True) | {"desc_act": True},
        Quantization.none,
    ),
    "AWQ": (settings_of("awq", 4, 128, (), symmetric=False), Quantization.none),
    "compressed-tensors, 4 bits": (
        settings_of("compressed-tensors", 4, 128, (), symmetric=True),
        Quantization.none,
    ),
    "compressed-tensors, int8": (_by_row("int-quantized", "int"), Quantization.none),
    "compressed-tensors, FP8": (_by_row("float-quantized", "float"), Quantization.none),
    "FP8, matrices": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        Quantization.none,
    ),
    "FP8, blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        Quantization.none,
    ),
}
"""Format -> (its `quantization_config`, how its float weights are quantised during loading)."""
GGUF_TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


class Measured(NamedTuple):
    """The figures of one format; sizes in bytes, times in seconds."""

    format: str
    file_bytes: int
    weight_bytes: int  # finished
    matrix_bytes: int  # of the largest matrix, at 8 bits for each weight
    peak_bytes: int  # at the last loading
    seconds: list[float]  # of each loading

    @property
    def rate(self) -> float:
        """Median GB/s of the files."""
        return self.file_bytes / statistics.median(self.seconds) / 1e9


def measure(name: str, hf_config: dict[str, Any], directory: Path, repeats: int) -> Measured:
    """Write a checkpoint and load it.

    Args:
        name: a key of FORMATS, or "GGUF" and a type of GGUF_TYPES.
        hf_config: the config.json of a model whose weights are floats.
        directory: an empty directory for the checkpoint.
        repeats: how many times it is loaded.
    """
    if name in FORMATS:
        section = _write_safetensors(name, hf_config, directory)
    else:
        file = directory / "model.gguf"
        write_random_gguf(hf_config, name.removeprefix("GGUF "), file)
        section = ModelSection(path=str(file))
    checkpoint = open_checkpoint(section)
    seconds: list[float] = []
    weight_bytes = matrix_bytes = peak = 0
    for _ in range(repeats):
        model = _build(checkpoint, section, _CPU)
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        begin = time.perf_counter()
        load_weights(model, checkpoint)
        seconds.append(time.perf_counter() - begin)
        peak = _resident("VmHWM") - before
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        matrix_bytes = max(
            module.out_features * module.in_features
            for module in model.modules()
            if isinstance(module, LinearBase)
        )
        del model
    file_bytes = sum(file.stat().st_size for file in checkpoint.weight_files())
    return Measured(name, file_bytes, weight_bytes, matrix_bytes, peak, seconds)


def _write_safetensors(name: str, hf_config: dict[str, Any], directory: Path) -> ModelSection:
    settings, quantization = FORMATS[name]
    if settings:
        hf_config = hf_config | {"quantization_config": settings}
    stated = Checkpoint(path=None, hf_config=hf_config, generation_config={})
    skeleton = _build(stated, ModelSection(), torch.device("meta"))
    save_file(dict(_stored(skeleton)), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(hf_config), encoding="utf-8")
    return ModelSection(path=str(directory), quantization=quantization)


def _build(checkpoint: Checkpoint, section: ModelSection, device: torch.device) -> LanguageModel:
    dtype = torch.bfloat16
    weights = choose_weights(section, checkpoint, pack=True, device=_CPU, dtype=dtype)
    return build_model(
        read_model_config(checkpoint),
        dtype=dtype,
        device=device,
        attention_backend="cpu",
        weights=weights,
    )


def _stored(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint of this model, with random numbers."""
    layout = model.checkpoint_layout
    prefix = layout.prefixes[0] if layout.prefixes else ""
    generator = torch.Generator().manual_seed(0)
    for name, slot in find_slots(model, layout).items():
        full_name = name if name == layout.head else f"{prefix}{name}"
        shape = slot.stored_shape
        if not isinstance(slot, MatrixSlot):
            yield full_name, torch.ones(shape, dtype=torch.bfloat16)
            continue
        dummy = DummyTensor(slot.kind, shape, slot.size, generator)
        value = slot.module.method.dummy(dummy)
        if value is None:
            dtypes = slot.stored.dtypes
            dtype = torch.bfloat16 if torch.bfloat16 in dtypes else dtypes[0]
            value = torch.empty(shape, dtype=dtype)
            if dtype.is_floating_point:
                value.normal_(std=0.02, generator=generator)
            else:
                value.random_(generator=generator)
        yield full_name, value


def _resident(field: str) -> int:
    """Bytes of a field of this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _print(results: list[Measured]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("format", "files MiB", "GB/s", "s", "weights MiB", "matrix MiB", "peak MiB"):
        table.add_column(column)
    for each in results:
        sizes = (each.weight_bytes, each.matrix_bytes, each.peak_bytes)
        table.add_row(
            each.format,
            f"{each.file_bytes / _MIB:.0f}",
            f"{each.rate:.2f}",
            f"{statistics.median(each.seconds):.2f}",
            *(f"{size / _MIB:.0f}" for size in sizes),
        )
    Console(width=110, highlight=False).print(table)


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="an option of model=")
    formats = [*FORMATS, *(f"GGUF {name}" for name in GGUF_TYPES)]
    parser.add_argument("--formats", nargs="*", choices=formats, default=formats)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config = load_config([f"model={options.model}", "model.load_format=dummy"])
    hf_config = open_model(config).checkpoint.hf_config
    isa = load("core").isa
    load("quantized")
    results: list[Measured] = []
    for name in options.formats:
        with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
            results.append(measure(name, hf_config, Path(scratch), options.repeats))
    _print(results)
    if options.json is not None:
        conditions = {
            **basic_conditions(),
            "isa": isa,
            "torch": torch.__version__,
            "threads": options.threads,
            "model": options.model,
        }
        figures = [each._asdict() | {"gb_per_s": each.rate} for each in results]
        write_json({"conditions": conditions, "results": figures}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
