"""The smallest Triton kernel, for tests of what compiling one looks like."""

import triton
from triton import language as tl


@triton.jit
def add_one(pointer):
    tl.store(pointer, tl.load(pointer) + 1.0)
