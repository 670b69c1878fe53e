"""Ways to break an adapter: each function returns one that changes the files in a directory."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.models.adapters.adapter_files import AdapterError
from ostinato.models.adapters.peft_adapter import read_adapter
from ostinato.models.base import CausalLM
from tests.models.adapters.peft_files import MAX_RANK, edit_config, edit_tensors

Break = Callable[[Path], object]


def config(**values: object) -> Break:
    return lambda directory: edit_config(directory, **values)


def config_text(text: str) -> Break:
    return lambda directory: (directory / "adapter_config.json").write_text(text)


def weights(content: bytes) -> Break:
    return lambda directory: (directory / "adapter_model.safetensors").write_bytes(content)


def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Break:
    return lambda directory: edit_tensors(directory, edit)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Break:
    return tensors(lambda found: found.update({name: change(found[name]).contiguous()}))


def extra(name: str) -> Break:
    return tensors(lambda found: found.update({name: torch.ones(4, 64)}))


def moved(old: str, new: str) -> Break:
    """Rename tensors, and let the configuration choose every module."""

    def edit(found: dict[str, Tensor]) -> None:
        for name in list(found):
            found[name.replace(old, new)] = found.pop(name)

    def change(directory: Path) -> None:
        edit_tensors(directory, edit)
        edit_config(directory, target_modules="all-linear")

    return change


def as_pickle(value: object) -> Break:
    def change(directory: Path) -> None:
        (directory / "adapter_model.safetensors").unlink()
        torch.save(value, directory / "adapter_model.bin")

    return change


def header(text: str, data: bytes = b"") -> Break:
    encoded = text.encode()
    return weights(struct.pack("<Q", len(encoded)) + encoded + data)


def without(name: str) -> Break:
    return lambda directory: (directory / name).unlink()


def as_directory(name: str) -> Break:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return change


def as_pipe(name: str) -> Break:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return change


def check_refused(directory: Path, model: CausalLM, message: str) -> None:
    """Check that an adapter is refused with one line that begins with the path."""
    with pytest.raises(AdapterError) as refused:
        read_adapter(directory, model, MAX_RANK)
    text = str(refused.value)
    assert message in text
    assert text.isprintable()
    assert text.startswith(str(directory))
    assert len(text) < 2100
