"""A minimal Triton kernel, for tests that compile one."""

import triton
from triton import language as tl


@triton.jit
def add_one(pointer):
    tl.store(pointer, tl.load(pointer) + 1.0)
