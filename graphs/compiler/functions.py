"""Compiled functions: made from a trace by lowering or by Inductor, and kept for the next start.

A traced graph that calls our own ops is lowered to an FX program; torch ops between them are
compiled. Such graphs are the layers on a CPU, and on a GPU the layers for few rows. Any other graph
goes to Inductor as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from ostinato.graphs.compiler.call_trace import trace_calls
from ostinato.graphs.compiler.compiled_piece import PieceCompiler
from ostinato.graphs.compiler.dynamo_trace import Example, mark_varying, trace_fx
from ostinato.graphs.compiler.fx_program import FxFunction, FxProgram

__all__ = (
    "Function",
    "ProgramStore",
    "compile_function",
    "is_portable",
    "stored_function",
)

Function = Callable[..., Any]

_LOG = logging.getLogger(__name__)

_INDUCTOR_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    # These checks would run in every call of every layer. The static buffers make them needless.
    "size_asserts": False,
    # Read the number of threads at every loop, so that graphs/threads.py can change it.
    "cpp.dynamic_threads": True,
    # Trust the processor's flags: compiling and running a probe for each instruction set takes
    # ten seconds of a first start.
    "cpp.vec_isa_ok": True,
    # Guards are never evaluated, and those on a traced model's functions cannot be stored.
    "guard_filter_fn": lambda guards: [False for _ in guards],
}

# The first byte of a stored function.
_FX, _INDUCTOR = b"f", b"i"
_SKELETON = "skeleton"  # the name under which a stored function refers to the traced module


class ProgramStore(Protocol):
    """Keeps compiled functions from one start to the next (graphs/bundle.py)."""

    def get(self, name: str) -> bytes | None:
        """The data that was put under this name, or None."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep `data` for the next start."""
        ...

    def reject(self, reason: str) -> None:
        """Discard everything that is stored."""
        ...


def compile_function(
    function: Function,
    examples: Sequence[Example],
    store: ProgramStore | None,
    name: str,
    skeleton: nn.Module,
    pieces: PieceCompiler,
    *,
    calls_own_ops: bool = False,
) -> Function:
    """Compile `function` for the shapes of its arguments.

    Args:
        function: takes positional arguments and returns one tensor. The first argument is the list
            of parameters. The function runs on their device.
        examples: two, as `trace_calls` and `trace_fx` take them. Dynamo traces with the first.
        store: keeps the result; None = it is not kept.
        name: the name of the result in the store.
        skeleton: the module that `function` calls; the store does not keep it.
        pieces: compiles torch ops between our ops.
        calls_own_ops: whether the function is lowered on any device, not only on a CPU.

    Returns:
        A function that runs without Dynamo's guards.

    Raises:
        SizeGuardError: the function would be wrong for steps of other sizes. This is not noticed
            on a GPU if `calls_own_ops` is false.
    """
    example = examples[0]
    on_cpu = example.arguments[0][0].device.type == "cpu"
    program = None
    # A layer for few rows on a GPU could be recorded too. But Dynamo traces the layer of larger
    # steps there, so recording would not save Dynamo's import.
    if on_cpu:
        program, reason = trace_calls(function, examples, pieces)
        if program is None:
            _LOG.info("Dynamo traces %s, because its calls cannot be recorded: %s", name, reason)
    if program is None and (on_cpu or calls_own_ops):
        program, reason = trace_fx(function, examples, pieces)
        if program is None:
            _LOG.info("Inductor compiles %s as a whole: %s", name, reason)
    if program is not None:
        if store is not None:
            store.put(name, _FX + msgspec.msgpack.encode(program))
        return FxFunction(program)
    mark_varying(example)
    # Without this setting torch 2.11 makes functions without `aot_compile`; 2.13 sets it itself.
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled: Any = torch.compile(  # `aot_compile` is not in its declared type
            function, fullgraph=True, dynamic=False, options=_INDUCTOR_OPTIONS
        )
    result = compiled.aot_compile((example.arguments, {}))
    if store is not None:
        try:
            data = type(result).serialize(result, {_SKELETON: skeleton}).serialized_data
            store.put(name, _INDUCTOR + data)
        except Exception as error:  # torch documents no type, and the engine runs without a store
            _LOG.warning("%s is not kept for the next start: %s", name, error)
    return result.fn


def is_portable(data: bytes) -> bool:
    """Whether data of a store is a program that any machine can load: text without libraries."""
    kind, content = data[:1], data[1:]
    return kind == _FX and not msgspec.msgpack.decode(content, type=FxProgram).pieces


def stored_function(store: ProgramStore | None, name: str, skeleton: nn.Module) -> Function | None:
    """The function that `compile_function` stored under this name.

    It is None if there is no store, the name is not in it, or its data does not load. A store whose
    content does not load is rejected as a whole.
    """
    data = store.get(name) if store is not None else None
    if store is None or data is None:
        return None
    try:
        return _load(data, skeleton)
    except Exception as error:  # damaged data can raise anything; the function is compiled anew
        store.reject(f"{name} does not load: {type(error).__name__}: {error}")
        return None


def _load(data: bytes, skeleton: nn.Module) -> Function:
    kind, content = data[:1], data[1:]
    if kind == _FX:
        return FxFunction(msgspec.msgpack.decode(content, type=FxProgram))
    if kind != _INDUCTOR:
        raise ValueError(f"a program begins with {_FX!r} or {_INDUCTOR!r}, not {kind!r}")
    from torch._dynamo.aot_compile import AOTCompiledFunction

    return AOTCompiledFunction.deserialize(content, external_closure_data={_SKELETON: skeleton}).fn
