"""Quantises a checkpoint and writes the result as a new checkpoint, for `run quantize`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ostinato.conf.command_schema import QuantizeSection
from ostinato.conf.engine_config import EngineConfig
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError
from ostinato.models.checkpoints.slots import matrix_parts, stored_modules
from ostinato.models.checkpoints.weights import file_tensors, load_weights
from ostinato.models.linear_layers import ExpertLinear, LinearBase
from ostinato.models.quantize.calibration import BLOCK_SIZE, Calibrator, layer_matrices
from ostinato.models.quantize.packing import pack, settings_of
from ostinato.models.quantize.rounding import (
    Rounded,
    choose_grid,
    round_by_hessian,
    round_to_nearest,
)
from ostinato.models.registry import build_model
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.model_source import ModelSource, open_model
from ostinato.runtime.text.tokenizer import Tokenizer

__all__ = ("QuantizeReport", "quantize_model")

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHT_INDEX = ".index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """The sizes and the perplexity of a checkpoint before and after it was quantised."""

    directory: Path
    num_matrices: int
    bytes_before: int  # size of the weight files
    bytes_after: int
    calibration_tokens: int
    evaluation_tokens: int
    perplexity_before: float | None  # perplexity of the evaluation text
    perplexity_after: float | None


def quantize_model(
    config: EngineConfig, section: QuantizeSection, on_matrix: Callable[[int, int], None]
) -> QuantizeReport:
    """Quantise the matrices of a model's layers and write the checkpoint.

    Args:
        config: its `model` section names the checkpoint.
        section: the format, and the calibration and evaluation texts.
        on_matrix: called after each matrix: the number of finished matrices, the number of all.

    Raises:
        StartupError: the model, the format or a file is not supported, with the reason.
    """
    target = Path(section.output)
    if not section.output or (target.exists() and any(target.iterdir())):
        raise StartupError(
            f"quantize.output={section.output!r} must be a new or empty directory for the result"
        )
    try:
        source = open_model(config, torch.device("cpu"))
        model = _load(source, section)
        tokenizer = config.model.tokenizer or str(source.checkpoint.path)
        rows, held_out = _read_texts(tokenizer, section)
        return _Quantization(source, model, section, on_matrix).run(rows, held_out, target)
    except (CheckpointError, OSError) as error:
        raise StartupError(str(error)) from error


def _load(source: ModelSource, section: QuantizeSection) -> CausalLM:
    """The model in float32.

    Raises:
        StartupError: the model's matrices cannot be quantised with these settings.
    """
    if source.checkpoint.gguf is not None:
        raise StartupError("GGUF files are not quantised again; use the checkpoint in safetensors")
    if source.weights.quantization != "none":
        raise StartupError(
            f"the checkpoint is quantised already ({source.weights.quantization}); "
            "use the checkpoint before quantization"
        )
    if section.format == "awq" and section.bits != 4:
        raise StartupError(f"quantize.format=awq has 4 bits, got quantize.bits={section.bits}")
    model = build_model(
        source.config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend="reference",
        max_model_len=min(source.config.max_model_len, section.length),
    )
    if not isinstance(model, CausalLM):
        raise StartupError("only models that generate are quantised; this one is an encoder")
    for name, module in model.layers.named_modules():
        if isinstance(module, ExpertLinear) or name.endswith(model.checkpoint_layout.transposed):
            what = "mixtures of experts" if isinstance(module, ExpertLinear) else "this family"
            raise StartupError(
                f"layers.{name}: matrices of {what} are not written; set model.quantization=int4 "
                "to quantise them while they are loaded"
            )
        if isinstance(module, LinearBase):
            for size in (module.in_features, *(span.size for span in module.outputs)):
                if size % 8:
                    raise StartupError(f"layers.{name} has {size} features; 8 must divide them")
            if module.in_features % section.group_size:
                raise StartupError(
                    f"quantize.group_size={section.group_size} does not divide the "
                    f"{module.in_features} inputs of layers.{name}; choose 32, 64 or 128"
                )
    load_weights(model, source.checkpoint)
    return model


def _read_texts(
    directory: str, section: QuantizeSection
) -> tuple[list[list[int]], list[list[int]]]:
    """The calibration text and the evaluation text, each as rows of token ids."""
    if not section.calibration and not section.evaluation:
        return [], []
    tokenizer = Tokenizer.from_path(directory)
    found: list[list[list[int]]] = []
    for key in ("calibration", "evaluation"):
        file = getattr(section, key)
        ids = tokenizer.encode(Path(file).read_text(encoding="utf-8")) if file else []
        rows = [ids[i : i + section.length] for i in range(0, len(ids), section.length)]
        rows = [row for row in rows if len(row) > 1][: section.samples]
        if file and not rows:
            raise StartupError(f"quantize.{key}={file}: the file has no text")
        found.append(rows)
    return found[0], found[1]


class _Quantization:
    """Quantises one model and writes its checkpoint."""

    def __init__(
        self,
        source: ModelSource,
        model: CausalLM,
        section: QuantizeSection,
        on_matrix: Callable[[int, int], None],
    ) -> None:
        self._source = source
        self._model = model
        self._section = section
        self._on_matrix = on_matrix
        self._packed: dict[str, dict[str, Tensor]] = {}  # by the name of the stored module
        self._done = 0
        self._total = sum(len(layer_matrices(layer)) for layer in model.layers)

    def run(self, rows: list[list[int]], held_out: list[list[int]], target: Path) -> QuantizeReport:
        spec = self._source.config.kv_cache_spec(BLOCK_SIZE, torch.float32)
        num_blocks = -(-self._section.length // BLOCK_SIZE) + 1
        cache = spec.allocate(num_blocks, torch.device("cpu"))
        calibrator = Calibrator(self._model, cache)
        before = calibrator.perplexity(held_out) if held_out else None
        calibrator.round_layers(rows, self._round)
        after = calibrator.perplexity(held_out) if held_out else None
        files = self._source.checkpoint.weight_files()
        return QuantizeReport(
            directory=target,
            num_matrices=self._done,
            bytes_before=sum(file.stat().st_size for file in files),
            bytes_after=self._write(files, target),
            calibration_tokens=sum(map(len, rows)),
            evaluation_tokens=sum(map(len, held_out)),
            perplexity_before=before,
            perplexity_after=after,
        )

    def _round(self, name: str, module: LinearBase, hessian: Tensor | None) -> None:
        section, layout = self._section, self._model.checkpoint_layout
        weight = module.get_parameter("weight")
        names = stored_modules(name, module, layout)
        for stored, part in zip(names, matrix_parts(name, module, layout), strict=True):
            rows = slice(part.first_row, part.first_row + part.num_rows)
            rounded = _rounded(weight[rows].float(), hessian, section)
            weight[rows] = rounded.restored()
            order = None if isinstance(part.rows, slice) else part.rows.argsort()
            self._packed[stored] = pack(
                stored,
                rounded if order is None else _reordered(rounded, order),
                section.format,
                symmetric=section.symmetric,
            )
        self._done += 1
        self._on_matrix(self._done, self._total)

    def _write(self, files: list[Path], target: Path) -> int:
        """Write weights, settings and the tokenizer's files; returns the size of the weight files
        in bytes."""
        section, checkpoint = self._section, self._source.checkpoint
        target.mkdir(parents=True, exist_ok=True)
        weight_map: dict[str, str] = {}
        for number, file in enumerate(files, 1):
            name = "model.safetensors"
            if len(files) > 1:
                name = f"model-{number:05}-of-{len(files):05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for stored, tensor in file_tensors(file):
                packed = self._packed.get(self._module_of(stored))
                tensors.update({stored: tensor.clone()} if packed is None else packed)
            save_file(tensors, target / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
        if len(files) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            _write_json(target / f"model.safetensors{_WEIGHT_INDEX}", index)
        _copy_small_files(checkpoint, target)
        settings = settings_of(
            section.format, section.bits, section.group_size, symmetric=section.symmetric
        )
        _write_json(
            target / "config.json", {**checkpoint.hf_config, "quantization_config": settings}
        )
        return sum(file.stat().st_size for file in target.glob("*.safetensors"))

    def _module_of(self, stored: str) -> str:
        """The full name of the quantised module to which a stored weight belongs; empty = none."""
        module = stored.removesuffix(".weight")
        if module == stored:
            return ""
        if module in self._packed:
            return module
        prefixes = self._model.checkpoint_layout.prefixes
        return next((f"{p}{module}" for p in prefixes if f"{p}{module}" in self._packed), "")


def _rounded(weight: Tensor, hessian: Tensor | None, section: QuantizeSection) -> Rounded:
    grid = choose_grid(
        weight,
        section.bits,
        section.group_size,
        torch.float16,
        symmetric=section.symmetric,
        importance=None if hessian is None else hessian.diagonal(),
    )
    if hessian is None:
        return round_to_nearest(weight, grid)
    return round_by_hessian(weight, grid, hessian)


def _reordered(rounded: Rounded, order: Tensor) -> Rounded:
    """The same rows in another order."""
    grid = rounded.grid
    grid = grid._replace(scales=grid.scales[order], zeros=grid.zeros[order])
    return Rounded(grid, rounded.values[order])


def _copy_small_files(checkpoint: Checkpoint, target: Path) -> None:
    assert checkpoint.path is not None, "weights were loaded from it"
    for pattern in _SMALL_FILES:
        for file in checkpoint.path.glob(pattern):
            if not file.name.endswith(_WEIGHT_INDEX):
                shutil.copyfile(file, target / file.name)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
