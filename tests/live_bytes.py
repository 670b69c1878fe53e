"""Follows the memory of the tensors that a piece of code makes, as a device's allocator would."""

from __future__ import annotations

import weakref
from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ("LiveBytes",)


class LiveBytes(TorchDispatchMode):
    """`peak` is the most bytes of results that lived at once. A result and its views count once."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: Counter[int] = Counter()  # by the address of their storage
        self._live = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in before or storage.data_ptr() in self._tensors:
                self._add(tensor, storage.data_ptr(), storage.nbytes())
        self.peak = max(self.peak, self._live)
        return out

    def _add(self, tensor: Tensor, address: int, num_bytes: int) -> None:
        if not self._tensors[address]:
            self._live += num_bytes
        self._tensors[address] += 1
        weakref.finalize(tensor, self._drop, address, num_bytes)

    def _drop(self, address: int, num_bytes: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            self._live -= num_bytes
            del self._tensors[address]


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
