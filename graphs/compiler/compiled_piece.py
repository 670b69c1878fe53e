"""Compiles the torch ops between this package's ops into a library that C++ can call (AOTInductor).

A decoder layer may hold other torch ops too: a scale, a soft cap, a multiplier on the residual.
Each sequence of them becomes one library with a C entry point, which a program calls from Python
and a CpuGraph from C++. The library is one self-contained file, so a bundle can hold it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._aoti import AOTIModelContainerRunnerCpu
from torch.fx import GraphModule, Node

from ostinato.conf.environment import cache_dir

__all__ = ("CompiledPiece", "PieceCompiler")

_OPTIONS: dict[str, Any] = {
    # Read the number of threads at every loop, so that graphs/threads.py can change it.
    "cpp.dynamic_threads": True,
    # Trust the processor's flags: probes of the instruction sets take ten seconds.
    "cpp.vec_isa_ok": True,
    # Round where the torch ops round, so that the results are the eager model's.
    "emulate_precision_casts": True,
}
_MOST_TOKENS = 1 << 20  # the largest step that a library is compiled for

_LOG = logging.getLogger(__name__)


class CompiledPiece:
    """A loaded library. Takes and returns tensors; keeps no state."""

    def __init__(self, data: bytes, name: str) -> None:
        """
        Args:
            data: the library file, from `PieceCompiler`.
            name: what torch's profiler shows.

        Raises:
            RuntimeError: the library does not load.
        """
        self.name = name
        # In the cache directory, because container engines can mount /tmp without execution.
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix="piece-", suffix=".so", dir=folder) as file:
            file.write(data)
            file.flush()
            # The path is opened twice but mapped once. The mapping stays when the file is removed.
            self._runner = AOTIModelContainerRunnerCpu(file.name, 1)
            self._library = ctypes.CDLL(file.name)
        self.container = ctypes.c_void_p()
        code = self._library.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(self.container), ctypes.c_size_t(1), b"cpu", None
        )
        if code != 0:
            raise RuntimeError(f"{name} does not load: AOTInductor's error {code}")

        count = ctypes.c_size_t()
        self._library.AOTInductorModelContainerGetNumOutputs(self.container, ctypes.byref(count))
        self.num_outputs = count.value

    @property
    def entry(self) -> int:
        """Address of AOTInductorModelContainerRunSingleThreaded."""
        function = self._library.AOTInductorModelContainerRunSingleThreaded
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """The piece's results."""
        return self._runner.run(list(arguments))

    def __del__(self) -> None:
        if getattr(self, "container", None):
            self._library.AOTInductorModelContainerDelete(self.container)


class PieceCompiler:
    """Compiles the pieces of a model's layers; equal pieces of several layers are one library."""

    def __init__(self) -> None:
        self._libraries: dict[str, bytes] = {}

    def compile(
        self, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]
    ) -> bytes:
        """The library file of some nodes of a graph that Dynamo traced.

        Args:
            nodes: torch ops and views, in order.
            inputs: the tensors that they read from outside.
            outputs: those of the nodes whose tensors are read outside.
        """
        module = _as_module(nodes, inputs, outputs)
        shapes = _shapes(inputs)
        key = hashlib.sha256(f"{module.code}{shapes}".encode()).hexdigest()
        if key not in self._libraries:
            _LOG.info("Inductor compiles %s", ", ".join(_name(node) for node in nodes))
            self._libraries[key] = _compile(module, inputs)
        return self._libraries[key]


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _as_module(
    nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]
) -> GraphModule:
    graph, copies = torch.fx.Graph(), {}
    for index, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"x{index}")
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(torch.nn.Module(), graph)


def _example(node: Node) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor), f"{node} is not a tensor"
    return value


def _shapes(inputs: Sequence[Node]) -> list[tuple[object, ...]]:
    """Sizes, strides and dtypes of the inputs.

    Sizes that differ from step to step are numbered in order of appearance. So a piece of the last
    layer, which has rows only for the wanted logits, equals the same piece of another layer.
    """
    numbers: dict[str, str] = {}

    def name(size: int | torch.SymInt) -> object:
        if isinstance(size, int):
            return size
        return numbers.setdefault(str(size), f"size {len(numbers)}")

    return [
        (*map(name, value.shape), *map(name, value.stride()), value.dtype)
        for value in map(_example, inputs)
    ]


def _compile(module: GraphModule, inputs: Sequence[Node]) -> bytes:
    from torch._inductor import aot_compile
    from torch.export import Dim, export

    examples, marks, sizes = [], [], {}
    for node in inputs:
        fake = _example(node)
        shape, strides = [_hint(size) for size in fake.shape], [_hint(s) for s in fake.stride()]
        examples.append(torch.empty_strided(shape, strides, dtype=fake.dtype).zero_())
        mark = {}
        for index, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                name = f"size_{size}"
                sizes.setdefault(name, Dim(name, min=1, max=_MOST_TOKENS))
                mark[index] = sizes[name]
        marks.append(mark)
    program = export(module, tuple(examples), dynamic_shapes=tuple(marks), strict=False)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as directory:
        path = str(Path(directory) / "piece.so")
        options = {**_OPTIONS, "aot_inductor.output_path": path}
        written = aot_compile(program.module(), tuple(examples), options=options)
        return Path(str(written)).read_bytes()


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
