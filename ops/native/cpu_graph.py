"""A recorded list of kernel calls that C++ replays without Python and the dispatcher.

`CpuGraph` wraps core/cpu_graph.h. It does for a CPU what a CUDA graph does for a GPU. Unlike a CUDA
graph, it can have inputs with symbolic sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from ostinato.ops.native.abi import DTYPE_CODES, MAX_RANK, Argument, ArgumentKind
from ostinato.ops.native.library import core_library, kernel_address

__all__ = ("CompiledLibrary", "CpuGraph", "Slot", "why_not_callable", "why_not_constant")

Slot = int
"""The number of a tensor of a graph: of an input, a constant, or a result of a call."""

# Arguments: graph, T, S, R, whether a profiler is on, addresses of inputs, address of output.
_REPLAY_ARGUMENTS = (
    ctypes.c_void_p,
    *(3 * (ctypes.c_int64,)),
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
_ARGUMENT_TYPES = ("Tensor", "Optional[Tensor]", "float", "str", "int", "bool", "number")


class CompiledLibrary(Protocol):
    """A loaded library that AOTInductor compiled, without weights."""

    @property
    def name(self) -> str:
        """The name that torch's profiler shows."""
        ...

    @property
    def entry(self) -> int:
        """Address of AOTInductorModelContainerRunSingleThreaded."""
        ...

    @property
    def container(self) -> ctypes.c_void_p:
        """The first argument of `entry`."""
        ...

    @property
    def num_outputs(self) -> int: ...


def why_not_constant(tensor: Tensor) -> str | None:
    """Why a graph cannot hold this tensor, or None when it can."""
    if tensor.dim() > MAX_RANK or tensor.dtype not in DTYPE_CODES or tensor.device.type != "cpu":
        return f"a CPU graph holds no {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    return None


def why_not_callable(op: torch._ops.OpOverload) -> str | None:
    """Why a graph cannot hold a call of this op, or None when it can."""
    name = op._schema.name
    if not name.startswith("ostinato::"):
        return f"{name} is not an op of this package"
    if kernel_address(name.removeprefix("ostinato::")) is None:
        return f"no loaded library has a kernel of {name}"
    for argument in op._schema.arguments:
        if str(argument.type) not in _ARGUMENT_TYPES:
            return f"{name} has an argument of type {argument.type}"
    return None


class CpuGraph:
    """Records calls once, and replays them with other inputs. One thread at a time may use it."""

    def __init__(self) -> None:
        self._library = core_library()
        for name in ("constant", "input", "call", "compiled", "view", "slice", "index_select"):
            getattr(self._library, f"ostinato_graph_{name}").restype = ctypes.c_int64
        self._library.ostinato_graph_new.restype = ctypes.c_void_p
        self._replay = self._library.ostinato_graph_replay
        self._replay.restype = ctypes.c_char_p
        self._replay.argtypes = _REPLAY_ARGUMENTS
        self._graph = ctypes.c_void_p(self._library.ostinato_graph_new())
        # Kept alive, because the graph holds addresses in them.
        self._constants: dict[int, tuple[Slot, Tensor]] = {}
        self._libraries: list[CompiledLibrary] = []

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            self._library.ostinato_graph_delete(self._graph)

    def constant(self, tensor: Tensor) -> Slot:
        """A tensor with a fixed address. Each replay reads its present contents.

        Raises:
            ValueError: `why_not_constant(tensor)`.
        """
        if id(tensor) not in self._constants:
            if (reason := why_not_constant(tensor)) is not None:
                raise ValueError(reason)
            rank = tensor.dim()
            slot = self._library.ostinato_graph_constant(
                self._graph,
                ctypes.c_void_p(tensor.data_ptr()),
                DTYPE_CODES[tensor.dtype],
                ctypes.c_int64(rank),
                (ctypes.c_int64 * rank)(*tensor.shape),
                (ctypes.c_int64 * rank)(*tensor.stride()),
            )
            self._constants[id(tensor)] = slot, tensor
        return self._constants[id(tensor)][0]

    def input(self, dtype: torch.dtype, sizes: Sequence[int]) -> Slot:
        """The next input of `replay`, contiguous. A size may be a SymbolicSize."""
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        return self._library.ostinato_graph_input(
            self._graph, DTYPE_CODES[dtype], ctypes.c_int64(len(sizes)), shape
        )

    def call(self, op: torch._ops.OpOverload, arguments: Sequence[object]) -> list[Slot]:
        """Record a call of an op with a C++ kernel; returns the slots of its results.

        The arguments are in the schema's order. Tensors among them are given as slots.

        Raises:
            ValueError: `why_not_callable(op)`.
        """
        if (reason := why_not_callable(op)) is not None:
            raise ValueError(reason)
        name, schema = op._schema.name, op._schema.arguments
        values = [*arguments, *(argument.default_value for argument in schema[len(arguments) :])]
        encoded = [
            _encode(str(argument.type), value)
            for argument, value in zip(schema, values, strict=True)
        ]
        num_results = len(op._schema.returns)
        first = self._library.ostinato_graph_call(
            self._graph,
            ctypes.c_void_p(kernel_address(name.removeprefix("ostinato::"))),
            name.encode(),
            (Argument * len(encoded))(*encoded),
            ctypes.c_int64(len(encoded)),
            ctypes.c_int64(num_results),
        )
        return list(range(first, first + num_results))

    def call_compiled(self, library: CompiledLibrary, inputs: Sequence[Slot]) -> list[Slot]:
        """Record a call of a compiled library; returns the slots of its outputs."""
        self._libraries.append(library)
        first = self._library.ostinato_graph_compiled(
            self._graph,
            ctypes.c_void_p(library.entry),
            library.container,
            library.name.encode(),
            (ctypes.c_int64 * len(inputs))(*inputs),
            ctypes.c_int64(len(inputs)),
            ctypes.c_int64(library.num_outputs),
        )
        return list(range(first, first + library.num_outputs))

    def view(self, source: Slot, sizes: Sequence[int]) -> Slot:
        """The tensor with other sizes, one of which may be -1. Rows of `source` are contiguous."""
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        return self._library.ostinato_graph_view(
            self._graph, ctypes.c_int64(source), shape, ctypes.c_int64(len(sizes))
        )

    def slice(self, source: Slot, first: int, length: int) -> Slot:
        """`source[:, first : first + length]`, not copied."""
        return self._library.ostinato_graph_slice(
            self._graph, ctypes.c_int64(source), ctypes.c_int64(first), ctypes.c_int64(length)
        )

    def index_select(self, matrix: Slot, row_numbers: Slot) -> Slot:
        """`matrix[row_numbers]`, row numbers int64."""
        return self._library.ostinato_graph_index_select(
            self._graph, ctypes.c_int64(matrix), ctypes.c_int64(row_numbers)
        )

    def begin_layer(self) -> None:
        """Begin layer n. Its results may overwrite those of the layers before n - 1."""
        self._library.ostinato_graph_begin_layer(self._graph)

    def set_result(self, result: Slot) -> None:
        """Choose the tensor that `replay` copies to `out`."""
        self._library.ostinato_graph_result(self._graph, ctypes.c_int64(result))

    def replay(
        self,
        num_tokens: int,
        num_seqs: int,
        num_rows: int,
        addresses: ctypes.Array[ctypes.c_void_p],
        out: Tensor,
    ) -> None:
        """Run all calls and copy the result to `out`. Releases the interpreter lock.

        While torch's profiler is on in this thread, it sees each kernel under its op's name.

        Args:
            num_tokens: T.
            num_seqs: S.
            num_rows: R.
            addresses: where the inputs are, in the order of `input`. The inputs are contiguous and
                have the announced sizes.
            out: contiguous, of the result's shape.

        Raises:
            ValueError: a call failed, for instance because a kernel refused its arguments.
        """
        failure = self._replay(
            self._graph,
            num_tokens,
            num_seqs,
            num_rows,
            _profiler_enabled(),
            addresses,
            out.data_ptr(),
        )
        if failure is not None:
            raise ValueError(failure.decode())


def _encode(kind: str, value: object) -> Argument:
    if value is None:
        return Argument(ArgumentKind.none)
    if kind in ("Tensor", "Optional[Tensor]"):
        return Argument(ArgumentKind.tensor, value)
    if kind == "float":
        return Argument(ArgumentKind.number, 0, value)
    if kind == "str":
        return Argument(ArgumentKind.text, 0, 0.0, str(value).encode())
    return Argument(ArgumentKind.integer, int(value))  # type: ignore[call-overload]
