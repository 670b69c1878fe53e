"""Loads a model's weights: streamed from a checkpoint's files, or random numbers for benchmarks.

Tensors are read one after the other. A matrix takes its final form as soon as its last tensor has
been read, so at most one matrix exists twice. A tensor must have the shape of the slot with its
name, and a dtype that the slot accepts. An error names a tensor that is missing, or that is left
over and not in `CheckpointLayout.ignored`.
"""

from __future__ import annotations

import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from ostinato.conf.errors import first_line
from ostinato.models.base import CheckpointLayout, LanguageModel
from ostinato.models.checkpoints.cache_scales import CacheScales
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError
from ostinato.models.checkpoints.headers import read_headers
from ostinato.models.checkpoints.safetensors_file import SafetensorsFile
from ostinato.models.checkpoints.slots import (
    MatrixSlot,
    Slot,
    bare_name,
    find_slots,
    with_prefix,
)
from ostinato.models.gguf.gguf_file import GGUFFile
from ostinato.models.gguf.gguf_paths import GGUFError
from ostinato.models.gguf.gguf_tensors import read_tensors
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import BIAS, LinearBase
from ostinato.models.layers.mixers.recurrent_mixers import RecurrentMixer
from ostinato.models.layers.norm_layers import LayerNorm, RMSNorm
from ostinato.models.quantized_checkpoints.gguf import AsStored
from ostinato.models.sharding import Span
from ostinato.models.weight_methods.weight_method import DummyTensor

__all__ = ("file_tensors", "init_dummy_weights", "load_weights")

# Mapped pages count as memory of this process. So they are given back after this many bytes.
_MAPPED_BYTES = 1 << 23
_MAX_NAMED = 5
# Dummy weights repeat this many random numbers. It is a prime, so the rows of a matrix differ.
_POOL_SIZE = 1_048_583
_DUMMY_STD = 0.02
_ONES = ("conv", "norm")  # the parameters of a recurrent mixer to which dummy weights give 1


@torch.no_grad()
def load_weights(
    model: LanguageModel,
    checkpoint: Checkpoint,
    *,
    progress: str = "",
    whole: LanguageModel | None = None,
) -> None:
    """Load a checkpoint's tensors into the model.

    Each matrix takes its final form as soon as its last tensor has been read. So the whole model is
    never in memory in its stored form. Files from before torch 1.6 are an exception: each is loaded
    whole.

    Args:
        model: as `build_model` made it, on its device.
        checkpoint: the checkpoint, which must have a path.
        progress: the label of a progress bar on stderr, if this is a terminal; empty = no bar.
        whole: for a stage, the model with the layers of all stages, on the meta device. Tensors of
            other stages are skipped. None = `model` is whole.

    Raises:
        CheckpointError: a file cannot be read; a tensor is missing, unexpected, or has a wrong
            dtype, shape or value.
        NativeBuildError: the kernels of a weight method cannot be built on this machine.
    """
    if model.checkpoint_layout.can_be_apart:
        headers = read_headers(checkpoint)
        model.checkpoint_layout = model.checkpoint_layout.of_checkpoint(headers)
    layout = model.checkpoint_layout
    if checkpoint.gguf is not None:
        layout = model.gguf_layout or layout
    slots = find_slots(model, layout)
    all_slots = slots if whole is None else find_slots(whole, layout)
    files = checkpoint.weight_files()
    ignored = [re.compile(pattern) for pattern in layout.ignored]
    loaded: dict[str, str] = {}  # slot -> the name of the tensor that filled it
    unexpected: list[str] = []
    scales = CacheScales(model)
    with _progress_bar(progress, sum(file.stat().st_size for file in files)) as advance:
        for stored_name, tensor, part in _stored_tensors(model, checkpoint, files, all_slots):
            name = _own_name(stored_name, layout, all_slots)
            if name in loaded:
                slots[name].compare(stored_name, tensor, loaded[name])
            elif name in slots:
                slots[name].fill(stored_name, tensor, part.matrices)
                if part.is_last:
                    loaded[name] = stored_name
            elif name in all_slots:
                pass  # another stage has it
            elif scales.take(name, stored_name, tensor):
                pass
            elif not (
                any(pattern.search(stored_name) for pattern in ignored)
                or _adds_nothing(stored_name, tensor)
            ):
                unexpected.append(stored_name)
            advance(part.num_bytes)
    scales.finish()
    for name, slot in slots.items():
        if name not in loaded and name.endswith(layout.zeros):
            slot.fill(name, torch.zeros(slot.stored_shape))
            loaded[name] = name
    missing = [with_prefix(name, layout) for name in slots if name not in loaded]
    for what, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            raise CheckpointError(f"{checkpoint.path} {what} {_listed(names)}")


@torch.no_grad()
def init_dummy_weights(
    model: LanguageModel, seed: int, *, progress: str = "", whole: LanguageModel | None = None
) -> None:
    """Fill a model with random weights, for benchmarks.

    Matrices and their biases get normally distributed numbers with a standard deviation of 0.02.
    Stored integers get random bits. For some stored tensors the weight method chooses other values
    (`WeightMethod.dummy`). The weights of norms and of convolutions get 1, and all other vectors 0.
    Every rank takes its part of the same matrices.

    Args:
        model: as `build_model` made it.
        seed: same seed, same weights, on every device.
        progress: as in `load_weights`.
        whole: as in `load_weights`.
    """
    numbers = _Numbers(seed)
    held = dict(model.named_modules())
    total = sum(parameter.nbytes for parameter in model.parameters())
    with _progress_bar(progress, total) as advance:
        for name, shown in (whole or model).named_modules():
            module = held.get(name)
            if isinstance(shown, LinearBase):
                _load_dummy(shown, module if isinstance(module, LinearBase) else None, numbers)
            if module is None:
                continue
            ones = _ONES if isinstance(module, RecurrentMixer) else ("weight",)
            for kind, parameter in module.named_parameters(recurse=False):
                if isinstance(module, LayerNorm | RMSNorm | RecurrentMixer):
                    parameter.fill_(1.0 if kind in ones else 0.0)
                elif not isinstance(module, LinearBase):
                    parameter.zero_()
                advance(parameter.nbytes)


def _load_dummy(shown: LinearBase, module: LinearBase | None, numbers: _Numbers) -> None:
    """Load stored tensors of random content, as from a checkpoint.

    Args:
        shown: the module, or one like it on the meta device.
        module: gets the numbers; None = numbers are only drawn, because another stage gets them.
        numbers: the random numbers.
    """
    (part,) = shown.parts()
    experts = shown.experts if isinstance(shown, ExpertLinear) else Span.of(1)
    stored = dict(shown.method.stored) | ({"bias": BIAS} if shown.has_bias else {})
    for expert in range(experts.total):
        for kind, tensor in stored.items():
            dtype = shown.spec.dtype if tensor.converted else tensor.dtypes[0]
            shape = tensor.shape(*part.stored)
            dummy = DummyTensor(kind, shape, part.stored, numbers.generator)
            value = shown.method.dummy(dummy)
            if value is None:
                value = torch.empty(shape, dtype=dtype, device=(module or shown).spec.device)
                numbers.fill(value)
            if module is not None and experts.start <= expert < experts.start + experts.size:
                module.load(kind, value, replace(part, expert=expert - experts.start))


class _Numbers:
    """Normally distributed numbers, drawn once and repeated."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._normal = torch.randn(_POOL_SIZE, generator=self.generator) * _DUMMY_STD
        self._pools: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._start = 0

    def fill(self, value: Tensor) -> None:
        """Fill a tensor with the next numbers. A tensor of integers gets random bits.

        For a tensor on the meta device, the numbers are skipped.
        """
        if not value.dtype.is_floating_point:
            # The generator is that of a CPU, so that every device gets the same numbers.
            drawn = value if value.is_cpu else torch.empty_like(value, device="cpu")
            drawn.random_(generator=self.generator)
            if not value.is_cpu and not value.is_meta:
                value.copy_(drawn)
            return
        if value.is_meta:
            self._start = (self._start + value.numel()) % _POOL_SIZE
            return
        key = (value.dtype, value.device)
        if key not in self._pools:
            self._pools[key] = self._normal.to(value.device, value.dtype)
        pool, flat, done = self._pools[key], value.view(-1), 0
        while done < flat.numel():
            count = min(pool.numel() - self._start, flat.numel() - done)
            flat[done : done + count] = pool[self._start : self._start + count]
            done += count
            self._start = (self._start + count) % pool.numel()


def _own_name(stored_name: str, layout: CheckpointLayout, slots: Mapping[str, Slot]) -> str:
    """A stored name without prefix. With tied weights, an output head gets the embedding's name."""
    stored_name = bare_name(stored_name, layout)
    return layout.embedding if stored_name == layout.head not in slots else stored_name


def _adds_nothing(stored_name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a bias of zeros. AutoGPTQ wrote one for each matrix without a bias."""
    return stored_name.endswith(".bias") and tensor.dim() == 1 and not bool(tensor.any())


class _Part(NamedTuple):
    """The part of a tensor to take now."""

    num_bytes: int  # in the file
    matrices: range | None = None  # of a stack; None = the whole tensor
    is_last: bool = True


def _stored_tensors(
    model: LanguageModel, checkpoint: Checkpoint, files: list[Path], slots: Mapping[str, Slot]
) -> Iterator[tuple[str, Tensor, _Part]]:
    """Names and tensors. Each tensor is yielded once, with one exception.

    A stack of matrices in a safetensors file is yielded several times, each time with the range of
    the matrices to take.
    """
    if checkpoint.gguf is not None:
        for name, tensor, num_bytes in _gguf(checkpoint.gguf, model, slots):
            yield name, tensor, _Part(num_bytes)
        return

    def is_stack(name: str) -> bool:
        slot = slots.get(_own_name(name, model.checkpoint_layout, slots))
        return isinstance(slot, MatrixSlot) and slot.experts is not None

    for file in files:
        yield from _file_parts(file, is_stack)


def _gguf(
    file: GGUFFile, model: LanguageModel, slots: Mapping[str, Slot]
) -> Iterator[tuple[str, Tensor, int]]:
    dtypes = {module.spec.dtype for module in model.modules() if isinstance(module, LinearBase)}
    layout = model.gguf_layout or model.checkpoint_layout

    def method_of(module: str) -> AsStored | None:
        for kind in ("blocks", "values"):
            slot = slots.get(_own_name(f"{module}.{kind}", layout, slots))
            if isinstance(slot, MatrixSlot) and isinstance(slot.module.method, AsStored):
                return slot.module.method
        return None

    def types_of(module: str) -> tuple[str, ...]:
        method = method_of(module)
        return () if method is None else method.types

    def keeps_blocks(module: str) -> bool:
        method = method_of(module)
        return method is not None and method.keeps_blocks

    try:
        yield from read_tensors(file, dtypes.pop(), types_of, keeps_blocks)
    except (GGUFError, OSError) as error:
        raise CheckpointError(first_line(error)) from error


def file_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one file.

    The tensors are views of the mapped file. Files from before torch 1.6 are loaded whole.

    Raises:
        CheckpointError: the file is truncated, or is not a weights file.
    """
    for name, tensor, _ in _file_parts(file, lambda name: False):
        yield name, tensor


def _file_parts(file: Path, is_stack: Callable[[str], bool]) -> Iterator[tuple[str, Tensor, _Part]]:
    """Like `file_tensors`, but a stack in a safetensors file is yielded several times.

    Each time it comes with the range of the matrices to take. So fewer pages are mapped at once.

    Raises:
        CheckpointError: as `file_tensors`.
    """
    try:
        if file.suffix == ".safetensors":
            yield from _safetensors(file, is_stack)
        else:
            yield from ((name, tensor, _Part(tensor.nbytes)) for name, tensor in _pickle(file))
    except (SafetensorError, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = first_line(error)
        raise CheckpointError(f"{file} is truncated or not a weights file: {reason}") from error


def _safetensors(
    file: Path, is_stack: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor, _Part]]:
    with SafetensorsFile(file) as opened:
        read = 0  # bytes since the last pages were given back
        for name in opened:
            tensor = opened.tensor(name)
            if not (tensor.dim() and tensor.nbytes and is_stack(name)):
                yield name, tensor, _Part(tensor.nbytes)
                read += tensor.nbytes
            else:
                size = tensor.nbytes // len(tensor)
                step = max(1, _MAPPED_BYTES // size)
                for first in range(0, len(tensor), step):
                    matrices = range(first, min(first + step, len(tensor)))
                    is_last = matrices.stop == len(tensor)
                    yield name, tensor, _Part(size * len(matrices), matrices, is_last)
                    opened.give_back()
            if read > _MAPPED_BYTES:
                opened.give_back()
                read = 0


def _pickle(file: Path) -> Iterator[tuple[str, Tensor]]:
    state = torch.load(
        file,
        map_location="cpu",
        weights_only=True,
        mmap=zipfile.is_zipfile(file),  # files from before torch 1.6 are not archives
    )
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} must hold tensors by name, got {type(state).__name__}")
    yield from ((name, value) for name, value in state.items() if isinstance(value, Tensor))


def _listed(names: list[str]) -> str:
    """The first few names, then how many more."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{noun} {', '.join(sorted(names)[:_MAX_NAMED])}{more}"


@contextmanager
def _progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr; yields the function that adds loaded bytes.

    Args:
        label: the bar's label; empty = no bar.
        total: bytes to load.
    """
    # If stderr is a file, only the last state would be written, in several parts. The API process
    # writes to the same file at this time, so its lines would be torn.
    if not (label and sys.stderr.isatty()):
        yield lambda num_bytes: None
        return
    from rich.console import Console  # a start without a terminal saves the 30 ms of the import
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
        bar.update(task, completed=total)  # the headers of the files count too
