"""Starts Triton kernels before the previous kernel of their stream has ended.

Compute capability 9.0 has this as "programmatic dependent launch" (CUDA C++ Programming Guide,
section of that name). A kernel says that the next one may start. The programs of the next kernel
run up to `wait_for_previous_kernel`. There each waits until the previous kernel has ended and its
results can be read. So the time to start a kernel is hidden, about a microsecond for each. A
captured CUDA graph keeps this behaviour.

A kernel that is launched with `launch_pdl` must call `wait_for_previous_kernel` before it reads
what another kernel of a step has written, and before it writes anything. It may read weights before
that, because no kernel of a step writes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ("prefetch", "starts_early", "wait_for_previous_kernel")


def starts_early(device: torch.device) -> bool:
    """Whether the device can start a kernel before the previous one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous_kernel(EARLY: tl.constexpr):
    """Allow the next kernel to start, and wait for the end of the previous one.

    EARLY is False for a kernel that is not launched with `launch_pdl`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Load the cache lines at these addresses into the device's cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
