"""A list of kernel calls that C++ walks through (tape.cpp), without Python and the dispatcher."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ostinato.ops.native.library import core_library, kernel_address

__all__ = ("FreeSize", "Slot", "Tape")

Slot = int
"""A tensor of a tape: an input, a constant, or the result of a call."""

_MAX_RANK = 4
_DTYPES = {  # as torch numbers them
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
}


class FreeSize(IntEnum):
    """Sizes of inputs that each step decides."""

    tokens = -1
    seqs = -2
    seqs_and_one = -3
    rows = -4


class _Kind(IntEnum):
    none, tensor, integer, number, text = range(5)


class _Argument(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("whole", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("characters", ctypes.c_char_p),
    )


class Tape:
    """Calls are recorded once, then played with other inputs. For one thread at a time."""

    def __init__(self) -> None:
        self._library = core_library()
        for name in ("new", "constant", "input", "call", "view", "part", "gather"):
            getattr(self._library, f"ostinato_tape_{name}").restype = ctypes.c_int64
        self._play = self._library.ostinato_tape_play
        self._play.restype = ctypes.c_char_p
        self._tape = ctypes.c_void_p(self._library.ostinato_tape_new())
        self._constants: dict[int, tuple[Slot, Tensor]] = {}  # kept alive: the tape has addresses

    def __del__(self) -> None:
        if hasattr(self, "_tape"):
            self._library.ostinato_tape_delete(self._tape)

    def constant(self, tensor: Tensor) -> Slot:
        """A tensor that stays where it is; its contents are read anew at each play."""
        if id(tensor) not in self._constants:
            rank = _checked_rank(tensor)
            slot = self._library.ostinato_tape_constant(
                self._tape,
                ctypes.c_void_p(tensor.data_ptr()),
                _DTYPES[tensor.dtype],
                ctypes.c_int64(rank),
                (ctypes.c_int64 * rank)(*tensor.shape),
                (ctypes.c_int64 * rank)(*tensor.stride()),
            )
            self._constants[id(tensor)] = slot, tensor
        return self._constants[id(tensor)][0]

    def input(self, dtype: torch.dtype, sizes: Sequence[int]) -> Slot:
        """The next input of `play`, contiguous; a size may be a FreeSize."""
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        return self._library.ostinato_tape_input(
            self._tape, _DTYPES[dtype], ctypes.c_int64(len(sizes)), shape
        )

    def call(self, op: torch._ops.OpOverload, arguments: Sequence[object]) -> Slot:
        """Call an op with a C++ kernel; tensors are slots, in the schema's order.

        Raises:
            KeyError: no loaded library has a kernel for it.
        """
        schema = op._schema.arguments
        values = [*arguments, *(argument.default_value for argument in schema[len(arguments) :])]
        encoded = [
            _encode(str(argument.type), value)
            for argument, value in zip(schema, values, strict=True)
        ]
        return self._library.ostinato_tape_call(
            self._tape,
            ctypes.c_void_p(kernel_address(op._schema.name.removeprefix("ostinato::"))),
            (_Argument * len(encoded))(*encoded),
            ctypes.c_int64(len(encoded)),
        )

    def view(self, source: Slot, sizes: Sequence[int]) -> Slot:
        """A contiguous tensor with other sizes, one of which may be -1."""
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        return self._library.ostinato_tape_view(
            self._tape, ctypes.c_int64(source), shape, ctypes.c_int64(len(sizes))
        )

    def part(self, source: Slot, first: int, length: int) -> Slot:
        """`source[:, first : first + length]`, not copied."""
        return self._library.ostinato_tape_part(
            self._tape, ctypes.c_int64(source), ctypes.c_int64(first), ctypes.c_int64(length)
        )

    def gather(self, rows: Slot, matrix: Slot) -> Slot:
        """`matrix[rows]`, rows int64."""
        return self._library.ostinato_tape_gather(
            self._tape, ctypes.c_int64(rows), ctypes.c_int64(matrix)
        )

    def begin_layer(self) -> None:
        """Results from before the layer that ends here may be overwritten."""
        self._library.ostinato_tape_begin_layer(self._tape)

    def finish(self, result: Slot) -> None:
        """What `play` gives."""
        self._library.ostinato_tape_result(self._tape, ctypes.c_int64(result))

    def play(
        self, num_tokens: int, num_seqs: int, num_rows: int, inputs: Sequence[Tensor], out: Tensor
    ) -> None:
        """Run all calls and copy the result to `out`. Releases the interpreter lock.

        Args:
            num_tokens: T.
            num_seqs: S.
            num_rows: R.
            inputs: in the order of `input`, contiguous, of the sizes that were announced.
            out: contiguous, of the result's shape.

        Raises:
            ValueError: a kernel refused its arguments.
        """
        addresses = (ctypes.c_void_p * len(inputs))(*[tensor.data_ptr() for tensor in inputs])
        failure = self._play(
            self._tape,
            ctypes.c_int64(num_tokens),
            ctypes.c_int64(num_seqs),
            ctypes.c_int64(num_rows),
            addresses,
            ctypes.c_void_p(out.data_ptr()),
        )
        if failure is not None:
            raise ValueError(failure.decode())


def _checked_rank(tensor: Tensor) -> int:
    rank = tensor.dim()
    if rank > _MAX_RANK or tensor.dtype not in _DTYPES or tensor.device.type != "cpu":
        raise KeyError(f"a tape holds no {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}")
    return rank


def _encode(kind: str, value: object) -> _Argument:
    if value is None:
        return _Argument(_Kind.none)
    if kind in ("Tensor", "Optional[Tensor]"):
        return _Argument(_Kind.tensor, value)
    if kind == "float":
        return _Argument(_Kind.number, 0, value)
    if kind == "str":
        return _Argument(_Kind.text, 0, 0.0, str(value).encode())
    if kind in ("int", "bool", "number"):
        return _Argument(_Kind.integer, int(value))  # type: ignore[call-overload]
    raise KeyError(f"a tape has no arguments of type {kind}")
