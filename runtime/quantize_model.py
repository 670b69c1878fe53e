"""Quantises a checkpoint and writes the result as a new checkpoint, for `run quantize`."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.sections.command_schema import QuantizeSection
from ostinato.models.base import CausalLM, CheckpointLayout, DecoderLayer
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError
from ostinato.models.checkpoints.headers import read_headers
from ostinato.models.checkpoints.slots import matrix_parts, stored_modules, stored_name
from ostinato.models.checkpoints.weights import file_tensors, load_weights
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import LinearBase, RouterLinear
from ostinato.models.layers.norm_layers import RMSNorm
from ostinato.models.layers.vocabulary_layers import OutputHead
from ostinato.models.quantize.calibration import (
    BLOCK_SIZE,
    Calibrator,
    Seen,
    layer_matrices,
    num_matrices,
)
from ostinato.models.quantize.input_scaling import apply_factors, best_factors, find_folds
from ostinato.models.quantize.packing import pack, settings_of
from ostinato.models.quantize.refinement import refine
from ostinato.models.quantize.rounding import (
    Grid,
    Rounded,
    choose_grid,
    damped,
    round_by_hessian,
    round_to_nearest,
)
from ostinato.models.registry import build_model
from ostinato.ops.attention import select_backend
from ostinato.ops.native.build import NativeBuildError
from ostinato.ops.native.library import load
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
    num_matrices: int  # quantised matrices; each matrix of each expert counts
    num_kept: int  # matrices of experts that stay as they are
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
        section: the new or empty directory of the result, the format, and the calibration and
            evaluation texts.
        on_matrix: called after each matrix with the number of finished matrices and of all.

    Raises:
        StartupError: the model, the format or a file is not supported; the text says why.
    """
    try:
        source = open_model(config, torch.device("cpu"))
        tokenizer = config.model.tokenizer or str(source.checkpoint.path)
        length = min(section.length, source.config.max_model_len)
        rows, held_out = _read_texts(tokenizer, section, length)
        model = _load(source, section)
        return _Quantization(source, model, section, on_matrix).run(
            rows, held_out, Path(section.output)
        )
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
            f"the weights are quantised already ({source.weights.quantization}); use the float "
            "checkpoint, without model.quantization and model.quantization_head"
        )
    config = source.config
    for inputs, tower in (("images", config.vision), ("audio", config.audio or config.sound)):
        if tower is not None:
            raise StartupError(
                f"models that take {inputs} are not quantised, and {config.architecture} "
                f"takes {inputs}; use model.quantization, which quantises the decoder while it is "
                "loaded"
            )
    if config.recurrent is not None:
        raise StartupError(
            f"models with recurrent layers are not quantised, and {config.architecture} has some; "
            "use model.quantization=int8 or int4, which quantises while loading"
        )
    if section.format == "awq" and section.bits != 4:
        raise StartupError(
            f"quantize.format=awq has 4 bits, got quantize.bits={section.bits}; set quantize.bits=4"
        )
    model = build_model(
        source.config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend=_attention_backend(source),
        max_model_len=min(source.config.max_model_len, section.length),
    )
    if not isinstance(model, CausalLM):
        raise StartupError("only models that generate are quantised; this one is an encoder")
    layout = model.checkpoint_layout
    for name, module in model.layers.named_modules():
        if name.endswith(layout.transposed):
            raise StartupError(
                f"layers.{name}: matrices of this family are not written; set "
                "model.quantization=int4 to quantise them while they are loaded"
            )
        if _is_written(module, name, layout):
            for size in (module.in_features, *(span.size for span in module.outputs)):
                if size % 8:
                    raise StartupError(
                        f"layers.{name} has {size} features, which is not a multiple of 8; "
                        "run quantize does not support this model"
                    )
            if module.in_features % section.group_size:
                raise StartupError(
                    f"quantize.group_size={section.group_size} does not divide the "
                    f"{module.in_features} inputs of layers.{name}; choose another: "
                    "32, 64 or 128"
                )
    if section.head_bits:
        _check_head(model, section)
    load_weights(model, source.checkpoint)
    return model


def _check_head(model: CausalLM, section: QuantizeSection) -> None:
    """Check that the output head can be written as integers.

    Raises:
        StartupError: the format or the model has no quantised head; the text says why.
    """
    key = f"quantize.head_bits={section.head_bits}"
    if section.format != "gptq":
        raise StartupError(
            f"{key}: a checkpoint of quantize.format={section.format} has a head of floats; set "
            "quantize.format=gptq"
        )
    head = _head_of(model)
    if head is None or model.checkpoint_layout.head != "lm_head.weight":
        raise StartupError(
            f"{key}: the checkpoint has no separate lm_head, because its head is the table of "
            "embeddings or has another name; leave the key out"
        )
    name, module = head
    if module.out_features % 8 or module.in_features % section.group_size:
        raise StartupError(
            f"{key}: {name} has {module.out_features} x {module.in_features} weights; it needs a "
            "multiple of 8 rows, and columns in whole groups of quantize.group_size="
            f"{section.group_size}"
        )


def _head_of(model: CausalLM) -> tuple[str, OutputHead] | None:
    """The name and the module of the output head; None = the head is the table of embeddings."""
    heads = ((name, m) for name, m in model.named_modules() if isinstance(m, OutputHead))
    return next(heads, None)


def _attention_backend(source: ModelSource) -> str:
    """The attention backend of this CPU. Builds its kernels if they were not built before."""
    device = torch.device("cpu")
    with contextlib.suppress(NativeBuildError):
        load("core")
    return select_backend("auto", source.config.attention_spec(BLOCK_SIZE, torch.float32, device))


def _is_written(module: nn.Module, name: str, layout: CheckpointLayout) -> TypeGuard[LinearBase]:
    """Whether a module's matrices are quantised.

    Expert matrices that the checkpoint stores as one stack are not: no output format has names for
    such stacks.
    """
    is_stack = isinstance(module, ExpertLinear) and name.endswith(layout.stacked)
    return isinstance(module, LinearBase) and not isinstance(module, RouterLinear) and not is_stack


def _read_texts(
    directory: str, section: QuantizeSection, length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The calibration text and the evaluation text, each as rows of `length` token ids."""
    if not section.calibration and not section.evaluation:
        return [], []
    tokenizer = Tokenizer.from_path(directory)
    found: list[list[list[int]]] = []
    for key in ("calibration", "evaluation"):
        file = getattr(section, key)
        ids = tokenizer.encode(_read_text(file, key)) if file else []
        rows = [ids[i : i + length] for i in range(0, len(ids), length)]
        rows = [row for row in rows if len(row) > 1][: section.samples]
        if file and not rows:
            raise StartupError(f"quantize.{key}={file}: the file has fewer than 2 tokens")
        found.append(rows)
    return found[0], found[1]


def _read_text(file: str, key: str) -> str:
    """The text of `quantize.calibration` or `quantize.evaluation`.

    Raises:
        StartupError: the file cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise StartupError(f"quantize.{key}={file} cannot be read: {why}") from error


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
        self._headers = read_headers(source.checkpoint)
        self._packed: dict[str, dict[str, Tensor]] = {}  # by the name of the stored module
        self._changed: dict[str, Tensor] = {}  # other tensors, by their stored names
        self._done = self._kept = 0
        self._head = _head_of(model) if section.head_bits else None
        matrices = (m for layer in model.layers for m in layer_matrices(layer).values())
        self._total = sum(map(num_matrices, matrices)) + (self._head is not None)

    def run(self, rows: list[list[int]], held_out: list[list[int]], target: Path) -> QuantizeReport:
        spec = self._source.config.kv_cache_spec(BLOCK_SIZE, torch.float32)
        num_blocks = -(-self._section.length // BLOCK_SIZE) + 1
        cache = spec.allocate(num_blocks, torch.device("cpu"))
        calibrator = Calibrator(self._model, cache)
        before = calibrator.perplexity(held_out) if held_out else None
        calibrator.round_layers(rows, self._round, self._scale, self._head)
        after = calibrator.perplexity(held_out) if held_out else None
        files = self._source.checkpoint.weight_files()
        return QuantizeReport(
            directory=target,
            num_matrices=self._done - self._kept,
            num_kept=self._kept,
            bytes_before=sum(file.stat().st_size for file in files),
            bytes_after=self._write(files, target),
            calibration_tokens=sum(map(len, rows)),
            evaluation_tokens=sum(map(len, held_out)),
            perplexity_before=before,
            perplexity_after=after,
        )

    def _scale(
        self, prefix: str, layer: DecoderLayer, hessian_of: Callable[[str], Tensor | None]
    ) -> None:
        section, layout = self._section, self._model.checkpoint_layout
        if not section.scaling:
            return
        for fold in find_folds(layer):
            source = layer.get_submodule(fold.source)
            name = stored_name(f"{prefix}.{fold.source}.weight", layout)
            header = self._headers.get(name) or self._headers.get(self._without_prefix(name))
            is_norm = isinstance(source, RMSNorm)
            if is_norm and (header is None or header.dtype is None):
                continue  # the files do not tell the norm's dtype: they are pickles
            hessian = hessian_of(fold.readers[0])
            if hessian is None:
                continue
            factors = best_factors(
                [layer.get_submodule(each).get_parameter("weight") for each in fold.readers],
                hessian,
                section.bits,
                section.group_size,
                torch.float16,
                symmetric=section.symmetric,
            )
            dtype = torch.float32 if header is None or header.dtype is None else header.dtype
            apply_factors(layer, fold, factors, dtype)
            if is_norm:
                self._changed[name] = (source.weight - source.stored_offset).to(dtype)

    def _round(self, name: str, module: LinearBase, seen: Sequence[Seen | None]) -> None:
        if not _is_written(module, name, self._model.checkpoint_layout):
            self._kept += len(seen)
        elif isinstance(module, ExpertLinear):
            for expert, weight in enumerate(module.get_parameter("weight")):
                self._round_one(name, module, weight, seen[expert], expert)
        else:
            self._round_one(name, module, module.get_parameter("weight"), seen[0], 0)
        self._done += len(seen)
        self._on_matrix(self._done, self._total)

    def _round_one(
        self, name: str, module: LinearBase, weight: Tensor, seen: Seen | None, expert: int
    ) -> None:
        """Round one matrix in place and pack it."""
        section, layout = self._section, self._model.checkpoint_layout
        bits = section.head_bits if isinstance(module, OutputHead) else section.bits
        names = stored_modules(name, module, layout, expert)
        for stored, part in zip(names, matrix_parts(name, module, layout), strict=True):
            rows = slice(part.first_row, part.first_row + part.num_rows)
            own = seen
            if seen is not None and seen.miss is not None:
                own = Seen(seen.hessian, seen.miss[rows])
            rounded = _rounded(weight[rows].float(), own, bits, section)
            weight[rows] = rounded.restored()
            order = None if isinstance(part.rows, slice) else part.rows.argsort()
            self._packed[stored] = pack(
                stored,
                rounded if order is None else _reordered(rounded, order),
                section.format,
                symmetric=section.symmetric,
            )

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
                packed = self._packed.get(self._known(stored.removesuffix(".weight"), self._packed))
                if packed is not None and stored.endswith(".weight"):
                    tensors.update(packed)
                else:
                    changed = self._changed.get(self._known(stored, self._changed))
                    tensors[stored] = tensor.clone() if changed is None else changed
            save_file(tensors, target / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
        if len(files) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            _write_json(target / f"model.safetensors{_WEIGHT_INDEX}", index)
        _copy_small_files(checkpoint, target)
        layout = self._model.checkpoint_layout
        routers = [
            stored
            for name, module in self._model.named_modules()
            if isinstance(module, RouterLinear)
            for stored in stored_modules(name, module, layout)
        ]
        settings = settings_of(
            section.format,
            section.bits,
            section.group_size,
            routers,
            symmetric=section.symmetric,
            head_bits=section.head_bits,
        )
        _write_json(
            target / "config.json", {**checkpoint.hf_config, "quantization_config": settings}
        )
        return sum(file.stat().st_size for file in target.glob("*.safetensors"))

    def _known(self, stored: str, known: Mapping[str, object]) -> str:
        """The key of `known` for a stored name; "" = none. Files may leave out a name's prefix."""
        prefixes = ("", *self._model.checkpoint_layout.prefixes)
        return next((f"{p}{stored}" for p in prefixes if f"{p}{stored}" in known), "")

    def _without_prefix(self, name: str) -> str:
        for prefix in self._model.checkpoint_layout.prefixes:
            name = name.removeprefix(prefix)
        return name


def _rounded(weight: Tensor, seen: Seen | None, bits: int, section: QuantizeSection) -> Rounded:
    def grid_of(target: Tensor, importance: Tensor | None) -> Grid:
        return choose_grid(
            target,
            bits,
            section.group_size,
            torch.float16,
            symmetric=section.symmetric,
            importance=importance,
        )

    if seen is None:
        return round_to_nearest(weight, grid_of(weight, None))
    hessian = damped(seen.hessian)
    target = weight
    if seen.miss is not None:
        # Few tokens leave the Hessian nearly singular, so the system is solved in float64.
        more = torch.linalg.solve(hessian.double(), seen.miss.double(), left=False)
        target = weight + more.float()
    grid = grid_of(target, hessian.diagonal())
    rounded = round_by_hessian(target, grid, hessian)
    return refine(rounded, target, hessian, torch.float16)


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
