"""Reads the metadata and the tensors' positions of GGUF files. Stated sizes are not trusted.

The format is described in llama.cpp's ggml/docs/gguf.md: a header, key-value metadata, the names,
shapes, types and offsets of the tensors, then their data. Large models are split into files
`NAME-00001-of-00003.gguf`; the first one has the metadata. Files of versions 2 and 3 are read.

Every count and length is compared with a limit or with the bytes that are left, before anything of
that size is read. Nothing in a file is executed. This module imports neither torch nor
transformers.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

from ostinato.models.gguf.gguf_paths import GGUFError, files_of_model

__all__ = (
    "TENSOR_TYPES",
    "GGUFFile",
    "GGUFTensor",
    "open_gguf",
    "read_first_keys",
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

# Files of real models have some 20 MB before the data of tensors: a vocabulary and its merges, a
# few dozen keys and a few thousand tensors. At most this many bytes are mapped, because a process
# that reads only the tokenizer can have a memory limit (runtime/forks).
_MAX_HEADER = 1 << 28
_MAX_KEYS = 65_536
_MAX_TENSORS = 1_000_000
_MAX_NAME = 65_535  # bytes of a key or of a tensor's name
_MAX_STRINGS = 1 << 24  # strings of one array
_MAX_DIMS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[str, type[np.generic]]] = {
    0: ("<B", np.uint8),
    1: ("<b", np.int8),
    2: ("<H", np.uint16),
    3: ("<h", np.int16),
    4: ("<I", np.uint32),
    5: ("<i", np.int32),
    6: ("<f", np.float32),
    7: ("<?", np.bool_),
    10: ("<Q", np.uint64),
    11: ("<q", np.int64),
    12: ("<d", np.float64),
}

TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Number in a file -> (name, values of a block, bytes of a block)."""


_Value = TypeVar("_Value", str, bool, list[str], int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where one tensor is in a file, and its type and shape."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in torch; files have the reverse order
    type: str  # a name of `TENSOR_TYPES`
    file: Path
    offset: int  # bytes from the beginning of the file
    num_bytes: int


class GGUFFile:
    """An opened model: the metadata of its first file, and the tensors of all of its files.

    Args:
        path: the model's first or only file.
        metadata: values by key; an array of numbers is a NumPy array, an array of strings is a
            list.
        tensors: the tensors by name, in the order of the files.
        files: all files of the model.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, GGUFTensor],
        files: tuple[Path, ...],
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.files = files

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture: `general.architecture`.

        Raises:
            GGUFError: the file has none.
        """
        name = self.get("general.architecture", str)
        if name is None:
            raise GGUFError(f"{self.path}: the metadata has no general.architecture")
        return name

    def get(self, key: str, kind: type[_Value]) -> _Value | None:
        """A value of the metadata; None when there is none.

        Args:
            key: its full name.
            kind: str, bool, list (of texts), int or float. With float, whole numbers are read too.

        Raises:
            GGUFError: the value is of another type, or not finite.
        """
        value: Any = self.metadata.get(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is None or _is_finite(value, kind):
            return cast("_Value | None", value)
        shown = "an array" if isinstance(value, list | np.ndarray) else repr(value)[:80]
        wanted = {str: "a text", bool: "true or false", list: "a list of texts", int: "an integer"}
        raise GGUFError(
            f"{self.path}: {key} is {shown}; it must be {wanted.get(kind, 'a finite number')}"
        )


def _is_finite(value: object, kind: type) -> bool:
    """Whether a value has this type and is not infinite or NaN. A bool is not a number here."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    return not isinstance(value, float) or math.isfinite(value)


# A start opens a model for its configuration and weights, and again for its tokenizer. To read a
# vocabulary of 150,000 tokens takes 0.1 s. So an opened file is shared until nothing refers to it.
_opened: WeakValueDictionary[tuple[Any, ...], GGUFFile] = WeakValueDictionary()


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file, or all files of a split one.

    While an earlier result exists and the files have not changed, returns that result. Callers must
    not change the result.

    Args:
        path: the file; for a split model, any of its files.

    Raises:
        GGUFError: a file is missing, cannot be read, or is not a valid GGUF file.
    """
    files = files_of_model(path)
    key = tuple((file, *_version_of(file)) for file in files)
    found = _opened.get(key)
    if found is None:
        found = _opened[key] = _read(files)
    return found


def read_first_keys(path: Path) -> dict[str, Any]:
    """The metadata before the first array of texts, in a fraction of the time of `open_gguf`.

    Converters write the keys of the architecture before the vocabulary, which is such an array.

    Args:
        path: a file; of a split model, the first one.

    Raises:
        GGUFError: the file cannot be read, or the part that is read is not valid.
    """
    return _Header(path, stops_at_texts=True).metadata


def _version_of(file: Path) -> tuple[int, ...]:
    """Numbers that change with a file's contents; () if the file cannot be read."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(files: tuple[Path, ...]) -> GGUFFile:
    first = files[0]
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for number, file in enumerate(files):
        header = _Header(file)
        if number == 0:
            metadata = header.metadata
        _check_split(file, header.metadata, number, len(files))
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise GGUFError(f"{file}: the tensor {tensor.name!r} is stored twice")
            tensors[tensor.name] = tensor
    expected = metadata.get("split.tensors.count")
    if len(files) > 1 and expected is not None and expected != len(tensors):
        raise GGUFError(
            f"{first}: split.tensors.count is {expected}, but its {len(files)} files have "
            f"{len(tensors)} tensors"
        )
    return GGUFFile(first, metadata, tensors, files)


def _check_split(file: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    stated_number = metadata.get("split.no", number)
    stated_count = metadata.get("split.count", count) or 1
    if stated_number != number or stated_count != count:
        raise GGUFError(
            f"{file}: its metadata says that it is file {stated_number} of {stated_count}, its "
            f"name that it is file {number} of {count} (both counted from 0); a split model has "
            "files named NAME-00001-of-0000N.gguf"
        )


class _Header:
    """The metadata and the tensors of one file.

    Args:
        file: its path.
        stops_at_texts: read no array of texts and nothing after the first one, also no tensors.

    Raises:
        GGUFError: the file cannot be read, or is not a valid GGUF file.
    """

    def __init__(self, file: Path, *, stops_at_texts: bool = False) -> None:
        self._file = file
        try:
            with file.open("rb") as opened:
                magic = opened.read(4)
                if magic != _MAGIC:
                    raise self._error(f"it begins with {magic!r}, not with {_MAGIC!r}", "not GGUF")
                self._size = os.fstat(opened.fileno()).st_size
                mapped = min(self._size, _MAX_HEADER)
                self._data = mmap.mmap(opened.fileno(), mapped, access=mmap.ACCESS_READ)
        except OSError as error:
            reason = "it is a directory" if error.errno == errno.EISDIR else error.strerror
            raise GGUFError(f"{file} cannot be read: {reason}") from error
        self._place = 4
        with self._data:
            self._check_version()
            num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
            self.metadata = self._read_metadata(num_keys, stops_at_texts)
            self.tensors = [] if stops_at_texts else list(self._read_tensors(num_tensors))

    def _error(self, what: str, kind: str = "broken") -> GGUFError:
        prefix = "is not a GGUF file" if kind == "not GGUF" else "is broken or cut short"
        return GGUFError(f"{self._file} {prefix}: {what}")

    def _available(self) -> str:
        if self._size > len(self._data):
            return f"only {len(self._data)} bytes are read before the data of tensors"
        return f"the file has {self._size}"

    def _check_version(self) -> None:
        version = self._scalar("<I")
        if version & 0xFFFF == 0 and version:
            raise GGUFError(f"{self._file} is big-endian; only little-endian GGUF files are read")
        if version not in _VERSIONS:
            raise GGUFError(f"{self._file} is of GGUF version {version}; convert it to version 3")

    def _take(self, size: int, what: str) -> int:
        """Skip the next `size` bytes; returns where they begin."""
        place = self._place
        if size > len(self._data) - place:
            raise self._error(f"{what} needs {size} bytes at {place}, and {self._available()}")
        self._place = place + size
        return place

    def _scalar(self, form: str) -> Any:
        place = self._take(struct.calcsize(form), "a number")
        return struct.unpack_from(form, self._data, place)[0]

    def _next_scalar(self, form: str) -> Any:
        """The next number, which stays the next one."""
        value = self._scalar(form)
        self._place -= struct.calcsize(form)
        return value

    def _string(self, limit: int | None = None) -> str:
        length = self._scalar("<Q")
        if limit is not None and length > limit:
            raise self._error(f"a name of {length} bytes; at most {limit} are allowed")
        place = self._take(length, "a string")
        try:
            return self._data[place : place + length].decode()
        except UnicodeDecodeError as error:
            raise self._error(f"the string at {place} is not UTF-8") from error

    def _strings(self, count: int) -> list[str]:
        """The strings of an array. A vocabulary has some hundred thousand: this must be fast."""
        data, place, size = self._data, self._place, len(self._data)
        length_at = struct.Struct("<Q").unpack_from
        found: list[bytes] = []
        for _ in range(count):
            end = place + 8
            if end <= size:
                end += length_at(data, place)[0]
            if end > size:
                raise self._error(f"the string at {place} ends at {end}, and {self._available()}")
            found.append(data[place + 8 : end])
            place = end
        self._place = place
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError as error:
            raise self._error(f"an array before {place} has a string that is not UTF-8") from error

    def _read_metadata(self, count: int, stops_at_texts: bool) -> dict[str, Any]:
        if count > _MAX_KEYS:
            raise self._error(f"it states {count} keys of metadata; at most {_MAX_KEYS} are read")
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string(_MAX_NAME)
            if key in metadata:
                raise self._error(f"the key {key!r} is there twice")
            kind = self._scalar("<I")
            if stops_at_texts and kind == _ARRAY and self._next_scalar("<I") == _STRING:
                break
            metadata[key] = self._value(key, kind)
        return metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"the key {key!r} is of the unknown type {kind}")
        return self._scalar(_SCALARS[kind][0])

    def _array(self, key: str) -> Any:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            if count > min(_MAX_STRINGS, (len(self._data) - self._place) // 8):
                raise self._error(f"the key {key!r} states {count} strings, too many for it")
            return self._strings(count)
        if kind not in _SCALARS:
            raise self._error(f"the key {key!r} is an array of the type {kind}, which is not read")
        dtype = np.dtype(_SCALARS[kind][1]).newbyteorder("<")
        place = self._take(count * dtype.itemsize, f"the key {key!r}")
        return np.frombuffer(self._data[place : self._place], dtype)

    def _read_tensors(self, count: int) -> Iterator[GGUFTensor]:
        if count > _MAX_TENSORS:
            raise self._error(f"it states {count} tensors; at most {_MAX_TENSORS} are read")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not (
            8 <= alignment <= 1 << 20 and alignment.bit_count() == 1
        ):
            raise self._error(f"general.alignment={alignment!r} is not a power of two, 8 to 2**20")
        stated = [self._tensor_info() for _ in range(count)]
        begin = -(-self._place // alignment) * alignment
        for name, shape, number, offset in stated:
            if number not in TENSOR_TYPES:
                raise GGUFError(
                    f"{self._file}: the tensor {name!r} is of the unknown type {number}; known: "
                    f"{', '.join(known for known, _, _ in TENSOR_TYPES.values())}"
                )
            type_name, block_values, block_bytes = TENSOR_TYPES[number]
            if shape[-1] % block_values:
                raise self._error(
                    f"rows of the tensor {name!r} have {shape[-1]} values, which is not a multiple "
                    f"of {block_values}, the size of a block of {type_name}"
                )
            num_bytes = math.prod(shape) // block_values * block_bytes
            if offset % alignment or begin + offset + num_bytes > self._size:
                raise self._error(
                    f"{name!r} begins at {begin + offset} and has {num_bytes} bytes; a tensor must "
                    f"begin at a multiple of {alignment} and end in the file ({self._size} bytes)"
                )
            yield GGUFTensor(
                name=name,
                shape=shape,
                type=type_name,
                file=self._file,
                offset=begin + offset,
                num_bytes=num_bytes,
            )

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(_MAX_NAME)
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"the tensor {name!r} has {num_dims} dimensions; 1 to 4 are read")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(num_dims)]))
        if 0 in shape or math.prod(shape) >= 1 << 62:
            raise self._error(f"the tensor {name!r} has the shape {list(shape)}: not valid")
        return name, shape, self._scalar("<I"), self._scalar("<Q")
