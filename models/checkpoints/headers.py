"""Reads names, dtypes and shapes of stored tensors from the headers of safetensors files.

The config.json of a quantised checkpoint does not say everything. The tensors show which modules
are quantised, and the dtype of their scales. Only the header of each file is read.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError
from ostinato.models.quantized_checkpoints.policy import TensorHeader

__all__ = ("DTYPES", "read_headers")

_MOST_BYTES = 100_000_000  # the largest header that safetensors allows
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of safetensors files by their names there."""


def read_headers(checkpoint: Checkpoint) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint by name.

    Returns:
        {} when the checkpoint has no weights or no safetensors files. A file whose header
        cannot be read is left out: the loader reports it.
    """
    headers: dict[str, TensorHeader] = {}
    with contextlib.suppress(CheckpointError):
        for file in checkpoint.weight_files():
            if file.suffix == ".safetensors":
                headers.update(_headers_of(file))
    return headers


def _headers_of(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            entries = json.loads(opened.read(min(size, _MOST_BYTES)))
        for name, entry in entries.items():
            if name != "__metadata__":
                yield name, TensorHeader(DTYPES.get(entry["dtype"]), tuple(entry["shape"]))
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError):
        return
