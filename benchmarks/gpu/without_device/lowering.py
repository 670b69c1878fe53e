"""Lowers a program with Inductor; lists its launches in order with their bytes, and its kernels.

Sizes stay symbols. So a program is lowered once, as in the engine, and can be counted for any step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sympy
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from ostinato.benchmarks.gpu.without_device.fake_device import replaced

__all__ = ("By", "Launch", "Lowered", "lowered_graphs", "own_launch")

# Words in the body of a wrapper that make the host wait for the device.
_WAITS = re.compile(r"\.item\(|\.tolist\(|\.cpu\(|synchronize\(|_local_scalar_dense|\.nonzero\(")
_COPIES = re.compile(r"\.copy_\(|\.clone\(|\.contiguous\(")
_MATRIX_PRODUCT = re.compile(r"extern_kernels\.(?:mm|addmm|bmm|baddbmm|_scaled_mm)\(")
_OWN_OP = re.compile(r"torch\.ops\.ostinato\.(\w+)\.default\(")
_OTHER_CALL = re.compile(r"(?:extern_kernels\.|torch\.ops\.)[\w.]+\(")
_TRITON_CALL = re.compile(r"^\s*(triton_\w+)\.run\(")


class By(StrEnum):
    """Whose code a launch runs."""

    inductor = "Inductor"
    cublas = "cuBLAS"
    own = "ours"
    torch = "torch"  # any other kernel of torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A call in a lowered program."""

    by: By
    name: str
    # Read and written, each element once. An op of this project has 0 bytes in a lowered program;
    # steps.py counts the launches of its kernels instead.
    num_bytes: sympy.Expr
    input_bytes: sympy.Expr  # the part that is read
    num_flop: sympy.Expr  # floating point operations of matrix products


def own_launch(name: str, read: int, written: int, flop: int) -> Launch:
    """A launch of one of this project's kernels in a step whose sizes are given."""
    return Launch(
        by=By.own,
        name=name,
        num_bytes=sympy.Integer(read + written),
        input_bytes=sympy.Integer(read),
        num_flop=sympy.Integer(flop),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A program as Inductor would run it."""

    launches: tuple[Launch, ...]
    waits: tuple[str, ...]  # lines at which the host would wait for the device
    copies: tuple[str, ...]  # lines at which torch would copy a whole tensor
    sources: Mapping[str, str]  # the source of each Triton kernel, by name
    hints: Mapping[sympy.Symbol, int]  # the value of each size in the example
    wrapper: str  # Inductor's Python code that makes the launches


@contextmanager
def lowered_graphs() -> Iterator[list[Lowered]]:
    """Inside, every lowered program is appended to the list. Kernels are not compiled."""
    found: list[Lowered] = []
    sources: dict[str, str] = {}
    codegen: Callable[..., Any] = GraphLowering.codegen

    def record(graph: GraphLowering) -> Any:
        code = codegen(graph)
        found.append(_read(graph, code[0].value, sources))
        return code

    def keep_source(_: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> object:
        sources[name] = source
        return None

    with replaced(GraphLowering, codegen=record), replaced(AsyncCompile, triton=keep_source):
        yield found


def _read(graph: GraphLowering, wrapper: str, sources: dict[str, str]) -> Lowered:
    calls = list(_calls(wrapper))
    nodes = [node for node in graph.scheduler.nodes if _launches(node)]
    if len(calls) != len(nodes):
        raise RuntimeError(
            f"the program has {len(nodes)} scheduled nodes and {len(calls)} calls: "
            f"{[str(node) for node in nodes]} {calls}"
        )
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", wrapper, re.S):
        sources[name] = source
    launches = []
    with V.set_graph_handler(graph):
        for (by, name), node in zip(calls, nodes, strict=True):
            reads, writes = _bytes_of(graph, node)
            if by is By.own:
                reads = writes = sympy.S.Zero
            flop = _flop(node) if by is By.cublas else sympy.S.Zero
            launches.append(
                Launch(
                    by=by,
                    name=name,
                    num_bytes=sympy.expand(reads + writes),
                    input_bytes=sympy.expand(reads),
                    num_flop=flop,
                )
            )
    body = wrapper[wrapper.rindex("def call(") :]
    return Lowered(
        launches=tuple(launches),
        waits=tuple(line.strip() for line in body.splitlines() if _WAITS.search(line)),
        copies=tuple(line.strip() for line in body.splitlines() if _COPIES.search(line)),
        sources={name: sources[name] for by, name in calls if by is By.inductor},
        hints={symbol: int(n) for symbol, n in graph.sizevars.backed_var_to_val.items()},
        wrapper=wrapper,
    )


def _calls(wrapper: str) -> Iterator[tuple[By, str]]:
    """The calls of a wrapper that launch something, in order."""
    for line in wrapper[wrapper.rindex("def call(") :].splitlines():
        if match := _TRITON_CALL.match(line):
            yield By.inductor, match[1]
        elif match := _MATRIX_PRODUCT.search(line):
            yield By.cublas, match[0].removeprefix("extern_kernels.").rstrip("(")
        elif match := _OWN_OP.search(line):
            yield By.own, match[1]
        elif match := _OTHER_CALL.search(line):
            yield By.torch, match[0].rstrip("(")


def _launches(node: Any) -> bool:
    """Whether a scheduled node is a call. Views of an op's results are not calls."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import NopKernelSchedulerNode

    return not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, MultiOutput)


def _bytes_of(graph: GraphLowering, node: Any) -> tuple[sympy.Expr, sympy.Expr]:
    """Bytes that a node reads and writes in global memory, each element once.

    Buffers that live within a fused node are not counted. If the device computes the indices at
    which a table is read, only the rows that are read count.
    """
    inner = {
        name
        for name in node.get_buffer_names()
        if {user.node for user in graph.scheduler.name_to_buf[name].users} <= set(node.get_nodes())
        and name not in graph.get_output_names()
    }
    totals = []
    for dependencies in (node.read_writes.reads, node.read_writes.writes):
        by_name: dict[str, list[sympy.Expr]] = {}
        for dependency in dependencies:
            if dependency.name not in inner:
                by_name.setdefault(dependency.name, []).append(_elements(dependency))
        total = sympy.S.Zero
        for name, counts in by_name.items():
            size, itemsize = _buffer(graph, name)
            count = sum(counts, sympy.S.Zero)
            # If a kernel reads a whole buffer in several places, the buffer counts once.
            excess = sympy.expand(count - size).subs(list(graph.sizevars.backed_var_to_val.items()))
            total += (size if excess > 0 else count) * itemsize
        totals.append(total)
    return totals[0], totals[1]


def _elements(dependency: Any) -> sympy.Expr:
    """Elements of a buffer that a dependency touches."""
    from torch._inductor.dependencies import MemoryDep, WeakDep

    if isinstance(dependency, WeakDep):
        return sympy.S.Zero
    if isinstance(dependency, MemoryDep) and dependency.is_indirect():
        return sympy.Mul(*dependency.size)
    return dependency.get_numel()


def _buffer(graph: GraphLowering, name: str) -> tuple[sympy.Expr, int]:
    """Elements of a buffer, and the bytes of one element."""
    try:
        return sympy.sympify(graph.get_numel(name)), torch.empty(
            (), dtype=graph.get_dtype(name)
        ).element_size()
    except (KeyError, NotImplementedError, AttributeError):
        return sympy.S.Zero, 0  # it only marks that another buffer is changed


def _flop(node: Any) -> sympy.Expr:
    """Multiplications and additions of a matrix product [M, K] x [K, N]."""
    left, right = node.node.inputs[-2:]
    (rows, inner), (_, columns) = left.get_size(), right.get_size()
    return sympy.expand(2 * rows * inner * columns)
