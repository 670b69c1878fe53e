"""Numbers on which Python and the C++ kernels must agree, and a check of them.

Python writes C++ structs through ctypes (cpu_graph.py) and passes enumerators as integers. Each
library exports its numbers by name (core/install.cpp). `check_abi` compares them with Python's and
with torch's dtype codes when the library is loaded.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

__all__ = ("DTYPE_CODES", "MAX_RANK", "Argument", "ArgumentKind", "SymbolicSize", "check_abi")

MAX_RANK = 5
"""The most dimensions of a tensor in a CpuGraph."""

DTYPE_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
}
"""torch's own codes of the dtypes that kernels take."""


class SymbolicSize(IntEnum):
    """Sizes of a CpuGraph's inputs that differ from step to step."""

    tokens = -1  # T
    seqs = -2  # S
    seqs_and_one = -3  # S + 1
    rows = -4  # R


class ArgumentKind(IntEnum):
    """Which field of an `Argument` holds its value."""

    none, tensor, integer, number, text = range(5)


class Argument(ctypes.Structure):
    """An argument of a call that a CpuGraph holds; core/call.h has the same struct."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("integer_value", ctypes.c_int64),  # if the argument is a tensor, its slot
        ("number_value", ctypes.c_double),
        ("text_value", ctypes.c_char_p),
    )


def check_abi(library: ctypes.CDLL, path: str) -> None:
    """Compare a library's numbers with Python's.

    Raises:
        RuntimeError: numbers differ; the text names each of them with both values.
    """
    expected, exported = _expected(), _exported(library)
    different = [
        f"{name} is {exported.get(name, 'missing')} in the library and "
        f"{expected.get(name, 'missing')} in Python"
        for name in sorted(expected.keys() | exported.keys())
        if exported.get(name) != expected.get(name)
    ]
    if different:
        raise RuntimeError(f"{path} does not fit ops/native/abi.py: {'; '.join(different)}")


def _expected() -> dict[str, int]:
    numbers = {"bytes of Argument": ctypes.sizeof(Argument), "most dimensions": MAX_RANK}
    for name, *_ in Argument._fields_:
        numbers[f"offset of Argument.{name}"] = getattr(Argument, name).offset
    for enum in (ArgumentKind, SymbolicSize):
        numbers |= {f"{enum.__name__}.{member.name}": member.value for member in enum}
    for dtype, code in DTYPE_CODES.items():
        name = str(dtype).removeprefix("torch.")
        numbers[f"dtype {name}"] = numbers[f"torch's dtype {name}"] = code
    return numbers


def _exported(library: ctypes.CDLL) -> dict[str, int]:
    library.ostinato_abi_value.restype = ctypes.c_char_p
    numbers: dict[str, int] = {}
    value = ctypes.c_int64()
    while (name := library.ostinato_abi_value(len(numbers), ctypes.byref(value))) is not None:
        numbers[name.decode()] = value.value
    return numbers
