"""Reads the tensors of a safetensors file as views of the mapped file.

The library `safetensors` checks the file, and this module maps it once more. Pages that were read
count as memory of this process. `give_back` drops them, so a caller can limit this memory.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ostinato.models.checkpoints.headers import DTYPES

__all__ = ("SafetensorsFile",)


class SafetensorsFile:
    """A mapped file; tensors of it may outlive this object.

    Raises:
        SafetensorError: the file is truncated, or is not a safetensors file.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._checked = safe_open(path, framework="pt")
        with path.open("rb") as opened:
            # Copy on write, because torch does not support read-only tensors.
            self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        (size,) = struct.unpack("<Q", self._data[:8])
        self._first = 8 + size  # where the tensors begin
        self._entries = json.loads(self._data[8 : self._first])

    def __enter__(self) -> SafetensorsFile:
        self._checked.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._checked.__exit__(None, None, None)
        # If a caller still holds a tensor, the mapping ends with that tensor.
        del self._data

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""
        return iter(self._checked.keys())

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file. Its pages are read when it is used.

        Do not write to it. torch allows this, but `give_back` drops what was written.
        """
        entry = self._entries[name]
        dtype, shape = DTYPES.get(entry["dtype"]), entry["shape"]
        begin = self._first + entry["data_offsets"][0]
        if dtype is None or math.prod(shape) == 0:
            return self._checked.get_tensor(name)
        flat = torch.frombuffer(self._data, dtype=dtype, count=math.prod(shape), offset=begin)
        return flat.view(shape)

    def give_back(self) -> None:
        """Drop the pages that were read. A tensor that still needs them reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED)
