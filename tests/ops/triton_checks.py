"""Compiles Triton kernels without a GPU, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.benchmarks.machine.kernel_resources import Resources, read_resources

__all__ = ("compiled_kernel",)

_CAPABILITY = 90
_OPTIONS = ("num_warps", "num_stages")
_COUNTS = ("num_parts", "num_rows")  # Triton does not specialise for their values
_INTEGERS = (*_COUNTS, "x_stride", "residual_stride")
_OPTIONAL = {
    "bias",
    "residual",
    "order",
    "given",
    "squares",
    "scaled",
    "new_squares",
    "norm_weight",
}


def compiled_kernel(
    kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str]
) -> Resources:
    """Compile a kernel for compute capability 9.0.

    Args:
        kernel: the decorated function.
        constants: of the launch, with num_warps and num_stages.
        types: Triton's names of the pointers' types; an optional argument without one is None.
    """
    options = {name: constants[name] for name in _OPTIONS if name in constants}
    absent = _OPTIONAL & set(kernel.arg_names) - types.keys()
    values = {name: value for name, value in constants.items() if name not in _OPTIONS}
    values |= dict.fromkeys(absent)
    known = dict.fromkeys(_INTEGERS, "i32") | dict(types)
    signature = {name: "constexpr" if name in values else known[name] for name in kernel.arg_names}
    # As at a launch: data pointers and strides are multiples of 16.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and name not in _COUNTS
    }
    source = ASTSource(kernel, signature, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", _CAPABILITY, 32)
    found: Any = triton.compile(source, target=target, options=options)
    warps = options["num_warps"]
    return read_resources(found.asm["ptx"], found.metadata.shared, warps, _CAPABILITY)
