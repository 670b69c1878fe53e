"""Reads the keys of one architecture from a GGUF file's metadata. Unread keys are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ostinato.models.gguf.gguf_file import GGUFFile, GGUFTensor
from ostinato.models.gguf.gguf_paths import GGUFError

__all__ = ("ArchitectureKeys", "ReadKeys")

# Keys that do not change the computation, or that repeat the shapes of tensors.
_WITHOUT_EFFECT = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
# Keys that an architecture may not read. If a file then has such a key, it must have this value: no
# other value is implemented.
_MUST_BE = {
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "expert_weights_scale": 1.0,
    "interleave_moe_layer_step": 1,
    "leading_dense_block_count": 0,
    "pooling_type": 0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "use_parallel_residual": False,
}


class ArchitectureKeys:
    """The keys of one architecture. Records which of them have been read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."
        self._read: set[str] = set()

    def ignore(self, *keys: str) -> None:
        """Accept keys whose value has no effect here."""
        self._read |= set(keys)

    def integer(self, key: str) -> int | None:
        """The whole number >= 0 under a key. An array is accepted if all its numbers are equal.

        Returns:
            None when the file does not state it.

        Raises:
            GGUFError: the value is of another type, too large, or differs between layers.
        """
        self._read.add(key)
        value = self.file.metadata.get(self._prefix + key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            if len(set(value.tolist())) != 1:
                raise self.error(key, "differs between layers", "one number for all is")
            value = value.tolist()[0]
        else:
            value = self.file.get(self._prefix + key, int)
        if value is not None and not 0 <= value < 1 << 31:
            raise self.error(key, f"is {value}", "0 to 2147483647 is")
        return value

    def numbers(self, key: str, count: int) -> list[int] | None:
        """A list of whole numbers >= 0, such as one for each layer; true counts as 1.

        Args:
            key: its name without the architecture's prefix.
            count: how many numbers there must be. If the file has one number, it stands for all.

        Returns:
            None when the file does not state it.

        Raises:
            GGUFError: the value is of another type, or has another length.
        """
        self._read.add(key)
        value = self.file.metadata.get(self._prefix + key)
        if value is None:
            return None
        numbers: list[int] = []
        if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
            numbers = [int(number) for number in value.tolist()]
        elif isinstance(value, int):
            numbers = [int(value)] * count
        if len(numbers) != count or not all(0 <= number < 1 << 31 for number in numbers):
            raise self.error(
                key,
                f"is no list of {count} whole numbers from 0 to 2147483647",
                "only such a list is",
            )
        return numbers

    def size(self, key: str) -> int:
        """A whole number of at least 1.

        Raises:
            GGUFError: the file does not state it, or it is not such a number.
        """
        value = self.integer(key)
        if not value:
            stated = "is not there" if value is None else f"is {value}"
            raise self.error(key, stated, "a number of at least 1 is")
        return value

    def number(self, key: str) -> float | None:
        """The number under a key, or None if the file does not state it.

        Raises:
            GGUFError: the value is not a finite number.
        """
        self._read.add(key)
        return self.file.get(self._prefix + key, float)

    def flag(self, key: str, default: bool) -> bool:
        """The value of a key, true or false; `default` if the file does not state it.

        Raises:
            GGUFError: the value is of another type.
        """
        self._read.add(key)
        value = self.file.get(self._prefix + key, bool)
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        """The text under a key; `default` if it is missing or empty.

        Raises:
            GGUFError: the value is of another type.
        """
        self._read.add(key)
        return self.file.get(self._prefix + key, str) or default

    def tensor(self, name: str) -> GGUFTensor:
        """A tensor of the file.

        Raises:
            GGUFError: it is not there.
        """
        if name not in self.file.tensors:
            raise GGUFError(f"{self.file.path}: there is no tensor {name!r}")
        return self.file.tensors[name]

    def has_in_a_block(self, name: str) -> bool:
        """Whether a block has a tensor of this name, such as `attn_q.bias`."""
        return any(full.endswith(f".{name}") for full in self.file.tensors)

    def expert_width(self, key: str, tensor: str) -> int:
        """The width of experts: as stated, or in older files the width of their tensors.

        Raises:
            GGUFError: the file has neither.
        """
        return self.integer(key) or self.tensor(tensor).shape[-2]

    def error(self, key: str, what: str, supported: str) -> GGUFError:
        """The error of a key, to be raised.

        Args:
            key: its name without the architecture's prefix.
            what: what is wrong with its value: the predicate of the sentence.
            supported: the values that are supported, and "is" or "are".
        """
        return GGUFError(f"{self.file.path}: {self._prefix}{key} {what}; {supported} supported")

    def refuse_unread(self) -> None:
        """Refuse keys that have not been read, and values that are not implemented.

        Raises:
            GGUFError: the file has such a key or value; the text names it.
        """
        stated = {
            key.removeprefix(self._prefix): value
            for key, value in self.file.metadata.items()
            if key.startswith(self._prefix)
        }
        for key, only in _MUST_BE.items():
            value = only if key in self._read else stated.get(key, only)
            if type(value) is not type(only) or value != only:
                raise self.error(key, f"is {value!r:.60}", f"only {only} is")
        unknown = sorted(stated.keys() - self._read - _MUST_BE.keys() - _WITHOUT_EFFECT)
        if unknown:
            raise GGUFError(
                f"{self.file.path}: the key {self._prefix}{unknown[0]} is not known and may change "
                "the output, so the file is not served; use the model's safetensors checkpoint"
            )


ReadKeys = Callable[[ArchitectureKeys, dict[str, Any]], dict[str, Any]]
"""(keys, the part of the config that all architectures have) -> the rest of the config."""
