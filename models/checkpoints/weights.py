"""Fills a model with weights: streamed from a checkpoint's files, or random ones for benchmarks.

Parameters already have their memory (build_model reserves it), so every tensor is copied from its
file to its final place and at most one of them exists twice. Names and shapes must fit exactly:
whatever is missing or left over is an error that names it.
"""

from __future__ import annotations

import itertools
import pickle
import re
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ostinato.conf.errors import first_line
from ostinato.models.base import CheckpointLayout, LanguageModel
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError
from ostinato.models.layers import LayerNorm, Matrix, MergedLinear, RMSNorm

__all__ = ("init_dummy_weights", "load_weights")

# Mapped pages count as this process's memory; a file is opened anew after this much of it.
_REOPEN_BYTES = 1 << 26
_MAX_NAMED = 5
# Random numbers that dummy weights repeat; prime, so that rows of a matrix do not repeat with it.
_POOL_SIZE = 1_048_583
_DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a checkpoint's tensor goes: the whole of a parameter, or some rows of it."""

    module: nn.Module
    kind: str  # name of the module's parameter
    shape: tuple[int, ...]  # of these rows
    first_row: int = 0
    transposed: bool = False

    def target(self) -> Tensor:
        parameter = self.module.get_parameter(self.kind)
        return parameter[self.first_row : self.first_row + self.shape[0]]


@torch.no_grad()
def load_weights(
    model: LanguageModel,
    checkpoint: Checkpoint,
    *,
    progress: str = "",
    on_loaded: Callable[[nn.Module], object] | None = None,
) -> None:
    """Copy a checkpoint's tensors into the model's parameters, converted to their dtype.

    Args:
        model: as `build_model` made it, on its device.
        checkpoint: with a directory.
        progress: what to call a bar of bytes on stderr; empty = show none.
        on_loaded: called with each module as soon as all of its own parameters are there. It may
            replace them by another form, so that the whole model never exists in its first.

    Raises:
        CheckpointError: a file can not be read; a tensor is missing, unexpected or misshapen.
    """
    layout = model.checkpoint_layout
    slots = _slots(model)
    files = checkpoint.weight_files()
    ignored = [re.compile(pattern) for pattern in layout.ignored]
    loaded: set[str] = set()
    unexpected: list[str] = []
    waiting = Counter(slot.module for slot in slots.values())
    with _progress_bar(shown=bool(progress)) as bar:
        task = bar.add_task(progress, total=sum(file.stat().st_size for file in files))
        for stored_name, tensor in itertools.chain.from_iterable(map(_tensors, files)):
            name = _own_name(stored_name, layout, slots)
            if name in slots:
                slot, filled = slots[name], name in loaded
                value = _checked(slot, stored_name, tensor, filled=filled)
                loaded.add(name)
                waiting[slot.module] -= not filled
                if on_loaded is not None and not filled and not waiting[slot.module]:
                    _finish(slot, value, on_loaded)
                elif not filled:
                    slot.target().copy_(value)
            elif not any(pattern.search(stored_name) for pattern in ignored):
                unexpected.append(stored_name)
            bar.advance(task, tensor.nbytes)
    prefix = layout.prefixes[0] if layout.prefixes else ""
    missing = [prefix * (name != layout.head) + name for name in slots if name not in loaded]
    for what, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            raise CheckpointError(f"{checkpoint.directory} {what} {_listed(names)}")


@torch.no_grad()
def init_dummy_weights(
    model: LanguageModel,
    seed: int,
    *,
    progress: str = "",
    on_loaded: Callable[[nn.Module], object] | None = None,
) -> None:
    """Random weights for benchmarks: normal with deviation 0.02, norms 1 and their biases 0.

    Args:
        model: as `build_model` made it.
        seed: same seed, same weights, on every device.
        progress: as in `load_weights`.
        on_loaded: as in `load_weights`.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(_POOL_SIZE, generator=generator) * _DUMMY_STD
    pool = pool.to(next(model.parameters()))
    start = 0
    with _progress_bar(shown=bool(progress)) as bar:
        total = sum(parameter.nbytes for parameter in model.parameters())
        task = bar.add_task(progress, total=total)
        for module in model.modules():
            is_norm = isinstance(module, LayerNorm | RMSNorm)
            for kind, parameter in module.named_parameters(recurse=False):
                if is_norm:
                    parameter.fill_(1.0 if kind == "weight" else 0.0)
                else:
                    start = _repeat_pool(parameter.view(-1), pool, start)
                bar.advance(task, parameter.nbytes)
            if on_loaded is not None:
                on_loaded(module)


def _repeat_pool(target: Tensor, pool: Tensor, start: int) -> int:
    """Fill `target` with the pool from `start` on, around and around; returns where it stopped."""
    done = 0
    while done < target.numel():
        count = min(pool.numel() - start, target.numel() - done)
        target[done : done + count] = pool[start : start + count]
        done += count
        start = (start + count) % pool.numel()
    return start


def _slots(model: LanguageModel) -> dict[str, _Slot]:
    """Every tensor that the checkpoint must have, by its name there without the prefix."""
    layout = model.checkpoint_layout
    merged = dict(layout.merged)
    slots: dict[str, _Slot] = {}
    for module_name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            parent, _, own = module_name.rpartition(".")
            parts = merged.get(own)
            if parts is not None and isinstance(module, MergedLinear):
                first_row = 0
                for part, num_rows in zip(parts, module.sizes, strict=True):
                    name = _renamed(f"{parent}.{part}.{kind}", layout)
                    slots[name] = _Slot(module, kind, (num_rows, *shape[1:]), first_row)
                    first_row += num_rows
            else:
                transposed = kind == "weight" and module_name.endswith(layout.transposed)
                name = _renamed(f"{module_name}.{kind}", layout)
                slots[name] = _Slot(module, kind, shape, transposed=transposed)
    return slots


def _renamed(name: str, layout: CheckpointLayout) -> str:
    for ours, theirs in layout.renamed:
        name = name.replace(ours, theirs)
    return name


def _own_name(stored_name: str, layout: CheckpointLayout, slots: dict[str, _Slot]) -> str:
    """A stored name without prefix; a head that the model ties is the embedding once more."""
    for prefix in layout.prefixes:
        stored_name = stored_name.removeprefix(prefix)
    return layout.embedding if stored_name == layout.head not in slots else stored_name


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one file; the tensors are views of the mapped file where possible."""
    read = _safetensors if file.suffix == ".safetensors" else _pickle
    try:
        yield from read(file)
    except (SafetensorError, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = first_line(error)
        raise CheckpointError(f"{file} is truncated or not a weights file: {reason}") from error


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        names = deque(opened.keys())
    while names:
        read = 0
        with safe_open(file, framework="pt") as opened:
            while names and read < _REOPEN_BYTES:
                tensor = opened.get_tensor(names[0])
                read += tensor.nbytes
                yield names.popleft(), tensor


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


def _checked(slot: _Slot, stored_name: str, tensor: Tensor, *, filled: bool) -> Tensor:
    """A stored tensor in the form of its slot, which holds it already when `filled`."""
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{stored_name} has dtype {tensor.dtype}; quantized checkpoints are not supported"
        )
    expected = tuple(reversed(slot.shape)) if slot.transposed else slot.shape
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{stored_name} has shape {list(tensor.shape)}, config.json says {list(expected)}"
        )
    value = tensor.t() if slot.transposed else tensor
    if filled and not (isinstance(slot.module, Matrix) and slot.module.holds(value)):
        raise CheckpointError(
            f"{stored_name} differs from the embedding that it is tied to; "
            "set model.config.tie_word_embeddings=false"
        )
    return value


def _finish(slot: _Slot, value: Tensor, on_loaded: Callable[[nn.Module], object]) -> None:
    """Give a module its last tensor and hand it over.

    A matrix that is one stored tensor is handed over as it lies in the file: the largest of all,
    the embedding, need not exist in memory twice before it is replaced by another form.
    """
    target = slot.target()
    whole = isinstance(slot.module, Matrix) and slot.kind == "weight" and not slot.transposed
    if not (whole and slot.shape == slot.module.weight.shape and value.dtype == target.dtype):
        target.copy_(value)
        on_loaded(slot.module)
        return
    stored = nn.Parameter(value, requires_grad=False)
    setattr(slot.module, slot.kind, stored)
    on_loaded(slot.module)
    if slot.module.weight is stored:
        slot.module.weight = nn.Parameter(target.copy_(value), requires_grad=False)


def _listed(names: list[str]) -> str:
    """The first few names, then how many more."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{noun} {', '.join(sorted(names)[:_MAX_NAMED])}{more}"


def _progress_bar(*, shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )
