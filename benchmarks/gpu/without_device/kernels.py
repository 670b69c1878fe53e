"""Compiles the Triton kernels of a program, Inductor's and ours, for a GPU that is absent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from triton.runtime.jit import JITFunction, MockTensor

from ostinato.benchmarks.gpu.without_device.fake_device import replaced
from ostinato.benchmarks.machine.kernel_resources import Resources, read_resources

__all__ = ("OwnLaunch", "compile_inductor_kernel", "inductor_resources", "recorded_launches")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLaunch:
    """A launch of one of our kernels."""

    name: str
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    compiled: Any  # Triton's kernel
    arch: int

    @property
    def num_programs(self) -> int:
        return math.prod(self.grid)

    @property
    def resources(self) -> Resources:
        """The resources, as the assembler reports them. This needs the PTX of the kernel.

        A kernel that comes from a bundle has no PTX.
        """
        return _resources(self.compiled, self.arch)


@contextmanager
def recorded_launches(arch: int) -> Iterator[list[OwnLaunch]]:
    """In this context a Triton kernel that is launched is compiled and listed, not run.

    Args:
        arch: the compute capability as one number.
    """
    launches: list[OwnLaunch] = []
    run: Any = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        mocked = [MockTensor(x.dtype) if isinstance(x, Tensor) else x for x in args]
        compiled = run(kernel, *mocked, grid=grid, warmup=True, **constants)
        launches.append(
            OwnLaunch(
                name=kernel.fn.__name__,
                grid=tuple(map(int, grid)),
                constants=constants,
                compiled=compiled,
                arch=arch,
            )
        )
        return compiled

    with replaced(JITFunction, run=record):
        yield launches


def inductor_resources(name: str, source: str, arch: int) -> list[Resources]:
    """The resources of a kernel that Inductor wrote, for each configuration that it may choose.

    Args:
        name: the name of the kernel.
        source: the text of its Python module.
        arch: the compute capability as one number.
    """
    return [_resources(compiled, arch) for compiled in compile_inductor_kernel(name, source)]


def compile_inductor_kernel(name: str, source: str) -> list[Any]:
    """Compile a kernel that Inductor wrote, for each configuration that it may choose.

    Args:
        name: the name of the kernel.
        source: the text of its Python module.

    Returns:
        Triton's kernels.
    """
    # Kernels of the static launcher do not keep their PTX, which `_resources` reads.
    with inductor_config.patch(use_static_triton_launcher=False):
        kernel: Any = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)
    return [result.kernel for result in kernel.compile_results]


def _resources(compiled: Any, arch: int) -> Resources:
    metadata = compiled.metadata
    return read_resources(compiled.asm["ptx"], metadata.shared, metadata.num_warps, arch)
