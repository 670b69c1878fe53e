"""Reads the tensors of a GGUF file; models/gguf/tensor_names.py undoes their conversion."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ostinato.models.gguf.block_types import FLOAT_TYPES, dequantize
from ostinato.models.gguf.gguf_file import TENSOR_TYPES, GGUFFile, GGUFTensor
from ostinato.models.gguf.stored_formats import FORMATS, common_format, in_format
from ostinato.models.gguf.tensor_names import PARAMETERS, TensorNames, is_matrix
from ostinato.ops.checkpoint_values.stored_blocks import BLOCK_LAYOUTS
from ostinato.ops.quantized_reference import QuantFormat

__all__ = ("module_types", "read_tensors", "reordered_modules")

# Values that are dequantised at a time, so that intermediate tensors stay in the processor's
# caches.
_CHUNK_VALUES = 1 << 18
_ANY_EXPERT = re.compile(r"\.experts\.\d+\.")


def module_types(file: GGUFFile) -> dict[str, list[str]]:
    """The types of all matrices, by their modules in a Hugging Face checkpoint.

    The entry of a layer's first expert has the types of all experts of the layer.

    Raises:
        GGUFError: a tensor has a name that is not known.
    """
    names = TensorNames(file)
    found: dict[str, list[str]] = {}
    for tensor in file.tensors.values():
        if is_matrix(tensor) and names.is_used(tensor):
            modules = names.modules(tensor)
            for module in modules[:1] if names.stacks_experts(tensor) else modules:
                types = found.setdefault(_ANY_EXPERT.sub(".experts.0.", module), [])
                if tensor.type not in types:
                    types.append(tensor.type)
    return found


def reordered_modules(file: GGUFFile) -> list[str]:
    """The modules of a Hugging Face checkpoint whose columns have another order in the file."""
    names = TensorNames(file)
    used = (tensor for tensor in file.tensors.values() if names.is_used(tensor))
    return [names.modules(tensor)[0] for tensor in used if names.reorders_columns(tensor)]


def read_tensors(
    file: GGUFFile,
    dtype: torch.dtype,
    types_of: Callable[[str], Collection[str]] = lambda module: (),
    keeps_blocks: Callable[[str], bool] = lambda module: False,
) -> Iterator[tuple[str, Tensor, int]]:
    """All weights of a file, one after the other.

    Args:
        file: the opened model.
        dtype: quantised tensors are dequantised to it.
        types_of: gives, for a module's name in a Hugging Face checkpoint, the types of its matrix.
            If there are types, the module gets integers and scales in the `common_format` of these
            types. () = the module gets floats.
        keeps_blocks: whether the module of this name gets undecoded blocks instead of integers.

    Yields:
        The name in a Hugging Face checkpoint, the tensor, and its share of the stored tensor's
        bytes.
        If a module gets integers, the names of its tensors end in the keys of `in_format`.
        Blocks, and a tensor that is not quantised, may be views of the mapped file.

    Raises:
        GGUFError: a tensor has a name that is not known, or its shape contradicts the metadata.
    """
    names = TensorNames(file)
    for path in file.files:
        with _Mapped(path) as mapped:
            for tensor in file.tensors.values():
                if tensor.file != path or not names.is_used(tensor):
                    continue
                modules = names.modules(tensor)
                types = types_of(modules[0]) if tensor.type in FORMATS else ()
                if not types:
                    kind = tensor.name.rpartition(".")[2]
                    values = {kind: mapped.read(tensor, dtype)}
                elif keeps_blocks(modules[0]):
                    values = {"blocks": mapped.read_blocks(tensor)}
                else:
                    values = mapped.read_groups(tensor, common_format(types))
                num_bytes = tensor.num_bytes // len(modules) // len(values)
                for kind, value in values.items():
                    restored = names.restored(tensor, value)
                    for module, part in zip(modules, restored, strict=True):
                        full = module if module.endswith(PARAMETERS) else f"{module}.{kind}"
                        yield full, part, num_bytes
                mapped.give_back(tensor)


class _Mapped:
    """A file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as opened:
            # Copy on write, because torch does not support read-only tensors.
            self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        # If a caller still holds a view, the mapping ends with that view.
        del self._data

    def read(self, tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
        """The values, in the shape of the file."""
        if tensor.type in FLOAT_TYPES:
            return self._bytes(tensor).view(FLOAT_TYPES[tensor.type]).view(tensor.shape)
        result = torch.empty(math.prod(tensor.shape), dtype=dtype)
        parts = result.split(_CHUNK_VALUES)
        for chunk, part in zip(self._chunks(tensor), parts, strict=True):
            part.copy_(dequantize(tensor.type, chunk).view(-1))
        return result.view(tensor.shape)

    def read_groups(self, tensor: GGUFTensor, form: QuantFormat) -> Mapping[str, Tensor]:
        """The integers, scales and minimums, in the file's shape except for the last dimension."""
        shape = tensor.shape[:-1]
        if tensor.type in BLOCK_LAYOUTS:  # by a kernel, in one piece
            whole = in_format(tensor.type, self._blocks(tensor), form)
            return {kind: value.view(*shape, -1) for kind, value in whole.items()}
        found: dict[str, list[Tensor]] = {}
        for chunk in self._chunks(tensor):
            for kind, part in in_format(tensor.type, chunk, form).items():
                found.setdefault(kind, []).append(part.reshape(-1))
        return {kind: torch.cat(parts).view(*shape, -1) for kind, parts in found.items()}

    def read_blocks(self, tensor: GGUFTensor) -> Tensor:
        """The blocks, in the file's shape except for the last dimension, which has become two."""
        values, num_bytes = _block_sizes(tensor)
        *rows, columns = tensor.shape
        return self._bytes(tensor).view(*rows, columns // values, num_bytes)

    def _bytes(self, tensor: GGUFTensor) -> Tensor:
        return torch.frombuffer(
            self._data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset
        )

    def _chunks(self, tensor: GGUFTensor) -> tuple[Tensor, ...]:
        """The tensor's blocks in pieces [blocks, bytes] of at most `_CHUNK_VALUES` values."""
        return self._blocks(tensor).split(_CHUNK_VALUES // _block_sizes(tensor)[0])

    def _blocks(self, tensor: GGUFTensor) -> Tensor:
        """The tensor as [blocks, bytes]."""
        return self._bytes(tensor).view(-1, _block_sizes(tensor)[1])

    def give_back(self, tensor: GGUFTensor) -> None:
        """Drop a tensor's pages, which count as memory of this process. A view reads them again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._data.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _block_sizes(tensor: GGUFTensor) -> tuple[int, int]:
    """The values and the bytes of a block."""
    return next(sizes[1:] for sizes in TENSOR_TYPES.values() if sizes[0] == tensor.type)
