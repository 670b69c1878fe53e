"""Reads the weights file of an adapter into memory, and its tensors from there.

The file is not mapped. An adapter can be loaded while the engine runs, and a mapped file that
another program shortens at that time would end the process. The bytes are read once, so the tensors
and the digest belong to the same content. Reading, hashing and conversions release the
interpreter's lock, so steps go on meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.conf.errors import first_line
from ostinato.models.adapters.adapter_files import AdapterError, reason_of
from ostinato.models.checkpoints.headers import DTYPES

__all__ = ("parse_tensors", "read_bytes", "sha256_of")


def read_bytes(file: Path, most: int | None = None) -> Tensor:
    """The bytes of a file: [bytes] uint8.

    Args:
        file: a regular file.
        most: the most bytes that it can have; None = any number.

    Raises:
        AdapterError: the file cannot be read, or has more bytes.
    """
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, io.SEEK_END)
            if most is not None and size > most:
                raise AdapterError(
                    f"{file} must have at most {most} bytes, got {size}; copy the file again"
                )
            content = torch.empty(size, dtype=torch.uint8)
            opened.seek(0)
            if opened.readinto(content.numpy().data) != size:
                raise AdapterError(f"{file} was shortened while it was read; load it again")
    except (OSError, RuntimeError) as error:  # RuntimeError: no memory
        raise AdapterError(f"{file} cannot be read: {reason_of(error)}") from error
    return content


def sha256_of(content: Tensor) -> bytes:
    """The SHA-256 digest of bytes [n] uint8."""
    return hashlib.sha256(content.numpy().data).digest()


def parse_tensors(content: Tensor, file: Path) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a weights file. The tensors can be views of its bytes.

    Args:
        content: the bytes, [n] uint8.
        file: the path, for messages; its suffix tells the format.

    Raises:
        AdapterError: the file is truncated, or is not of that format.
    """
    is_safetensors = file.suffix == ".safetensors"
    try:
        yield from _safetensors(content) if is_safetensors else _pickle(content)
    except Exception as error:  # the unpickler raises errors of many kinds for broken files
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(
            f"{file} is truncated or not a weights file: {first_line(error)}; copy the file again"
        ) from error


def _safetensors(content: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The format: the header's size (8 bytes), the header in JSON, the tensors without gaps."""
    size = int.from_bytes(content[:8].numpy().tobytes(), "little")
    if len(content) < 8 or size > len(content) - 8:
        raise ValueError(f"a header of {size} bytes is not in a file of {len(content)} bytes")
    data = content[8 + size :]
    header: dict[str, Any] = json.loads(
        content[8 : 8 + size].numpy().tobytes(), object_pairs_hook=_without_repeats
    )
    header.pop("__metadata__", None)
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    ends = [0, *(entry["data_offsets"][1] for _, entry in entries)]
    for (name, entry), (expected, end) in zip(entries, pairwise(ends), strict=True):
        shape, dtype = entry["shape"], DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"tensor {name} has the unknown dtype {entry['dtype']}")
        begin = entry["data_offsets"][0]
        if begin != expected or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name} has wrong offsets")
        if end > len(data):
            raise ValueError(f"tensor {name} ends after the end of the file")
        piece = data[begin:end]
        if (8 + size + begin) % dtype.itemsize:
            piece = piece.clone()  # a view must be aligned
        yield name, piece.view(dtype).view(shape)
    if ends[-1] != len(data):
        raise ValueError(f"{len(data) - ends[-1]} bytes follow the last tensor")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the header names {repeated} twice")
    return found


def _pickle(content: Tensor) -> Iterator[tuple[str, Tensor]]:
    state = torch.load(io.BytesIO(content.numpy().data), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise TypeError(f"it must hold tensors by name, got {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
            raise TypeError(f"{name!r} is not a tensor")
        yield str(name), value
